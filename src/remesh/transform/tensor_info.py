"""What is known of a tensor before its elements are: dtype, shape, how it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from remesh.geometry import IntArray
from remesh.index import Index
from remesh.tables import TensorTable


class Described(Protocol):
    """Anything that has a dtype and a shape, such as an entry of an index."""

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A global tensor.

    Attributes:
        dtype: Name of the element type.
        shape: Global shape.
        num_pieces: Into how many ranges each axis is cut on the ranks or in storage. Only the
            `fused_ffn` and `fused_qkv_old` macros look at it, for the tensor-parallel degree; None
            stands for a tensor that is not cut.
    """

    dtype: str
    shape: tuple[int, ...]
    num_pieces: tuple[int, ...] | None = None


Infos = Mapping[str, TensorInfo | None]
"""Tensors by name; None stands for a plain value, which has a name but no shape."""


def infos_of(tensors: Mapping[str, Described | None]) -> Infos:
    """Descriptions as `TensorInfo`; an index says how its tensors are cut.

    None, which stands for a plain value, stays None.
    """
    if isinstance(tensors, Index):
        cuts = cuts_of(tensors)
        return {
            name: TensorInfo(stored.dtype, stored.shape, cuts[tensors.row(name)])
            for name, stored in tensors.items()
        }
    return {
        name: info
        if info is None or isinstance(info, TensorInfo)
        else TensorInfo(info.dtype, tuple(info.shape))
        for name, info in tensors.items()
    }


def cuts_of(index: Index) -> list[tuple[int, ...]]:
    """`num_pieces_of` for the tensors of an index; those that are cut alike are counted once."""
    lists = index.pieces_of_tensors.offsets
    tensor = np.repeat(np.arange(len(lists.ends)), np.diff(lists.ends, prepend=0))
    counts = _num_offsets(tensor, lists.values, len(lists.ends))
    return _of_own_dims(index.tensors, counts[lists.number])


def num_pieces_of(
    tensors: TensorTable, tensor: IntArray, offsets: IntArray
) -> list[tuple[int, ...]]:
    """Into how many ranges boxes cut each axis of each tensor.

    Args:
        tensors: The tensors.
        tensor: Row of the tensor of each box.
        offsets: Offset of each box, padded.
    """
    return _of_own_dims(tensors, _num_offsets(tensor, offsets, len(tensors)))


def _of_own_dims(tensors: TensorTable, counts: IntArray) -> list[tuple[int, ...]]:
    rows = np.maximum(counts, 1).tolist()
    return [tuple(row[:ndim]) for row, ndim in zip(rows, tensors.ndims.tolist(), strict=True)]


def _num_offsets(tensor: IntArray, offsets: IntArray, num_tensors: int) -> IntArray:
    """How many different offsets the boxes of each tensor have, axis by axis."""
    counts = np.zeros((num_tensors, offsets.shape[1]), dtype=np.int64)
    for axis in range(offsets.shape[1]):
        # Sort by (tensor, offset), then count the changes.
        order = np.lexsort((offsets[:, axis], tensor))
        group, offset = tensor[order], offsets[order, axis]
        is_new = np.ones(len(group), dtype=np.bool_)
        is_new[1:] = (group[1:] != group[:-1]) | (offset[1:] != offset[:-1])
        counts[:, axis] = np.bincount(group[is_new], minlength=num_tensors)
    return counts
