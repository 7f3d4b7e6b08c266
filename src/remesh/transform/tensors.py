"""Tensors as expressions over sources, and how a region of one is found in the sources.

Executing statements computes nothing: it builds, for every name, a small graph of nodes whose
leaves are source tensors. Each node knows its shape and dtype. Asked for a box of a tensor,
`pieces` walks the graph downwards: a concatenation asks those of its parts that the box touches, a
slice shifts the box, a permutation permutes it. What arrives at the leaves are the boxes to read,
and on the way back each is given its place in the box that was asked for. So the cost depends on
what is asked for, never on the size of tensors, and parts that nobody wants are never looked at.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from remesh.geometry import Box
from remesh.transform.order import (
    Permute,
    Reshape,
    Shape,
    Steps,
    append,
    inverse,
    inverse_order,
    matching_boxes,
    permuted,
    take,
    trace,
)

MAX_DEPTH = 150


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A source tensor. The dtype is None if the source has only the optimizer state of it."""

    name: str
    shape: Shape
    dtype: str | None
    depth: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Concatenated:
    """Parts one after the other along an axis; `starts` is where each begins."""

    parts: tuple[Node, ...]
    axis: int
    starts: tuple[int, ...]
    shape: Shape
    dtype: str | None
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """A range of an axis, beginning at `start`."""

    node: Node
    axis: int
    start: int
    shape: Shape
    dtype: str | None
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Permuted:
    """Axis i is axis `order[i]` of the node."""

    node: Node
    order: tuple[int, ...]
    shape: Shape
    dtype: str | None
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped:
    """The node's elements, in row-major order, in another shape."""

    node: Node
    shape: Shape
    dtype: str | None
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The node's elements converted to `dtype`."""

    node: Node
    shape: Shape
    dtype: str
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Tied:
    """Any of several nodes of equal shape that must hold equal values."""

    nodes: tuple[Node, ...]
    shape: Shape
    dtype: str | None
    depth: int


Node = Leaf | Concatenated | Sliced | Permuted | Reshaped | Converted | Tied


# ---------------------------------------------------------------------------------------------
# Building, in the simplest form
# ---------------------------------------------------------------------------------------------


def concatenated(parts: tuple[Node, ...], axis: int) -> Node:
    """Parts that agree in all axes but one, along that one."""
    if len(parts) == 1:
        return parts[0]
    ends = list(itertools.accumulate(part.shape[axis] for part in parts))
    shape = (*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1 :])
    depth = 1 + max(part.depth for part in parts)
    dtype = next((part.dtype for part in parts if part.dtype is not None), None)
    return Concatenated(parts, axis, (0, *ends[:-1]), shape, dtype, depth)


def sliced(node: Node, axis: int, start: int, extent: int) -> Node:
    """`extent` rows of an axis from `start`."""
    if extent == node.shape[axis]:
        return node
    shape = (*node.shape[:axis], extent, *node.shape[axis + 1 :])
    if isinstance(node, Sliced) and node.axis == axis:
        start += node.start
        node = node.node
    return Sliced(node, axis, start, shape, node.dtype, node.depth + 1)


def permute(node: Node, order: tuple[int, ...]) -> Node:
    """Axes in another order."""
    if isinstance(node, Permuted):
        order = take(node.order, order)
        node = node.node
    if order == tuple(range(len(order))):
        return node
    return Permuted(node, order, take(node.shape, order), node.dtype, node.depth + 1)


def reverse_axes(node: Node) -> Node:
    """All axes in reverse order."""
    return permute(node, tuple(reversed(range(len(node.shape)))))


def reshape(node: Node, shape: Shape) -> Node:
    """Another shape of as many elements."""
    while isinstance(node, Reshaped):
        node = node.node
    if shape == node.shape:
        return node
    return Reshaped(node, shape, node.dtype, node.depth + 1)


def convert(node: Node, dtype: str) -> Node:
    """Another dtype."""
    return node if node.dtype == dtype else Converted(node, node.shape, dtype, node.depth + 1)


def tied(nodes: tuple[Node, ...]) -> Node:
    """Nodes that are asserted to be equal."""
    flat = (child for node in nodes for child in (node.nodes if isinstance(node, Tied) else [node]))
    nodes = tuple(dict.fromkeys(flat))
    if len(nodes) == 1:
        return nodes[0]
    depth = 1 + max(node.depth for node in nodes)
    dtype = next((node.dtype for node in nodes if node.dtype is not None), None)
    return Tied(nodes, nodes[0].shape, dtype, depth)


def without_conversions(node: Node) -> Node:
    """The node under any conversions at its top."""
    while isinstance(node, Converted):
        node = node.node
    return node


# ---------------------------------------------------------------------------------------------
# From a region back to the sources
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
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
    dtypes: tuple[str, ...] = ()
    is_check: bool = False


Usable = Callable[[Leaf], bool]


def pieces(node: Node, box: Box, usable: Usable) -> Iterator[Origin]:
    """The pieces of sources that make up a box of a tensor.

    The boxes of pieces that are not checks are disjoint and cover the box exactly.

    Args:
        node: The tensor.
        box: What of it is wanted.
        usable: Which sources may be read. Of tied tensors, those that consist of such are used;
            all sources are used where no tensors are tied.
    """
    if 0 in box.shape:
        return
    match node:
        case Leaf():
            yield Origin(node, box, (), box)
        case Concatenated():
            yield from _of_concatenated(node, box, usable)
        case Sliced(child, axis, start):
            for piece in pieces(child, _moved(box, axis, start), usable):
                yield replace(piece, box=_moved(piece.box, axis, -start))
        case Permuted(child, order):
            for piece in pieces(child, permuted(box, inverse_order(order)), usable):
                steps = append(piece.steps, Permute(order), piece.source_box.shape)
                yield replace(piece, steps=steps, box=permuted(piece.box, order))
        case Reshaped(child, shape):
            for outer, inner in matching_boxes(box, shape, child.shape):
                for piece in pieces(child, inner, usable):
                    yield from _reshaped(piece, inner, outer)
        case Converted(child, _, dtype):
            for piece in pieces(child, box, usable):
                yield replace(piece, dtypes=(*piece.dtypes, dtype))
        case Tied():
            yield from _of_tied(node, box, usable)


def _moved(box: Box, axis: int, by: int) -> Box:
    offset = (*box.offset[:axis], box.offset[axis] + by, *box.offset[axis + 1 :])
    return Box(offset, box.shape)


def _of_concatenated(node: Concatenated, box: Box, usable: Usable) -> Iterator[Origin]:
    axis = node.axis
    begin, end = box.offset[axis], box.offset[axis] + box.shape[axis]
    number = bisect.bisect_right(node.starts, begin) - 1
    while number < len(node.parts) and node.starts[number] < end:
        part, start = node.parts[number], node.starts[number]
        low, high = max(begin, start), min(end, start + part.shape[axis])
        number += 1
        if low >= high:
            continue
        offset = (*box.offset[:axis], low - start, *box.offset[axis + 1 :])
        extents = (*box.shape[:axis], high - low, *box.shape[axis + 1 :])
        for piece in pieces(part, Box(offset, extents), usable):
            yield replace(piece, box=_moved(piece.box, axis, start))


def _reshaped(piece: Origin, inner: Box, outer: Box) -> Iterator[Origin]:
    """A piece of a reshaped tensor's node, as pieces of the tensor itself.

    `inner` and `outer` hold the same elements in the same order, in the node and in the tensor.
    """
    place = piece.box.relative_to(inner)
    for within, result in matching_boxes(place, inner.shape, outer.shape):
        if within == place:
            steps = append(piece.steps, Reshape(result.shape), piece.source_box.shape)
            yield replace(piece, steps=steps, box=result.shift(outer.offset))
            continue
        part = within.shift(inner.offset)
        for smaller in _cut(piece, part):
            yield from _reshaped(smaller, inner, outer)


def _cut(piece: Origin, part: Box) -> Iterator[Origin]:
    """What of a piece goes to a part of its box."""
    back = inverse(piece.steps, piece.source_box.shape)
    for begin, end, path in trace(part.relative_to(piece.box), piece.box.shape, back):
        steps = inverse(path, begin.shape)
        yield replace(
            piece,
            source_box=end.shift(piece.source_box.offset),
            steps=steps,
            box=begin.shift(piece.box.offset),
        )


def _of_tied(node: Tied, box: Box, usable: Usable) -> Iterator[Origin]:
    chosen = [child for child in node.nodes if is_usable(child, usable)] or [node.nodes[0]]
    yield from pieces(chosen[0], box, usable)
    for other in chosen[1:]:
        for piece in pieces(other, box, usable):
            yield replace(piece, is_check=True)


def is_usable(node: Node, usable: Usable) -> bool:
    """Whether a tensor can be made of usable sources."""
    known: dict[int, bool] = {}

    def ask(node: Node) -> bool:
        answer = known.get(id(node))
        if answer is None:
            match node:
                case Leaf():
                    answer = usable(node)
                case Concatenated(parts):
                    answer = all(map(ask, parts))
                case Tied(nodes):
                    answer = any(map(ask, nodes))
                case _:
                    answer = ask(node.node)
            known[id(node)] = answer
        return answer

    return ask(node)


def leaves(node: Node) -> tuple[Leaf, ...]:
    """The sources that a tensor is made of, tied alternatives included, each once.

    Only what the tensor really holds counts: a slice of a concatenation does not depend on the
    parts that it leaves out.
    """
    if isinstance(node, Leaf):
        return (node,)
    box = Box.whole(node.shape)
    if box.size == 0:
        return tuple(dict.fromkeys(_all_leaves(node)))
    return tuple(dict.fromkeys(piece.leaf for piece in pieces(node, box, lambda _leaf: True)))


def _all_leaves(node: Node) -> Iterator[Leaf]:
    seen: set[int] = set()
    stack: list[Node] = [node]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case Leaf():
                yield node
            case Concatenated(parts):
                stack += reversed(parts)
            case Tied(nodes):
                stack += reversed(nodes)
            case _:
                stack.append(node.node)
