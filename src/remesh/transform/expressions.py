"""Tensors as expressions over sources.

Executing statements computes nothing: it builds, for every name, a small graph of nodes whose
leaves are source tensors. Each node knows its shape and dtype.

To find the regions of sources that a box of a tensor consists of, a node asks those that it is made
of for the boxes that make up its own, and says of what they answer where it goes in itself. A
concatenation asks for the parts of the box that its parts have, a slice shifts the box, a
permutation permutes it. The cost depends on how many pieces are asked for, never on the size of
tensors, and parts outside the box are never visited.

A reshape may make several boxes of one; so what is found below it is cut where a box below is no
box above.
"""

from __future__ import annotations

import bisect
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
    permuted,
    take,
    trace,
)

MAX_DEPTH = 150


class Origin(NamedTuple):
    """A box of a source and where it goes."""

    leaf: Leaf  # the source
    source_box: Box
    steps: Rearrangement  # how its elements are rearranged
    box: Box  # where it goes, in the requested tensor
    dtypes: tuple[str, ...]  # element types that its elements are converted to, in this order
    is_check: bool  # whether the place is already filled by another piece, which must be equal

    def moved(self, steps: Rearrangement, box: Box) -> Origin:
        """The same box of the source, which goes elsewhere."""
        return Origin(self.leaf, self.source_box, steps, box, self.dtypes, self.is_check)


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

    def origins(self, box: Box) -> list[Origin]:
        """The pieces of sources that make up a box, which is not empty, of this tensor.

        The boxes of pieces that are not checks are disjoint and cover the box exactly.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Leaf(Node):
    """A source tensor."""

    name: str

    @property
    def children(self) -> tuple[Node, ...]:
        return ()

    def origins(self, box: Box) -> list[Origin]:
        return [Origin(self, box, (), box, (), is_check=False)]


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

    def origins(self, box: Box) -> list[Origin]:
        axis, starts = self.axis, self.starts
        begin, end = box.offset[axis], box.offset[axis] + box.shape[axis]
        number = bisect.bisect_right(starts, begin) - 1
        found = []
        while number < len(starts) and starts[number] < end:
            part, start = self.parts[number], starts[number]
            low, high = max(begin, start), min(end, start + part.shape[axis])
            number += 1
            if low < high:
                inner = _with_range(box, axis, low - start, high - low)
                found += _moved(part.origins(inner), axis, start)
        return found


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

    def origins(self, box: Box) -> list[Origin]:
        axis, start = self.axis, self.start
        inner = _with_range(box, axis, box.offset[axis] + start, box.shape[axis])
        return _moved(self.node.origins(inner), axis, -start)


@dataclass(frozen=True, slots=True, eq=False)
class Permuted(_OfOne):
    """Axis i is axis `order[i]` of the node."""

    order: tuple[int, ...]

    def origins(self, box: Box) -> list[Origin]:
        order, step = self.order, Permute(self.order)
        return [
            origin.moved(
                append(origin.steps, step, origin.source_box.shape), permuted(origin.box, order)
            )
            for origin in self.node.origins(permuted(box, inverse_order(order)))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped(_OfOne):
    """The node's elements, in row-major order, in another shape."""

    def origins(self, box: Box) -> list[Origin]:
        return [
            origin
            for outer, inner in matching_boxes(box, self.shape, self.node.shape)
            for below in self.node.origins(inner)
            for origin in _mapped_up(below, inner, outer)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Converted(_OfOne):
    """The node's elements converted to `dtype`."""

    dtype: str

    def origins(self, box: Box) -> list[Origin]:
        return [
            origin._replace(dtypes=(*origin.dtypes, self.dtype))
            for origin in self.node.origins(box)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Tied(Node):
    """Any of several nodes of equal shape that must hold equal values."""

    nodes: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def origins(self, box: Box) -> list[Origin]:
        found = self.nodes[0].origins(box)
        others = (origin for other in self.nodes[1:] for origin in other.origins(box))
        return [*found, *(origin._replace(is_check=True) for origin in others)]


def _with_range(box: Box, axis: int, start: int, extent: int) -> Box:
    """A box with another range of one axis."""
    offset, shape = box.offset, box.shape
    return Box(
        (*offset[:axis], start, *offset[axis + 1 :]), (*shape[:axis], extent, *shape[axis + 1 :])
    )


def _moved(origins: list[Origin], axis: int, by: int) -> list[Origin]:
    """Origins that go to a place further on along an axis."""
    if not by:
        return origins
    moved = []
    for origin in origins:
        box = origin.box
        place = _with_range(box, axis, box.offset[axis] + by, box.shape[axis])
        moved.append(origin.moved(origin.steps, place))
    return moved


def _mapped_up(origin: Origin, inner: Box, outer: Box) -> Iterator[Origin]:
    """An origin of a part of a reshaped node, as origins of parts of the result.

    `inner` and `outer` hold the same elements in the same order, in the node and in the result.
    """
    if origin.box == inner:
        steps = append(origin.steps, Reshape(outer.shape), origin.source_box.shape)
        yield origin.moved(steps, outer)
        return
    place = origin.box.relative_to(inner)
    for within, result in matching_boxes(place, inner.shape, outer.shape):
        if within == place:
            steps = append(origin.steps, Reshape(result.shape), origin.source_box.shape)
            yield origin.moved(steps, result.shift(outer.offset))
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
    return Reshaped(shape, node.dtype, node.depth + 1, node)


def convert(node: Node, dtype: str) -> Node:
    """Another dtype."""
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
