"""What ranks say they hold: nothing is lost, and little is sent."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remesh.checkpoint.local_boxes import decode_local_boxes, encode_local_boxes
from remesh.geometry import Box
from remesh.planner import plan_save
from remesh.state import Role
from remesh.tables import BoxTable, TensorTable

sizes = st.one_of(st.integers(0, 9), st.integers(2**31 - 2, 2**31 + 2), st.just(2**62))


def table(names: list[str], offset: int, extent: int) -> BoxTable:
    shape = (2**63 - 1, 1)
    tensors = TensorTable.of([(name, "float32", shape) for name in names])
    return BoxTable.of(tensors, [(row, Box((offset, 0), (extent, 1))) for row in range(len(names))])


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), unique=True, max_size=3), sizes, sizes),
        min_size=1,
        max_size=4,
    )
)
def test_local_boxes_come_back(ranks: list[tuple[list[str], int, int]]) -> None:
    tables = [table(*rank) for rank in ranks]
    messages = [
        encode_local_boxes(boxes, np.full(len(boxes), Role.EQUAL, np.int64)) for boxes in tables
    ]
    found = decode_local_boxes(messages)
    for held, boxes in zip(found, tables, strict=True):
        assert held.boxes.tensors.names == boxes.tensors.names
        assert held.roles.tolist() == [Role.EQUAL] * len(boxes)
        for name, column in boxes.columns().items():
            again = held.boxes.columns()[name]
            assert again.dtype == column.dtype, name
            np.testing.assert_array_equal(again, column)
    shared = {id(held.boxes.tensors) for held in found}
    assert len(shared) == len({boxes.tensors.names for boxes in tables})


def test_ranks_of_one_model_are_planned_from_one_table() -> None:
    num_ranks, num_tensors = 64, 100
    tensors = TensorTable.of(
        [(f"layers.{row}.weight", "bfloat16", (num_ranks, 8)) for row in range(num_tensors)]
    )
    roles = np.full(num_tensors, Role.EQUAL, np.int64)
    messages = [
        encode_local_boxes(
            BoxTable.of(tensors, [(row, Box((rank, 0), (1, 8))) for row in range(num_tensors)]),
            roles,
        )
        for rank in range(num_ranks)
    ]
    # Names, and less than 40 bytes for each tensor and each box.
    names = sum(map(len, tensors.names))
    assert len(messages[0]) < 4096 + names + 2 * 40 * num_tensors
    local_boxes = decode_local_boxes(messages)
    assert len({id(held.boxes.tensors) for held in local_boxes}) == 1
    plan = plan_save(local_boxes)
    assert len(plan.boxes) == num_ranks * num_tensors
    assert plan.bytes_per_rank(num_ranks).tolist() == [num_tensors * 16] * num_ranks
