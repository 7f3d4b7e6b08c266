"""Boxes traced through permutations and reshapes, against numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh.core.geometry import Box
from remesh.transform.rearrange import (
    Permute,
    Rearrangement,
    Reshape,
    append,
    inverse,
    matching_boxes,
    shape_after,
    trace,
)
from tests.strategies import Shape, boxes_in, shapes


def factors(size: int) -> list[Shape]:
    """Shapes of up to four axes with as many elements, axes of extent 1 included."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    found: set[Shape] = {(size,)} | {(n, size // n) for n in divisors}
    for n in divisors:
        found |= {(n, m, size // n // m) for m in divisors if (size // n) % m == 0}
    found |= {(*shape, 1) for shape in found} | ({()} if size == 1 else set())
    return sorted(shape for shape in found if math.prod(shape) == size)


@st.composite
def steps_for(draw: st.DrawFn, shape: Shape) -> Rearrangement:
    steps: list[Permute | Reshape] = []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(shape)))))
            steps.append(Permute(order))
        else:
            steps.append(Reshape(draw(st.sampled_from(factors(math.prod(shape))))))
        shape = shape_after(shape, (steps[-1],))
    return tuple(steps)


Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def applied(array: Numbers, steps: Rearrangement) -> Numbers:
    for step in steps:
        array = (
            array.transpose(step.order) if isinstance(step, Permute) else array.reshape(step.shape)
        )
    return array


@settings(deadline=None)
@given(st.data())
def test_matching_boxes_hold_the_same_elements_in_the_same_order(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_extent=6))
    other = data.draw(st.sampled_from(factors(math.prod(shape))))
    box = data.draw(boxes_in(shape))
    numbers = np.arange(math.prod(shape))
    one, two = numbers.reshape(shape), numbers.reshape(other)
    seen: list[int] = []
    for before, after in matching_boxes(box, shape, other):
        assert box.contains(before)
        found = one[before.slices].ravel().tolist()
        assert found == two[after.slices].ravel().tolist()
        seen += found
    assert sorted(seen) == sorted(one[box.slices].ravel().tolist())


def test_boxes_that_fit_are_not_cut() -> None:
    cut = matching_boxes
    assert cut(Box((2, 1), (2, 3)), (6, 4), (2, 3, 4)) == [
        (Box((2, 1), (1, 3)), Box((0, 2, 1), (1, 1, 3))),
        (Box((3, 1), (1, 3)), Box((1, 0, 1), (1, 1, 3))),
    ]
    assert cut(Box((3, 1), (3, 3)), (6, 4), (2, 3, 4)) == [
        (Box((3, 1), (3, 3)), Box((1, 0, 1), (1, 3, 3)))
    ]
    assert cut(Box((1, 0), (2, 4)), (3, 4), (3, 1, 4, 1)) == [
        (Box((1, 0), (2, 4)), Box((1, 0, 0, 0), (2, 1, 4, 1)))
    ]
    assert cut(Box.whole((512, 64, 64)), (512, 64, 64), (512 * 64, 64)) == [
        (Box.whole((512, 64, 64)), Box.whole((512 * 64, 64)))
    ]


@settings(deadline=None)
@given(st.data())
def test_parts_of_a_block_are_traced_through_its_steps(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_extent=6))
    steps = data.draw(steps_for(shape))
    box = data.draw(boxes_in(shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    result = applied(numbers, steps)
    seen: list[int] = []
    for begin, end, path in trace(box, shape, steps) if box.size else ():
        assert box.contains(begin)
        found = applied(numbers[begin.slices], path)
        np.testing.assert_array_equal(found, result[end.slices])
        seen += found.ravel().tolist()
    assert sorted(seen) == sorted(numbers[box.slices].ravel().tolist())


@settings(deadline=None)
@given(st.data())
def test_steps_undo_each_other(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_extent=6))
    steps = data.draw(steps_for(shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(applied(applied(numbers, steps), inverse(steps, shape)), numbers)


@settings(deadline=None)
@given(st.data())
def test_steps_are_kept_short(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_extent=6))
    steps = data.draw(steps_for(shape))
    short: Rearrangement = ()
    for step in steps:
        short = append(short, step, shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(applied(numbers, short), applied(numbers, steps))
    kinds = [type(step) for step in short]
    assert all(a is not b for a, b in itertools.pairwise(kinds))


def test_steps_that_cancel_vanish() -> None:
    steps: Rearrangement = ()
    for step in (Permute((1, 0)), Permute((1, 0)), Reshape((6,)), Reshape((2, 3))):
        steps = append(steps, step, (2, 3))
    assert steps == ()
