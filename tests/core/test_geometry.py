"""Boxes against brute force: sets of element numbers, and numpy's own indexing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.geometry import (
    Box,
    IntArray,
    boxes_of_flat_range,
    flat_span,
    subtract,
    uncovered,
)
from tests.strategies import Shape, boxes_in, shapes

SMALL = shapes(max_dims=4, max_extent=4)


def numbers(shape: Shape) -> IntArray:
    """A tensor whose elements are their flat numbers."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def elements(shape: Shape, box: Box) -> list[int]:
    """Flat numbers of the elements of a box, in the box's own order."""
    return [int(n) for n in numbers(shape)[box.slices].reshape(-1)]


def with_boxes(num_boxes: int) -> st.SearchStrategy[tuple[Shape, list[Box]]]:
    return SMALL.flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.lists(boxes_in(shape), min_size=num_boxes, max_size=num_boxes)
        )
    )


# ---------------------------------------------------------------------------------------------
# Box
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "shape"), [((0,), ()), ((), (1,)), ((-1, 0), (1, 1)), ((0, 0), (1, -1))]
)
def test_a_box_refuses_numbers_that_make_no_box(offset: Shape, shape: Shape) -> None:
    with pytest.raises(ValueError, match="a box"):
        Box(offset, shape)


def test_what_a_box_says_of_itself() -> None:
    box = Box((2, 0, 5), (3, 1, 4))
    assert (box.ndim, box.size, box.end) == (3, 12, (5, 1, 9))
    assert box.slices == (slice(2, 5), slice(0, 1), slice(5, 9))
    assert str(box) == "[2:5, 0:1, 5:9]"
    assert Box.from_slices((2, 5), (0, 1), (5, 9)) == box
    assert Box.from_slices((3, 1)).shape == (0,)
    assert Box.whole([2, 3]) == Box((0, 0), (2, 3))


@given(with_boxes(2))
def test_intersection_is_that_of_the_element_sets(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (a, b) = drawn
    common = a.intersect(b)
    expected = set(elements(shape, a)) & set(elements(shape, b))
    assert (common is None) == (not expected)
    assert common is None or set(elements(shape, common)) == expected
    assert common == b.intersect(a)
    assert a.contains(b) == (set(elements(shape, b)) <= set(elements(shape, a)))


@given(with_boxes(1), st.data())
def test_shifting_there_and_back(drawn: tuple[Shape, list[Box]], data: st.DataObject) -> None:
    shape, [box] = drawn
    by = data.draw(st.tuples(*[st.integers(0, 9) for _ in shape]))
    moved = box.shift(by)
    assert moved.offset == tuple(o + b for o, b in zip(box.offset, by, strict=True))
    assert moved.shift(by, -1) == box
    assert moved.relative_to(Box(by, shape)) == box


def test_relative_to_refuses_what_begins_before() -> None:
    with pytest.raises(ValueError, match="negative"):
        Box((1,), (2,)).relative_to(Box((2,), (4,)))


# ---------------------------------------------------------------------------------------------
# Subtracting
# ---------------------------------------------------------------------------------------------


@given(with_boxes(2))
def test_subtract_leaves_exactly_the_other_elements(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (box, hole) = drawn
    rest = subtract(box, hole)
    found = [n for part in rest for n in elements(shape, part)]
    assert len(found) == len(set(found))
    assert set(found) == set(elements(shape, box)) - set(elements(shape, hole))
    assert all(part.size for part in rest)
    assert len(rest) <= max(2 * len(shape), 1)


@given(SMALL.flatmap(lambda s: st.tuples(st.just(s), st.lists(boxes_in(s), max_size=5))))
def test_uncovered_is_what_no_box_has(drawn: tuple[Shape, list[Box]]) -> None:
    shape, boxes = drawn
    found = [n for hole in uncovered(Box.whole(shape), boxes) for n in elements(shape, hole)]
    covered = {n for box in boxes for n in elements(shape, box)}
    assert len(found) == len(set(found))
    assert set(found) == set(range(math.prod(shape))) - covered


# ---------------------------------------------------------------------------------------------
# Flat order
# ---------------------------------------------------------------------------------------------

FLAT_SHAPES = [
    (),
    (1,),
    (7,),
    (1, 1),
    (3, 5),
    (5, 1),
    (1, 6),
    (2, 3, 4),
    (4, 1, 3),
    (1, 2, 1),
    (2, 2, 2, 2),
    (3, 2, 1, 4),
    (2, 3, 2, 3),
]


@pytest.mark.parametrize("shape", FLAT_SHAPES, ids=str)
def test_boxes_of_every_flat_range(shape: Shape) -> None:
    size = math.prod(shape)
    most = max(2 * len(shape) - 1, 1)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        boxes = boxes_of_flat_range(shape, start, stop)
        # The elements of the boxes, in order, are the elements of the range, in order.
        assert [n for box in boxes for n in elements(shape, box)] == list(range(start, stop))
        assert all(box.size and flat_span(shape, box)[2] for box in boxes), (start, stop)
        assert len(boxes) <= most, (start, stop)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_the_flat_range_of_an_empty_tensor_has_no_boxes(shape: Shape) -> None:
    assert boxes_of_flat_range(shape, 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 7), (7, 7)])
def test_a_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"{start}:{stop} does not lie in a tensor of 6"):
        boxes_of_flat_range((2, 3), start, stop)
