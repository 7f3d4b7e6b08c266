"""Changes in the order of elements, and what they do to boxes.

The elements of a block reach their place in the target through *steps*: permutations of axes and
reshapes (row-major, as numpy and torch mean them). A step applies to a whole block. To move only a
part of a block, or to find out where a part goes, boxes are traced through the steps: a permutation
turns a box into a box; a reshape may turn it into several, so it is cut first into boxes that are
boxes on both sides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.core.geometry import Box, boxes_of_flat_range, flat_runs, flat_span

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Permute:
    """Axis i of the result is axis `order[i]` of the block."""

    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The elements in row-major order, as a block of this shape."""

    shape: Shape


Rearrangement = tuple[Permute | Reshape, ...]
"""Rearrangement, in this order."""


def take(items: Shape, order: Sequence[int]) -> Shape:
    """Items in another order."""
    return tuple(items[axis] for axis in order)


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    inverse = [0] * len(order)
    for axis, old in enumerate(order):
        inverse[old] = axis
    return tuple(inverse)


def permuted(box: Box, order: Sequence[int]) -> Box:
    """A box after a permutation of axes."""
    return Box(take(box.offset, order), take(box.shape, order))


def shape_after(shape: Shape, steps: Rearrangement) -> Shape:
    """The shape that steps make of a block of the given shape."""
    for step in steps:
        shape = take(shape, step.order) if isinstance(step, Permute) else step.shape
    return shape


def append(steps: Rearrangement, step: Permute | Reshape, shape: Shape) -> Rearrangement:
    """Steps with one more at their end, in the shortest form; `shape` is that before any step."""
    last = steps[-1] if steps else None
    if isinstance(step, Permute):
        order = step.order
        if isinstance(last, Permute):
            steps, order = steps[:-1], take(last.order, order)
        return steps if order == tuple(range(len(order))) else (*steps, Permute(order))
    if isinstance(last, Reshape):
        steps = steps[:-1]
    return steps if step.shape == shape_after(shape, steps) else (*steps, step)


def inverse(steps: Rearrangement, shape: Shape) -> Rearrangement:
    """The steps that undo others, which were applied to a block of the given shape."""
    undone: list[Permute | Reshape] = []
    for step in steps:
        if isinstance(step, Permute):
            undone.append(Permute(inverse_order(step.order)))
            shape = take(shape, step.order)
        else:
            undone.append(Reshape(shape))
            shape = step.shape
    return tuple(reversed(undone))


def trace(box: Box, shape: Shape, steps: Rearrangement) -> Iterator[tuple[Box, Box, Rearrangement]]:
    """Follow a part of a block through steps.

    Yields (part of the box, where it lies in the result, the steps that lead there), the parts
    disjoint and together the box. The steps apply to the part by itself.
    """
    if not steps:
        yield box, box, ()
        return
    step, rest = steps[0], steps[1:]
    if isinstance(step, Permute):
        back = inverse_order(step.order)
        result_shape = take(shape, step.order)
        for begin, end, path in trace(permuted(box, step.order), result_shape, rest):
            yield permuted(begin, back), end, (step, *path)
        return
    for before, after in matching_boxes(box, shape, step.shape):
        for begin, end, path in trace(after, step.shape, rest):
            if begin == after:
                yield before, end, (Reshape(after.shape), *path)
                continue
            # A later step cut the part. Begin again with what each cut was at the start.
            for _, smaller in matching_boxes(begin, step.shape, shape):
                yield from trace(smaller, shape, steps)


# ---------------------------------------------------------------------------------------------
# Reshapes
# ---------------------------------------------------------------------------------------------


def matching_boxes(box: Box, shape: Shape, other_shape: Shape) -> list[tuple[Box, Box]]:
    """Cut a box into parts that are boxes in another shape of the same elements too, in pairs.

    Axes are first grouped: shapes (6, 4) and (2, 3, 4) have the groups 6 = 2 x 3 and 4 = 4, and a
    box is the product of what it is in each group. Only within a group must anything be cut.
    """
    if box.size == 0:
        return []
    axes = _same_axes(shape, other_shape)
    if axes is not None:
        offset = tuple(0 if axis is None else box.offset[axis] for axis in axes)
        return [(box, Box(offset, tuple(1 if axis is None else box.shape[axis] for axis in axes)))]
    groups = []
    for (a, b), (c, d) in _groups(shape, other_shape):
        part = Box(box.offset[a:b], box.shape[a:b])
        groups.append(_match_group(part, shape[a:b], other_shape[c:d]))
    return [(_product(pairs, 0), _product(pairs, 1)) for pairs in itertools.product(*groups)]


@functools.lru_cache(maxsize=256)
def _same_axes(shape: Shape, other_shape: Shape) -> tuple[int | None, ...] | None:
    """For each axis of the other shape, None or the same axis; None if others than 1 differ."""
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    if take(shape, axes) != tuple(extent for extent in other_shape if extent != 1):
        return None
    remaining = iter(axes)
    return tuple(None if extent == 1 else next(remaining) for extent in other_shape)


def _product(pairs: Sequence[tuple[Box, Box]], side: int) -> Box:
    boxes = [pair[side] for pair in pairs]
    return Box(
        tuple(itertools.chain.from_iterable(box.offset for box in boxes)),
        tuple(itertools.chain.from_iterable(box.shape for box in boxes)),
    )


@functools.lru_cache(maxsize=256)
def _groups(
    shape: Shape, other_shape: Shape
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Smallest runs of axes on either side with equally many elements, without empty shapes."""
    assert math.prod(shape) == math.prod(other_shape) > 0
    groups = []
    begin = other_begin = 0
    while begin < len(shape) or other_begin < len(other_shape):
        end, other_end = begin, other_begin
        size, other_size = 1, 1
        while True:
            if size <= other_size and end < len(shape):
                size, end = size * shape[end], end + 1
            else:
                other_size, other_end = other_size * other_shape[other_end], other_end + 1
            if size == other_size and (end > begin or other_end > other_begin):
                break
        groups.append(((begin, end), (other_begin, other_end)))
        begin, other_begin = end, other_end
    return tuple(groups)


def _match_group(box: Box, shape: Shape, other_shape: Shape) -> list[tuple[Box, Box]]:
    """`matching_boxes` within one group of axes."""
    starts, length = flat_runs(shape, box)
    return [
        pair
        for start in starts.tolist()
        for pair in _common_boxes(shape, other_shape, start, start + length)
    ]


def _common_boxes(
    shape: Shape, other_shape: Shape, start: int, stop: int
) -> Iterator[tuple[Box, Box]]:
    """Cut a flat range into ranges that are boxes in both shapes."""
    boxes = boxes_of_flat_range(shape, start, stop)
    if len(boxes) == 1:
        others = boxes_of_flat_range(other_shape, start, stop)
        if len(others) == 1:
            yield boxes[0], others[0]
            return
        cuts, cut_shape = others, other_shape
    else:
        cuts, cut_shape = boxes, shape
    for cut in cuts:
        begin, end, _ = flat_span(cut_shape, cut)
        yield from _common_boxes(shape, other_shape, begin, end)
