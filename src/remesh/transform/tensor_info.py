"""Description of a tensor without its elements: dtype, shape, how it is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.core.pieces import distinct
from remesh.core.tables import TensorTable


class Described(Protocol):
    """Anything that has a dtype and a shape, such as an entry of an index."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A global tensor."""

    dtype: str
    """Name of the element type."""
    shape: tuple[int, ...]
    """Global shape."""
    num_pieces: tuple[int, ...] | None = None
    """Into how many ranges each axis is cut on the ranks or in storage. Only the `fused_ffn` and
    `fused_qkv_old` macros look at it, for the tensor-parallel degree; None stands for a tensor
    that is not cut."""

    def permuted(self, order: Sequence[int]) -> TensorInfo:
        """Itself with its axes in another order."""
        cuts = self.num_pieces
        cuts = None if cuts is None else tuple(cuts[axis] for axis in order)
        return TensorInfo(self.dtype, tuple(self.shape[axis] for axis in order), cuts)


Infos = Mapping[str, TensorInfo | None]
"""Tensors by name; None stands for a plain value, which has a name but no shape."""

PLAIN = "a plain value"  # what stands in place of its dtype


def infos_of(tensors: Mapping[str, Described | None]) -> Infos:
    """Descriptions as `TensorInfo`; an index says how its tensors are cut."""
    if isinstance(tensors, Index):
        return _infos_of_index(tensors)
    return {
        name: info
        if info is None or isinstance(info, TensorInfo)
        else TensorInfo(info.dtype, tuple(info.shape))
        for name, info in tensors.items()
    }


def _infos_of_index(index: Index) -> dict[str, TensorInfo | None]:
    """The tensors of an index; how those are cut that are cut alike is counted once."""
    lists, tensors = index.pieces_of_tensors.offsets, index.tensors
    tensor = np.repeat(np.arange(len(lists.ends)), np.diff(lists.ends, prepend=0))
    counts = _num_offsets(tensor, lists.values, len(lists.ends))
    infos = _infos(tensors, np.maximum(counts[lists.number], 1))
    aliases = {alias: infos[index.row(alias)] for alias in index.aliases}
    return {**dict(zip(tensors.names, infos, strict=True)), **aliases}


def infos_of_boxes(tensors: TensorTable, tensor: IntArray, offsets: IntArray) -> list[TensorInfo]:
    """Tensors, with the number of ranges that boxes (row, padded offsets) cut each axis into."""
    return _infos(tensors, np.maximum(_num_offsets(tensor, offsets, len(tensors)), 1))


def _infos(tensors: TensorTable, num_pieces: IntArray) -> list[TensorInfo]:
    """Tensors and how they are cut; those that are alike share one object."""
    first, of = distinct(tensors.dtypes, tensors.ndims, *tensors.shapes.T, *num_pieces.T)
    different = [
        TensorInfo(tensors.dtype(row).name, tensors.shape(row), tuple(cuts[: tensors.ndims[row]]))
        for row, cuts in zip(first.tolist(), num_pieces[first].tolist(), strict=True)
    ]
    return [different[kind] for kind in of.tolist()]


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
