"""Coverage against brute force: how often each element is held, counted in an array."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remesh.core import coverage
from remesh.core.coverage import check_coverage
from remesh.core.geometry import Box
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CoverageError
from tests.strategies import Shape, boxes_in, cells, partitions, shapes

SMALL = shapes(max_dims=4, max_extent=4)
Drawn = tuple[Shape, list[Box]]


def table_of(tensors: list[Drawn]) -> BoxTable:
    """A table of tensors named t0, t1, ... with their boxes, sorted as `plan_save` sorts them."""
    rows = [(f"t{number}", "int8", shape) for number, (shape, _) in enumerate(tensors)]
    boxes = [
        (number, box) for number, (_, boxes) in enumerate(tensors) for box in sorted(set(boxes))
    ]
    return BoxTable.of(TensorTable.of(rows), boxes)


def counts(shape: Shape, boxes: list[Box]) -> npt.NDArray[np.int64]:
    """How many of the distinct boxes hold each element."""
    held = np.zeros(shape, dtype=np.int64)
    for box in set(boxes):
        held[box.slices] += 1
    return held


def is_exact(drawn: Drawn) -> bool:
    return bool((counts(*drawn) == 1).all())


def check(tensors: list[Drawn]) -> None:
    check_coverage(table_of(tensors), lambda row: f"rank {row}")


@st.composite
def damaged_partitions(draw: st.DrawFn) -> Drawn:
    """A partition of a tensor with perhaps a box too few, too many, or in the wrong place."""
    shape = draw(SMALL)
    boxes = draw(partitions(shape))
    for damage in draw(st.lists(st.sampled_from(["drop", "add", "replace"]), max_size=2)):
        if damage != "add" and boxes:
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if damage != "drop":
            boxes.append(draw(boxes_in(shape, min_extent=1)))
    return shape, boxes


@given(st.lists(damaged_partitions(), min_size=1, max_size=3))
# A hole and an overlap of one size, in boxes that neither chain nor grid can decide.
@example([((3, 3), [Box((0, 0), (1, 3)), Box((1, 0), (2, 2)), Box((1, 1), (2, 1))])])
def test_the_verdict_is_that_of_brute_force(tensors: list[Drawn]) -> None:
    faulty = [number for number, drawn in enumerate(tensors) if not is_exact(drawn)]
    if not faulty:
        check(tensors)
        return
    with pytest.raises(CoverageError) as caught:
        check(tensors)
    summary, *lines = str(caught.value).splitlines()
    assert summary.startswith(f"{len(faulty)} of {len(tensors)} tensors are not covered exactly")
    for number, line in zip(faulty, lines, strict=True):
        held = counts(*tensors[number])
        assert line.startswith(f"  t{number} {tensors[number][0]}: ")
        assert ("no rank holds " in line) == bool((held == 0).any())
        assert ("these overlap: " in line) == bool((held > 1).any())


def test_a_pinwheel_is_exact() -> None:
    # Four bars around a middle: no cut goes through, so only the search can tell.
    wheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    check([((3, 3), wheel)])


def test_empty_tensors_and_scalars() -> None:
    check([((0, 3), []), ((), [Box.whole(())]), ((1, 1), [Box.whole((1, 1))])])
    with pytest.raises(CoverageError, match=r"  t1 \(\): no rank holds \[\]"):
        check([((0, 3), []), ((), [])])


def test_a_large_grid_is_decided_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_overlaps", lambda *_: pytest.fail("searched"))
    side = 40
    grid = cells([range(0, 2 * side + 1, 2), range(0, 3 * side + 1, 3)])
    assert len(grid) == side * side
    check([((2 * side, 3 * side), grid), ((math.prod((2, 3)),), [Box((0,), (6,))])])
