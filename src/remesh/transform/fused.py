"""Fused projections: several tensors in one, interleaved block by block along an axis.

Both kinds of fused tensors are one scheme. Components (query, key, value; or gate, up) are counted
in heads, and the fused axis holds a number of equal blocks, each with its share of the heads of
every component, in order. For grouped-query attention a block is one key-value head with its query
heads; for tensor parallelism it is one rank. One block means one component after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from remesh.transform.expressions import Node, concatenated, sliced
from remesh.transform.operator_base import (
    Attributes,
    Operator,
    Problem,
    Value,
    check_alike,
    common_labels,
    full_axis,
)

if TYPE_CHECKING:
    from remesh.transform.expand import Step
    from remesh.transform.layout import Layout

MAX_BLOCKS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused(Operator):
    """Base of both kinds; the direction follows from the numbers of names."""

    axis: int  # the fused axis
    source_ranks: int | None = None
    """The tensor-parallel degree of a fused source, if the statement gives it."""
    target_ranks: int | None = None  # that of a fused target

    def attributes(self) -> list[tuple[str, object]]:
        return [
            ("axis", self.axis),
            ("src_parts", self.source_ranks),
            ("dst_parts", self.target_ranks),
        ]

    def opposite(self) -> Self:
        return replace(self, source_ranks=self.target_ranks, target_ranks=self.source_ranks)

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks; None for one for each tensor-parallel rank."""
        return None

    @property
    def needs_targets(self) -> bool:
        return self.num_blocks is None

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Heads of each component, given the extents of the tensors along the fused axis."""
        raise NotImplementedError

    def apply(self, step: Step, values: list[Value], layout: Layout) -> list[Value]:
        ndim = len(values[0].node.shape)
        axis = full_axis(step, self.axis, ndim)
        check_alike(step, values, axis)
        nodes = [value.node for value in values]
        heads = self.heads([node.shape[axis] for node in nodes])
        source_blocks = blocks = self.num_blocks or 1
        if self.num_blocks is None and len(values) == 1:
            source_blocks = self.source_ranks or layout.source_ranks(step, values[0], axis)
        if self.num_blocks is None and len(step.right) == 1:
            blocks = self.target_ranks or layout.target_ranks(step, axis, ndim)
        if len(nodes) == 1:
            nodes = _separated(nodes[0], axis, heads, source_blocks)
        else:
            _check_heads([node.shape[axis] for node in nodes], heads)
        if len(step.right) == 1:
            nodes = [_interleaved(nodes, axis, heads, blocks)]
        labels = common_labels(step, values, axis)
        return [Value(node, labels) for node in nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedQkv(_Fused):
    """Attention projections, `num_kv_heads` blocks of query heads, a key head and a value head.

    With `by_rank`, one block for each tensor-parallel rank: its query, key and value heads.
    """

    num_heads: int
    num_kv_heads: int
    by_rank: bool = False

    @classmethod
    def parse(cls, given: Attributes) -> FusedQkv:
        by_rank = "fused_qkv_old" in given.by_name
        macro = "fused_qkv_old" if by_rank else "fused_qkv"
        _check_counts(given, macro, 3, may_reorder=by_rank)
        num_heads = given.positive("num_heads")
        num_kv_heads = given.positive("num_key_value_groups")
        if num_heads % num_kv_heads:
            raise Problem(
                f"num_heads={num_heads} is no multiple of num_key_value_groups={num_kv_heads}\n"
                "That is the number of key-value heads",
                given.span("num_key_value_groups"),
            )
        return cls(
            axis=given.integer("axis", 1),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            by_rank=by_rank,
            source_ranks=given.optional_positive("src_parts"),
            target_ranks=given.optional_positive("dst_parts"),
        )

    def attributes(self) -> list[tuple[str, object]]:
        return [
            ("fused_qkv_old" if self.by_rank else "fused_qkv", ""),
            ("num_heads", self.num_heads),
            ("num_key_value_groups", self.num_kv_heads),
            *_Fused.attributes(self),
        ]

    @property
    def num_blocks(self) -> int | None:
        return None if self.by_rank else self.num_kv_heads

    def heads(self, _extents: Sequence[int]) -> tuple[int, ...]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def explain(self) -> tuple[str, str]:
        if self.by_rank:
            return "fused_qkv_old", (
                f"along axis {self.axis}, for each tensor-parallel rank its query, key and value "
                "heads"
            )
        return "fused_qkv", (
            f"along axis {self.axis}, {self.num_kv_heads} blocks of "
            f"{self.num_heads // self.num_kv_heads} query heads, 1 key head and 1 value head"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFfn(_Fused):
    """Gate and up projections, one block of both for each tensor-parallel rank."""

    @classmethod
    def parse(cls, given: Attributes) -> FusedFfn:
        _check_counts(given, "fused_ffn", 2, may_reorder=True)
        return cls(
            axis=given.integer("axis", 1),
            source_ranks=given.optional_positive("src_parts"),
            target_ranks=given.optional_positive("dst_parts"),
        )

    def attributes(self) -> list[tuple[str, object]]:
        return [("fused_ffn", ""), *_Fused.attributes(self)]

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        """See `_Fused.heads`: every row counts as a head."""
        extent = extents[0]
        if len(extents) == 1 and extent % 2:
            raise Problem(f"extent {extent} is not even, so it does not hold gate and up")
        rows = max(extent // 2 if len(extents) == 1 else extent, 1)
        return rows, rows

    def explain(self) -> tuple[str, str]:
        return "fused_ffn", (
            f"along axis {self.axis}, for each tensor-parallel rank its rows of gate and of up"
        )


def _check_counts(given: Attributes, macro: str, num_components: int, *, may_reorder: bool) -> None:
    counts = len(given.left), len(given.right)
    allowed = [(num_components, 1), (1, num_components)] + ([(1, 1)] if may_reorder else [])
    if counts not in allowed or any(name.is_many for name in (*given.left, *given.right)):
        forms = " or ".join(f"{a} -> {b}" for a, b in allowed)
        raise Problem(
            f"{macro} takes {forms} names, each written out, not {counts[0]} -> {counts[1]}",
            given.span(macro),
        )


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
