"""From a region of a tensor back to the regions of sources that it consists of.

The graph of a tensor is walked from the tensor down to its leaves, with a *view*: a box of the
current node, and how its axes lie in the tensor that was asked about. A concatenation passes on
the parts of the box that its parts have, a slice shifts the box, a permutation permutes it. At a
leaf, the box is what to read and the view says where it goes. The cost depends on how many pieces
are asked for, never on the size of tensors, and parts that nobody wants are never looked at.

Only a reshape that moves elements between axes needs more: what arrives below it is brought up
again, cut where a box below is no box above.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

from remesh.geometry import Box
from remesh.transform.order import (
    Permute,
    Reshape,
    Shape,
    Step,
    Steps,
    append,
    inverse,
    inverse_order,
    matching_boxes,
    take,
    trace,
)
from remesh.transform.tensors import (
    Concatenated,
    Converted,
    Leaf,
    Node,
    Permuted,
    Reshaped,
    Sliced,
    Tied,
    Usable,
    is_usable,
)


class Origin(NamedTuple):
    """A box of a source and where it goes.

    Attributes:
        leaf: The source.
        source_box: What of it.
        steps: How its elements are rearranged.
        box: Where it goes, in the tensor that was asked for.
        dtypes: What its elements are converted to, in this order.
        is_check: Whether the place is already filled by another piece, which must be equal.
    """

    leaf: Leaf
    source_box: Box
    steps: Steps
    box: Box
    dtypes: tuple[str, ...]
    is_check: bool


class _View(NamedTuple):
    """A box of a node and how it lies in the tensor that was asked for.

    Attributes:
        offset: Offset of the box in the node.
        extents: Shape of the box in the node.
        order: For each axis of the tensor, which axis of the node it is; -1 if the node has no
            such axis, which then has extent 1.
        shift: For each axis of the tensor, what is added to the offset in the node.
    """

    offset: Shape
    extents: Shape
    order: Shape
    shift: Shape

    def with_axis(self, axis: int, offset: int, extent: int, moved: int) -> _View:
        """Another range of one axis, which lies `moved` further on in the tensor."""
        offsets, extents, order, shift = self
        if axis in order:
            place = order.index(axis)
            shift = (*shift[:place], shift[place] + moved, *shift[place + 1 :])
        return _View(
            (*offsets[:axis], offset, *offsets[axis + 1 :]),
            (*extents[:axis], extent, *extents[axis + 1 :]),
            order,
            shift,
        )

    def place(self, offset: Shape, extents: Shape) -> Box:
        """Where a box of the node lies in the tensor."""
        pairs = zip(self.order, self.shift, strict=True)
        return Box(
            tuple(by if axis < 0 else offset[axis] + by for axis, by in pairs),
            tuple(1 if axis < 0 else extents[axis] for axis in self.order),
        )


class _Route(NamedTuple):
    """What does not depend on boxes on the way from the tensor to a node."""

    usable: Usable
    dtypes: tuple[str, ...]
    is_check: bool


def pieces(node: Node, box: Box, usable: Usable) -> list[Origin]:
    """The pieces of sources that make up a box of a tensor.

    The boxes of pieces that are not checks are disjoint and cover the box exactly.

    Args:
        node: The tensor.
        box: What of it is wanted.
        usable: Which sources may be read. Of tied tensors, those that consist of such are used;
            all sources are used where no tensors are tied.
    """
    found: list[Origin] = []
    if 0 not in box.shape:
        axes = tuple(range(box.ndim))
        view = _View(box.offset, box.shape, axes, (0,) * box.ndim)
        _walk(node, view, _Route(usable, (), False), found)
    return found


def leaves(node: Node) -> tuple[Leaf, ...]:
    """The sources that a tensor is made of, tied alternatives included, each once.

    Only what the tensor really holds counts: a slice of a concatenation does not depend on the
    parts that it leaves out.
    """
    if isinstance(node, Leaf):
        return (node,)
    found: dict[Leaf, None] = {}
    seen: set[int] = set()
    stack: list[Node] = [node]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case Leaf():
                found[node] = None
            case Concatenated():
                stack += reversed(node.parts)
            case Tied():
                stack += reversed(node.nodes)
            case Sliced() if not isinstance(node.node, Leaf) and 0 not in node.shape:
                part = pieces(node, Box.whole(node.shape), lambda _leaf: True)
                found.update(dict.fromkeys(origin.leaf for origin in part))
            case _:
                stack.append(node.node)
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# The walk
# ---------------------------------------------------------------------------------------------


def _walk(node: Node, view: _View, route: _Route, found: list[Origin]) -> None:
    while True:
        match node:
            case Leaf():
                source_box = Box(view.offset, view.extents)
                box = view.place(view.offset, view.extents)
                steps = _steps(view.order, len(view.extents), box.shape)
                found.append(Origin(node, source_box, steps, box, route.dtypes, route.is_check))
                return
            case Concatenated():
                _walk_parts(node, view, route, found)
                return
            case Sliced(child, axis, start):
                offset, extent = view.offset[axis] + start, view.extents[axis]
                view = view.with_axis(axis, offset, extent, -start)
                node = child
            case Permuted(child, order):
                view = _unpermuted(view, order)
                node = child
            case Converted(child, _, dtype):
                route = _Route(route.usable, (dtype, *route.dtypes), route.is_check)
                node = child
            case Reshaped(child, _, _, _, axes) if axes is not None:
                view = _with_axes(view, axes, len(child.shape))
                node = child
            case Reshaped():
                _walk_reshaped(node, view, route, found)
                return
            case Tied():
                _walk_tied(node, view, route, found)
                return


def _unpermuted(view: _View, order: Shape) -> _View:
    back = inverse_order(order)
    return _View(
        take(view.offset, back),
        take(view.extents, back),
        tuple(axis if axis < 0 else order[axis] for axis in view.order),
        view.shift,
    )


def _with_axes(view: _View, axes: Shape, num_axes: int) -> _View:
    """The view of a node that has other axes of extent 1; see `Reshaped.axes`."""
    offset, extents = [0] * num_axes, [1] * num_axes
    for axis, child_axis in enumerate(axes):
        if child_axis >= 0:
            offset[child_axis], extents[child_axis] = view.offset[axis], view.extents[axis]
    order = tuple(axis if axis < 0 else axes[axis] for axis in view.order)
    return _View(tuple(offset), tuple(extents), order, view.shift)


def _walk_parts(node: Concatenated, view: _View, route: _Route, found: list[Origin]) -> None:
    axis, starts = node.axis, node.starts
    begin = view.offset[axis]
    end = begin + view.extents[axis]
    number = bisect.bisect_right(starts, begin) - 1
    while number < len(starts) and starts[number] < end:
        part, start = node.parts[number], starts[number]
        low, high = max(begin, start), min(end, start + part.shape[axis])
        number += 1
        if low < high:
            _walk(part, view.with_axis(axis, low - start, high - low, start), route, found)


def _walk_tied(node: Tied, view: _View, route: _Route, found: list[Origin]) -> None:
    chosen = [child for child in node.nodes if is_usable(child, route.usable)] or [node.nodes[0]]
    _walk(chosen[0], view, route, found)
    for other in chosen[1:]:
        _walk(other, view, route._replace(is_check=True), found)


def _walk_reshaped(node: Reshaped, view: _View, route: _Route, found: list[Origin]) -> None:
    child = node.node
    for outer, inner in matching_boxes(Box(view.offset, view.extents), node.shape, child.shape):
        for below in pieces(child, inner, route.usable):
            for origin in _brought_up(below, inner, outer):
                place = view.place(origin.box.offset, origin.box.shape)
                steps = origin.steps
                for step in _steps(view.order, origin.box.ndim, place.shape):
                    steps = append(steps, step, origin.source_box.shape)
                dtypes = (*origin.dtypes, *route.dtypes)
                is_check = origin.is_check or route.is_check
                found.append(Origin(origin.leaf, origin.source_box, steps, place, dtypes, is_check))


@functools.lru_cache(maxsize=1024)
def _steps(order: Shape, num_axes: int, extents: Shape) -> Steps:
    """What brings a block of `num_axes` axes into the shape `extents`; see `_View.order`."""
    kept = [axis for axis in order if axis >= 0]
    steps: list[Step] = []
    if kept != sorted(kept):
        steps.append(Permute((*kept, *sorted(set(range(num_axes)) - set(kept)))))
    if len(kept) < max(num_axes, len(order)):
        steps.append(Reshape(extents))
    return tuple(steps)


# ---------------------------------------------------------------------------------------------
# Reshapes
# ---------------------------------------------------------------------------------------------


def _brought_up(origin: Origin, inner: Box, outer: Box) -> Iterator[Origin]:
    """What was found for a part of a reshaped node, as parts of the result.

    `inner` and `outer` hold the same elements in the same order, in the node and in the result.
    """
    place = origin.box.relative_to(inner)
    for within, result in matching_boxes(place, inner.shape, outer.shape):
        if within == place:
            steps = append(origin.steps, Reshape(result.shape), origin.source_box.shape)
            yield origin._replace(steps=steps, box=result.shift(outer.offset))
            continue
        for smaller in _cut(origin, within.shift(inner.offset)):
            yield from _brought_up(smaller, inner, outer)


def _cut(origin: Origin, part: Box) -> Iterator[Origin]:
    """What of an origin goes to a part of its box."""
    back = inverse(origin.steps, origin.source_box.shape)
    for begin, end, path in trace(part.relative_to(origin.box), origin.box.shape, back):
        yield origin._replace(
            source_box=end.shift(origin.source_box.offset),
            steps=inverse(path, begin.shape),
            box=begin.shift(origin.box.offset),
        )
