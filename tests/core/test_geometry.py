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
    flat_spans,
    intersect_rows,
    pad_dims,
    ravel_offset,
    row_products,
    row_strides,
    strides_of,
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


def test_boxes_of_different_ndim_do_not_meet() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


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


@given(shapes(max_dims=5, max_extent=6))
def test_strides_are_numpys(shape: Shape) -> None:
    assert strides_of(shape) == tuple(s // 8 for s in numbers(shape).strides)


@given(shapes(min_dims=1), st.data())
def test_ravel_offset_is_the_element_number(shape: Shape, data: st.DataObject) -> None:
    offset = data.draw(st.tuples(*[st.integers(0, extent - 1) for extent in shape]))
    assert ravel_offset(offset, shape) == numbers(shape)[offset]


@given(SMALL.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape, min_extent=1))))
def test_flat_span_encloses_the_box_tightly(drawn: tuple[Shape, Box]) -> None:
    shape, box = drawn
    found = elements(shape, box)
    start, stop, contiguous = flat_span(shape, box)
    assert (start, stop) == (min(found), max(found) + 1)
    assert contiguous == (found == list(range(start, stop)))


# ---------------------------------------------------------------------------------------------
# Many boxes at once
# ---------------------------------------------------------------------------------------------


@st.composite
def rows_of_boxes(draw: st.DrawFn) -> list[tuple[Shape, Box, Box]]:
    """Shapes of different ndim, each with two non-empty boxes."""
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(SMALL)
        box = boxes_in(shape, min_extent=1)
        rows.append((shape, draw(box), draw(box)))
    return rows


@given(rows_of_boxes(), st.integers(4, 6))
def test_padded_rows_say_the_same_as_boxes(
    rows: list[tuple[Shape, Box, Box]], num_dims: int
) -> None:
    padded_shapes = pad_dims([shape for shape, _, _ in rows], num_dims, 1)
    offsets = pad_dims([box.offset for _, box, _ in rows], num_dims, 0)
    extents = pad_dims([box.shape for _, box, _ in rows], num_dims, 1)
    others = pad_dims([other.offset for _, _, other in rows], num_dims, 0)
    other_extents = pad_dims([other.shape for _, _, other in rows], num_dims, 1)

    assert row_products(extents).tolist() == [box.size for _, box, _ in rows]
    for row, (shape, _, _) in enumerate(rows):
        assert tuple(row_strides(padded_shapes)[row, : len(shape)].tolist()) == strides_of(shape)
    spans = zip(
        *(column.tolist() for column in flat_spans(padded_shapes, offsets, extents)), strict=True
    )
    assert list(spans) == [flat_span(shape, box) for shape, box, _ in rows]

    start, extent, meets = intersect_rows(offsets, extents, others, other_extents)
    for row, (shape, box, other) in enumerate(rows):
        common = box.intersect(other)
        assert bool(meets[row]) == (common is not None)
        if common is not None:
            ndim = len(shape)
            assert tuple(start[row].tolist()) == common.offset + (0,) * (num_dims - ndim)
            assert tuple(extent[row].tolist()) == common.shape + (1,) * (num_dims - ndim)


def test_no_rows() -> None:
    empty = pad_dims([], 3, 1)
    assert empty.shape == (0, 3)
    assert row_products(empty).tolist() == []
    assert [len(column) for column in flat_spans(empty, empty, empty)] == [0, 0, 0]
