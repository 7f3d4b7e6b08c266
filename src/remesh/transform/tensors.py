"""Tensors as expressions over sources.

Executing statements computes nothing: it builds, for every name, a small graph of nodes whose
leaves are source tensors. Each node knows its shape and dtype. `remesh.transform.regions` finds the
way from a box of a node back to boxes of its leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from remesh.transform.order import Shape, take

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
    """The node's elements, in row-major order, in another shape.

    If only axes of extent 1 came or went, `axes` says which axis of the node each axis is, -1
    being a new one; otherwise it is None.
    """

    node: Node
    shape: Shape
    dtype: str | None
    depth: int
    axes: tuple[int, ...] | None


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
    return Reshaped(node, shape, node.dtype, node.depth + 1, _kept_axes(node.shape, shape))


def _kept_axes(old: Shape, new: Shape) -> tuple[int, ...] | None:
    axes = [axis for axis, extent in enumerate(old) if extent != 1]
    if tuple(old[axis] for axis in axes) != tuple(extent for extent in new if extent != 1):
        return None
    remaining = iter(axes)
    return tuple(-1 if extent == 1 else next(remaining) for extent in new)


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


Usable = Callable[[Leaf], bool]


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
