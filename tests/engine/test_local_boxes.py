"""What ranks say they hold: nothing is lost, and little is sent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.checkpoint.local_boxes import decode_local_boxes, encode_local_boxes
from remesh.core import pieces
from remesh.core.geometry import Box, IntArray, boxes_of_flat_range
from remesh.core.state import Role
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CoverageError
from remesh.planner import LocalBoxes, plan_save

sizes = st.one_of(st.integers(0, 9), st.integers(2**31 - 2, 2**31 + 2), st.just(2**62))


def table(names: list[str], offset: int, extent: int) -> BoxTable:
    shape = (2**63 - 1, 1)
    tensors = TensorTable.of([(name, "float32", shape) for name in names])
    return BoxTable.of(tensors, [(row, Box((offset, 0), (extent, 1))) for row in range(len(names))])


def columns_of(boxes: BoxTable) -> dict[str, IntArray]:
    own = {"tensor": boxes.tensor, "offsets": boxes.offsets, "extents": boxes.extents}
    return boxes.tensors.columns() | own


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
        assert held.role_of_boxes.tolist() == [Role.EQUAL] * len(boxes)
        for name, column in columns_of(boxes).items():
            again = columns_of(held.boxes)[name]
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
    # One rank sends names, and a few numbers for what repeats; the others hardly anything.
    names = sum(map(len, tensors.names))
    assert len(messages[0].shared) < 8192 + names
    assert len({message.digest for message in messages}) == 1
    others = [msgspec.structs.replace(message, shared=b"") for message in messages[1:]]
    assert max(len(msgspec.msgpack.encode(message)) for message in others) < 100
    local_boxes = decode_local_boxes([messages[0], *others])
    assert len({id(held.boxes.tensors) for held in local_boxes}) == 1
    plan = plan_save(local_boxes)
    assert len(plan.cuts) == num_ranks * num_tensors
    assert plan.bytes_per_rank(num_ranks).tolist() == [num_tensors * 16] * num_ranks
    with pytest.raises(CoverageError, match=f"^{num_tensors} of {num_tensors} tensors"):
        plan_save(local_boxes[1:])  # all are named, though they were planned as one


def job_of(num_ranks: int, num_tensors: int) -> list[BoxTable]:
    """Two pipeline stages, in which tensors are cut in rows, in columns, in flat ranges, or not."""
    half = num_ranks // 2
    shape = (2 * half, 6)
    tables = []
    for rank in range(num_ranks):
        stage, place = divmod(rank, half)
        rows, names = [], []
        for number in range(num_tensors):
            if number % 2 != stage and number % 7:
                continue
            names.append((f"w{number}", "float32" if number % 5 else "int8", shape))
            row, kind = len(names) - 1, number // 2 % 4
            if kind == 0:
                rows.append((row, Box((place * 2, 0), (2, 6))))
            elif kind == 1 and place < 3:
                rows.append((row, Box((0, place * 2), (2 * half, 2))))
            elif kind == 2:
                flat = boxes_of_flat_range(shape, place * 12, place * 12 + 12)
                rows += [(row, box) for box in flat]
            elif kind == 3:
                rows.append((row, Box.whole(shape)))
        tables.append(BoxTable.of(TensorTable.of(names), rows))
    return tables


def local_boxes_of(tables: list[BoxTable]) -> list[LocalBoxes]:
    return decode_local_boxes(
        [encode_local_boxes(held, np.full(len(held), Role.EQUAL, np.int64)) for held in tables]
    )


def test_tensors_that_are_held_alike_are_planned_like_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "CHUNK_ROWS", 50)
    tables = job_of(48, 40)
    assert len({id(held.kind) for held in local_boxes_of(tables)}) == 4
    shared = plan_save(local_boxes_of(tables))
    each = [(held, np.full(len(held), Role.EQUAL, np.int64)) for held in tables]
    apart = plan_save([LocalBoxes.of(*pair) for pair in each])
    assert len(shared.copies.box) > 0
    for one, other in (
        *zip(
            columns_of(shared.cuts.boxes).values(),
            columns_of(apart.cuts.boxes).values(),
            strict=True,
        ),
        (shared.writers.rows, apart.writers.rows),
        (shared.row, apart.row),
        (shared.copies.box, apart.copies.box),
        (shared.copies.rank, apart.copies.rank),
        (shared.copies.row, apart.copies.row),
        *zip(shared.assignments(48), apart.assignments(48), strict=True),
    ):
        assert one.tolist() == other.tolist()
    assert shared.bytes_per_rank(48).tolist() == apart.bytes_per_rank(48).tolist()
    assert shared.index_of_holders(48).encode() == apart.index_of_holders(48).encode()
    for number, (rank, row) in enumerate(zip(shared.writers.rows, shared.row, strict=True)):
        assert tables[rank].box(row) == shared.cuts.boxes.box(number)
