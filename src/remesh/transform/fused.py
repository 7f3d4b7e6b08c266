"""Fused projections: several tensors in one, interleaved block by block along an axis.

Both kinds of fused tensors are one scheme. Components (query, key, value; or gate, up) are counted
in heads, and the fused axis holds a number of equal blocks, each with its share of the heads of
every component, in order. For grouped-query attention a block is one key-value head with its query
heads; for tensor parallelism it is one rank. One block means one component after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.transform.tensors import Node, concatenated, sliced

MAX_BLOCKS = 65536


class DoesNotDivideError(Exception):
    """Heads, blocks and extents do not fit together; the message says how."""


def reorder(
    nodes: Sequence[Node],
    axis: int,
    heads: Sequence[int],
    num_results: int,
    *,
    source_blocks: int,
    blocks: int,
) -> list[Node]:
    """Fuse, unfuse, or change the number of blocks.

    Args:
        nodes: The components, or one fused tensor.
        axis: The fused axis.
        heads: Heads of each component.
        num_results: 1 for a fused tensor, else the number of components.
        source_blocks: Blocks of the fused tensor that is given.
        blocks: Blocks of the fused tensor that is made.

    Raises:
        DoesNotDivideError: If an extent is no multiple of the heads, or the heads none of the
            blocks.
    """
    if len(nodes) == 1:
        components = _taken_apart(nodes[0], axis, heads, source_blocks)
    else:
        _check_heads([node.shape[axis] for node in nodes], heads)
        components = list(nodes)
    if num_results > 1:
        return components
    _check_blocks(heads, blocks)
    return [_interleaved(components, axis, blocks)]


def _check_blocks(heads: Sequence[int], blocks: int) -> None:
    if blocks > MAX_BLOCKS:
        raise DoesNotDivideError(f"{blocks} blocks are more than {MAX_BLOCKS}")
    for count in heads:
        if count % blocks:
            raise DoesNotDivideError(
                f"{count} heads or rows cannot be dealt out to {blocks} blocks"
            )


def _check_heads(extents: Sequence[int], heads: Sequence[int]) -> None:
    """Every component must have the same number of rows per head."""
    for extent, count in zip(extents, heads, strict=True):
        if extent % count:
            raise DoesNotDivideError(f"extent {extent} is no multiple of {count} heads")
    rows = [extent // count for extent, count in zip(extents, heads, strict=True)]
    if len(set(rows)) > 1:
        raise DoesNotDivideError(
            f"extents {list(extents)} of {list(heads)} heads mean {rows} rows per head, which "
            "should be equal"
        )


def _taken_apart(node: Node, axis: int, heads: Sequence[int], blocks: int) -> list[Node]:
    extent = node.shape[axis]
    if extent % sum(heads):
        raise DoesNotDivideError(f"extent {extent} is no multiple of {sum(heads)} heads")
    _check_blocks(heads, blocks)
    rows = extent // sum(heads)
    widths = [count * rows // blocks for count in heads]
    components: list[Node] = []
    offset = 0
    for width in widths:
        parts = [sliced(node, axis, block * sum(widths) + offset, width) for block in range(blocks)]
        components.append(concatenated(tuple(parts), axis))
        offset += width
    return components


def _interleaved(components: Sequence[Node], axis: int, blocks: int) -> Node:
    parts = []
    for block in range(blocks):
        for component in components:
            width = component.shape[axis] // blocks
            parts.append(sliced(component, axis, block * width, width))
    return concatenated(tuple(parts), axis)
