"""Tensors as expressions over sources.

Executing statements computes nothing: it builds, for every name, a small graph of nodes whose
leaves are source tensors. Each node knows its shape and dtype.

To find the regions of sources that a box of a tensor consists of, the graph is walked from the
tensor down to its leaves, with a *view*: a box of the current node, and how its axes lie in the
tensor that was asked about. A concatenation passes on the parts of the box that its parts have, a
slice shifts the box, a permutation permutes it. At a leaf, the box is what to read and the view
says where it goes. The cost depends on how many pieces are asked for, never on the size of tensors,
and parts outside the box are never visited.

Only a reshape that moves elements between axes needs more: what is found below it is mapped up
again, cut where a box below is no box above.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from remesh.core.geometry import Box
from remesh.transform.rearrange import (
    Permute,
    Rearrangement,
    Reshape,
    Shape,
    append,
    inverse,
    inverse_order,
    matching_boxes,
    take,
    trace,
)

MAX_DEPTH = 150
EXACT_CASTS = {("float16", "float32"), ("bfloat16", "float32")}


class Origin(NamedTuple):
    """A box of a source and where it goes."""

    leaf: Leaf  # the source
    source_box: Box
    steps: Rearrangement  # how its elements are rearranged
    box: Box  # where it goes, in the requested tensor
    dtypes: tuple[str, ...]  # element types that its elements are converted to, in this order
    is_check: bool  # whether the place is already filled by another piece, which must be equal


class View(NamedTuple):
    """A box of a node and how it lies in the tensor that was asked for."""

    offset: Shape  # offset of the box in the node
    extents: Shape  # shape of the box in the node
    order: Shape
    """For each axis of the tensor, which axis of the node it is; -1 if the node has no such axis,
    which then has extent 1."""
    shift: Shape  # for each axis of the tensor, what is added to the offset in the node
    dtypes: tuple[str, ...]
    """Element types that elements of the node are converted to, in this order."""
    is_check: bool  # see `Origin`

    def with_axis(self, axis: int, offset: int, extent: int, moved: int) -> View:
        """Another range of one axis, which lies `moved` further on in the tensor."""
        offsets, extents, order, shift, dtypes, is_check = self
        if axis in order:
            place = order.index(axis)
            shift = (*shift[:place], shift[place] + moved, *shift[place + 1 :])
        return View(
            (*offsets[:axis], offset, *offsets[axis + 1 :]),
            (*extents[:axis], extent, *extents[axis + 1 :]),
            order,
            shift,
            dtypes,
            is_check,
        )

    def unpermuted(self, order: Shape) -> View:
        """The view of a node that is permuted by `order`."""
        back = inverse_order(order)
        return View(
            take(self.offset, back),
            take(self.extents, back),
            tuple(axis if axis < 0 else order[axis] for axis in self.order),
            self.shift,
            self.dtypes,
            self.is_check,
        )

    def with_axes(self, axes: Shape, num_axes: int) -> View:
        """The view of a node that has other axes of extent 1; see `Reshaped.axes`."""
        offset, extents = [0] * num_axes, [1] * num_axes
        for axis, child_axis in enumerate(axes):
            if child_axis >= 0:
                offset[child_axis], extents[child_axis] = self.offset[axis], self.extents[axis]
        order = tuple(axis if axis < 0 else axes[axis] for axis in self.order)
        return View(tuple(offset), tuple(extents), order, self.shift, self.dtypes, self.is_check)

    def place(self, box: Box) -> Box:
        """The box of the tensor that a box of the node is."""
        offset, extents = box.offset, box.shape
        pairs = zip(self.order, self.shift, strict=True)
        return Box(
            tuple(by if axis < 0 else offset[axis] + by for axis, by in pairs),
            tuple(1 if axis < 0 else extents[axis] for axis in self.order),
        )


# ---------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A tensor."""

    shape: Shape
    dtype: str | None
    """Its dtype; None if the sources have only the optimizer state of what it is made of."""
    depth: int  # how many operations are nested

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes that it is made of."""
        raise NotImplementedError

    def with_children(self, children: tuple[Node, ...]) -> Node:
        """The same of other nodes, as many and of the same shapes."""
        raise NotImplementedError

    def walk(self, view: View, found: list[Origin]) -> None:
        """Add the pieces of sources that make up the box of a view."""
        raise NotImplementedError

    def origins(self, box: Box) -> list[Origin]:
        """The pieces of sources that make up a box of this tensor.

        The boxes of pieces that are not checks are disjoint and cover the box exactly.
        """
        found: list[Origin] = []
        if 0 not in box.shape:
            axes = tuple(range(box.ndim))
            self.walk(View(box.offset, box.shape, axes, (0,) * box.ndim, (), False), found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Leaf(Node):
    """A source tensor."""

    name: str

    @property
    def children(self) -> tuple[Node, ...]:
        return ()

    def walk(self, view: View, found: list[Origin]) -> None:
        source_box = Box(view.offset, view.extents)
        box = view.place(source_box)
        steps = _rearrangement(view.order, len(view.extents), box.shape)
        found.append(Origin(self, source_box, steps, box, view.dtypes, view.is_check))


@dataclass(frozen=True, slots=True, eq=False)
class Concatenated(Node):
    """Parts one after the other along an axis; `starts` is where each begins."""

    parts: tuple[Node, ...]
    axis: int
    starts: tuple[int, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.parts

    def with_children(self, children: tuple[Node, ...]) -> Node:
        return replace(self, parts=children)

    def walk(self, view: View, found: list[Origin]) -> None:
        axis, starts = self.axis, self.starts
        begin = view.offset[axis]
        end = begin + view.extents[axis]
        number = bisect.bisect_right(starts, begin) - 1
        while number < len(starts) and starts[number] < end:
            part, start = self.parts[number], starts[number]
            low, high = max(begin, start), min(end, start + part.shape[axis])
            number += 1
            if low < high:
                part.walk(view.with_axis(axis, low - start, high - low, start), found)


@dataclass(frozen=True, slots=True, eq=False)
class _OfOne(Node):
    """A node that is made of one other."""

    node: Node

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.node,)

    def with_children(self, children: tuple[Node, ...]) -> Node:
        return replace(self, node=children[0])


@dataclass(frozen=True, slots=True, eq=False)
class Sliced(_OfOne):
    """A range of an axis, beginning at `start`."""

    axis: int
    start: int

    def walk(self, view: View, found: list[Origin]) -> None:
        axis, start = self.axis, self.start
        offset, extent = view.offset[axis] + start, view.extents[axis]
        self.node.walk(view.with_axis(axis, offset, extent, -start), found)


@dataclass(frozen=True, slots=True, eq=False)
class Permuted(_OfOne):
    """Axis i is axis `order[i]` of the node."""

    order: tuple[int, ...]

    def walk(self, view: View, found: list[Origin]) -> None:
        self.node.walk(view.unpermuted(self.order), found)


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped(_OfOne):
    """The node's elements, in row-major order, in another shape.

    If only axes of extent 1 came or went, `axes` says which axis of the node each axis is, -1
    being a new one; otherwise it is None.
    """

    axes: tuple[int, ...] | None

    def walk(self, view: View, found: list[Origin]) -> None:
        child = self.node
        if self.axes is not None:
            child.walk(view.with_axes(self.axes, len(child.shape)), found)
            return
        box = Box(view.offset, view.extents)
        for outer, inner in matching_boxes(box, self.shape, child.shape):
            for below in child.origins(inner):
                for origin in _mapped_up(below, inner, outer):
                    place = view.place(origin.box)
                    steps = origin.steps
                    for step in _rearrangement(view.order, origin.box.ndim, place.shape):
                        steps = append(steps, step, origin.source_box.shape)
                    dtypes = (*origin.dtypes, *view.dtypes)
                    is_check = origin.is_check or view.is_check
                    found.append(
                        Origin(origin.leaf, origin.source_box, steps, place, dtypes, is_check)
                    )


@dataclass(frozen=True, slots=True, eq=False)
class Converted(_OfOne):
    """The node's elements converted to `dtype`."""

    dtype: str

    def walk(self, view: View, found: list[Origin]) -> None:
        self.node.walk(view._replace(dtypes=(self.dtype, *view.dtypes)), found)


@dataclass(frozen=True, slots=True, eq=False)
class Tied(Node):
    """Any of several nodes of equal shape that must hold equal values."""

    nodes: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def walk(self, view: View, found: list[Origin]) -> None:
        self.nodes[0].walk(view, found)
        for other in self.nodes[1:]:
            other.walk(view._replace(is_check=True), found)


@functools.lru_cache(maxsize=1024)
def _rearrangement(order: Shape, num_axes: int, extents: Shape) -> Rearrangement:
    """The steps from a block of `num_axes` axes to the shape `extents`; see `View.order`."""
    kept = [axis for axis in order if axis >= 0]
    steps: list[Permute | Reshape] = []
    if kept != sorted(kept):
        steps.append(Permute((*kept, *sorted(set(range(num_axes)) - set(kept)))))
    if len(kept) < max(num_axes, len(order)):
        steps.append(Reshape(extents))
    return tuple(steps)


def _mapped_up(origin: Origin, inner: Box, outer: Box) -> Iterator[Origin]:
    """An origin of a part of a reshaped node, as origins of parts of the result.

    `inner` and `outer` hold the same elements in the same order, in the node and in the result.
    """
    place = origin.box.relative_to(inner)
    for within, result in matching_boxes(place, inner.shape, outer.shape):
        if within == place:
            steps = append(origin.steps, Reshape(result.shape), origin.source_box.shape)
            yield origin._replace(steps=steps, box=result.shift(outer.offset))
            continue
        for smaller in _cut(origin, within.shift(inner.offset)):
            yield from _mapped_up(smaller, inner, outer)


def _cut(origin: Origin, part: Box) -> Iterator[Origin]:
    """The parts of an origin that make up a part of its box."""
    back = inverse(origin.steps, origin.source_box.shape)
    for begin, end, path in trace(part.relative_to(origin.box), origin.box.shape, back):
        yield origin._replace(
            source_box=end.shift(origin.source_box.offset),
            steps=inverse(path, begin.shape),
            box=begin.shift(origin.box.offset),
        )


# ---------------------------------------------------------------------------------------------
# Building, in the simplest form
# ---------------------------------------------------------------------------------------------


def concatenated(parts: Sequence[Node], axis: int) -> Node:
    """Parts that agree in all axes but one, along that one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    ends = list(itertools.accumulate(part.shape[axis] for part in parts))
    shape = (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :])
    dtype, depth = _dtype_and_depth(parts)
    return Concatenated(shape, dtype, depth, tuple(parts), axis, (0, *ends[:-1]))


def sliced(node: Node, axis: int, start: int, extent: int) -> Node:
    """`extent` rows of an axis from `start`."""
    if extent == node.shape[axis]:
        return node
    shape = (*node.shape[:axis], extent, *node.shape[axis + 1 :])
    if isinstance(node, Sliced) and node.axis == axis:
        start += node.start
        node = node.node
    return Sliced(shape, node.dtype, node.depth + 1, node, axis, start)


def permute(node: Node, order: tuple[int, ...]) -> Node:
    """Axes in another order."""
    if isinstance(node, Permuted):
        order = take(node.order, order)
        node = node.node
    if order == tuple(range(len(order))):
        return node
    return Permuted(take(node.shape, order), node.dtype, node.depth + 1, node, order)


def reverse_axes(node: Node) -> Node:
    """All axes in reverse order."""
    return permute(node, tuple(reversed(range(len(node.shape)))))


def reshape(node: Node, shape: Shape) -> Node:
    """Another shape of as many elements."""
    while isinstance(node, Reshaped):
        node = node.node
    if shape == node.shape:
        return node
    return Reshaped(shape, node.dtype, node.depth + 1, node, _kept_axes(node.shape, shape))


def _kept_axes(old: Shape, new: Shape) -> tuple[int, ...] | None:
    axes = [axis for axis, extent in enumerate(old) if extent != 1]
    if tuple(old[axis] for axis in axes) != tuple(extent for extent in new if extent != 1):
        return None
    remaining = iter(axes)
    return tuple(-1 if extent == 1 else next(remaining) for extent in new)


def convert(node: Node, dtype: str) -> Node:
    """Another dtype; an exact conversion that is converted again is left out."""
    while isinstance(node, Converted) and (node.node.dtype, node.dtype) in EXACT_CASTS:
        node = node.node
    return node if node.dtype == dtype else Converted(node.shape, dtype, node.depth + 1, node)


def tied(nodes: Sequence[Node]) -> Node:
    """Nodes that are asserted to be equal."""
    flat = (child for node in nodes for child in (node.nodes if isinstance(node, Tied) else [node]))
    distinct = tuple(dict.fromkeys(flat))
    if len(distinct) == 1:
        return distinct[0]
    return Tied(distinct[0].shape, *_dtype_and_depth(distinct), distinct)


def _dtype_and_depth(nodes: Sequence[Node]) -> tuple[str | None, int]:
    dtype = next((node.dtype for node in nodes if node.dtype is not None), None)
    return dtype, 1 + max(node.depth for node in nodes)


# ---------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------


def leaves(node: Node) -> tuple[Leaf, ...]:
    """The sources that a tensor is made of, tied alternatives included, each once.

    Only what the tensor really holds counts: a slice of a concatenation does not depend on the
    parts that it leaves out.
    """
    found: dict[Leaf, None] = {}
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Leaf):
            found[node] = None
        elif isinstance(node, Sliced) and node.node.children and 0 not in node.shape:
            found.update((origin.leaf, None) for origin in node.origins(Box.whole(node.shape)))
        else:
            stack += reversed(node.children)
    return tuple(found)


def made_of(node: Node, names: Container[str]) -> Node | None:
    """A tensor without the tied alternatives that need other sources; None if nothing is left."""
    known: dict[Node, Node | None] = {}

    def reduced(node: Node) -> Node | None:
        if node not in known:
            known[node] = reduce(node)
        return known[node]

    def reduce(node: Node) -> Node | None:
        if isinstance(node, Leaf):
            return node if node.name in names else None
        children = tuple(child for child in map(reduced, node.children) if child is not None)
        if isinstance(node, Tied):
            return tied(children) if children else None
        return node.with_children(children) if len(children) == len(node.children) else None

    return reduced(node)


def without_conversions(node: Node) -> Node:
    """The node under any conversions at its top."""
    while isinstance(node, Converted):
        node = node.node
    return node
