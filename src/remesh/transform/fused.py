"""Fused projections: several tensors in one, interleaved block by block along an axis.

Both kinds of fused tensors are one scheme. Components (query, key, value; or gate, up) are counted
in heads, and the fused axis holds a number of equal blocks, each with its share of the heads of
every component, in order. For grouped-query attention a block is one key-value head with its query
heads; for tensor parallelism it is one rank. One block means one component after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from remesh.transform.expressions import Node, concatenated, sliced
from remesh.transform.messages import Problem
from remesh.transform.operators import (
    Ends,
    Operands,
    Operator,
    Value,
    attribute,
    check_alike,
    common_labels,
    full_axis,
    integer,
    positive,
)
from remesh.transform.syntax import Name, are_many
from remesh.transform.tensor_info import TensorInfo

MAX_BLOCKS = 65536


class _Fused(Operator):
    """Base of both kinds; the direction follows from the numbers of names."""

    __slots__ = ()
    num_components: ClassVar[int]
    may_reorder: ClassVar[bool] = False  # whether a fused tensor may become another one
    axis: int  # the fused axis

    @classmethod
    def check_names(cls, left: Sequence[Name], right: Sequence[Name]) -> None:
        counts = len(left), len(right)
        allowed = [(cls.num_components, 1), (1, cls.num_components)]
        allowed += [(1, 1)] if cls.may_reorder else []
        if counts not in allowed or any(are_many([name]) for name in (*left, *right)):
            forms = " or ".join(f"{a} -> {b}" for a, b in allowed)
            raise Problem(
                f"{cls.leads[0]} takes {forms} names, each written out, not "
                f"{counts[0]} -> {counts[1]}"
            )

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Heads of each component, given the extents of the tensors along the fused axis."""
        raise NotImplementedError

    def blocks(self, step: Operands, axis: int, ends: Ends) -> tuple[int, int]:
        """The numbers of blocks of a fused source and of a fused target."""
        raise NotImplementedError

    def apply(self, step: Operands, values: list[Value], ends: Ends) -> list[Value]:
        axis = full_axis(step, self.axis, len(values[0].node.shape))
        check_alike(step, values, axis)
        nodes = [value.node for value in values]
        heads = self.heads([node.shape[axis] for node in nodes])
        source_blocks, target_blocks = self.blocks(step, axis, ends)
        if len(nodes) == 1:
            nodes = _separated(nodes[0], axis, heads, source_blocks)
        else:
            _check_heads([node.shape[axis] for node in nodes], heads)
        if len(step.right) == 1:
            nodes = [_interleaved(nodes, axis, heads, target_blocks)]
        labels = common_labels(step, values, axis)
        return [Value(node, labels) for node in nodes]


class _ByRank(_Fused):
    """One block for each tensor-parallel rank, as stated, else as the tensors are cut."""

    __slots__ = ()
    may_reorder: ClassVar[bool] = True
    src_parts: int | None
    dst_parts: int | None

    @property
    def needs_ends(self) -> bool:
        return True

    def blocks(self, step: Operands, axis: int, ends: Ends) -> tuple[int, int]:
        is_stated = self.src_parts is not None or len(step.left) > 1
        if ends.source is None and not is_stated:
            raise Problem(
                f"{step.left[0].name!r} is put together from other tensors, so its tensor-parallel "
                "degree is not known",
                hints=["state it with src_parts="],
            )
        return (
            self.src_parts or _num_ranges(ends.source, axis),
            self.dst_parts or _num_ranges(ends.targets[0], axis),
        )


def _num_ranges(info: TensorInfo | None, axis: int) -> int:
    cuts = None if info is None else info.num_pieces
    return 1 if cuts is None or axis >= len(cuts) else cuts[axis]


@dataclass(frozen=True, slots=True)
class FusedQkv(_Fused):
    """Attention projections, a block for each key-value head: its query heads, key and value."""

    leads: ClassVar[tuple[str, ...]] = ("fused_qkv",)
    num_components: ClassVar[int] = 3
    num_heads: int = attribute(positive)
    num_key_value_groups: int = attribute(positive)
    axis: int = attribute(integer, 1)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_value_groups:
            raise Problem(
                f"num_heads={self.num_heads} is no multiple of "
                f"num_key_value_groups={self.num_key_value_groups}\n"
                "That is the number of key-value heads"
            )

    def heads(self, _extents: Sequence[int]) -> tuple[int, ...]:
        return self.num_heads, self.num_key_value_groups, self.num_key_value_groups

    def blocks(self, _step: Operands, _axis: int, _ends: Ends) -> tuple[int, int]:
        return self.num_key_value_groups, self.num_key_value_groups

    def opposite(self) -> Operator:
        return self

    def explain(self) -> str:
        return (
            f"along axis {self.axis}, {self.num_key_value_groups} blocks of "
            f"{self.num_heads // self.num_key_value_groups} query heads, 1 key head and 1 value "
            "head"
        )


@dataclass(frozen=True, slots=True)
class FusedQkvByRank(_ByRank, FusedQkv):
    """Attention projections, a block for each rank: its query, key and value heads."""

    leads: ClassVar[tuple[str, ...]] = ("fused_qkv_old",)
    src_parts: int | None = attribute(positive, None)
    dst_parts: int | None = attribute(positive, None)

    def opposite(self) -> Operator:
        return replace(self, src_parts=self.dst_parts, dst_parts=self.src_parts)

    def explain(self) -> str:
        return (
            f"along axis {self.axis}, for each tensor-parallel rank its query, key and value heads"
        )


@dataclass(frozen=True, slots=True)
class FusedFfn(_ByRank):
    """Gate and up projections, one block of both for each tensor-parallel rank."""

    leads: ClassVar[tuple[str, ...]] = ("fused_ffn",)
    num_components: ClassVar[int] = 2
    axis: int = attribute(integer, 1)
    src_parts: int | None = attribute(positive, None)
    dst_parts: int | None = attribute(positive, None)

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        # Every row counts as a head.
        extent = extents[0]
        if len(extents) == 1 and extent % 2:
            raise Problem(f"extent {extent} is not even, so it does not hold gate and up")
        rows = max(extent // 2 if len(extents) == 1 else extent, 1)
        return rows, rows

    def opposite(self) -> Operator:
        return replace(self, src_parts=self.dst_parts, dst_parts=self.src_parts)

    def explain(self) -> str:
        return f"along axis {self.axis}, for each tensor-parallel rank its rows of gate and of up"


def _check_blocks(heads: Sequence[int], blocks: int) -> None:
    if blocks > MAX_BLOCKS:
        raise Problem(f"{blocks} blocks are more than {MAX_BLOCKS}")
    for count in heads:
        if count % blocks:
            raise Problem(f"{count} heads or rows cannot be divided into {blocks} blocks")


def _check_heads(extents: Sequence[int], heads: Sequence[int]) -> None:
    """Every component must have the same number of rows per head."""
    for extent, count in zip(extents, heads, strict=True):
        if extent % count:
            raise Problem(f"extent {extent} is no multiple of {count} heads")
    rows = [extent // count for extent, count in zip(extents, heads, strict=True)]
    if len(set(rows)) > 1:
        raise Problem(
            f"extents {list(extents)} of {list(heads)} heads mean {rows} rows per head, which "
            "should be equal"
        )


def _separated(node: Node, axis: int, heads: Sequence[int], blocks: int) -> list[Node]:
    """The components of a fused tensor."""
    extent = node.shape[axis]
    if extent % sum(heads):
        raise Problem(f"extent {extent} is no multiple of {sum(heads)} heads")
    _check_blocks(heads, blocks)
    rows = extent // sum(heads)
    widths = [count * rows // blocks for count in heads]
    components: list[Node] = []
    offset = 0
    for width in widths:
        parts = [sliced(node, axis, block * sum(widths) + offset, width) for block in range(blocks)]
        components.append(concatenated(parts, axis))
        offset += width
    return components


def _interleaved(components: Sequence[Node], axis: int, heads: Sequence[int], blocks: int) -> Node:
    """A fused tensor of components."""
    _check_blocks(heads, blocks)
    parts = []
    for block in range(blocks):
        for component in components:
            width = component.shape[axis] // blocks
            parts.append(sliced(component, axis, block * width, width))
    return concatenated(parts, axis)
