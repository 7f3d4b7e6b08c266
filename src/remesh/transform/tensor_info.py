"""What is known of a tensor before its elements are: dtype, shape, how it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from remesh.index import BoxTable, Index


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
        cuts = num_pieces_of(tensors.boxes)
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


def num_pieces_of(boxes: BoxTable) -> list[tuple[int, ...]]:
    """Into how many ranges the boxes of a table cut each axis of each of its tensors."""
    tensors = boxes.tensors
    num_dims = tensors.shapes.shape[1]
    counts = np.zeros((len(tensors), num_dims), dtype=np.int64)
    for axis in range(num_dims):
        # Distinct offsets of each tensor: sort by (tensor, offset), then count the changes.
        order = np.lexsort((boxes.offsets[:, axis], boxes.tensor))
        tensor, offset = boxes.tensor[order], boxes.offsets[order, axis]
        is_new = np.ones(len(tensor), dtype=bool)
        is_new[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
        counts[:, axis] = np.bincount(tensor[is_new], minlength=len(tensors))
    rows = np.maximum(counts, 1).tolist()
    return [tuple(row[:ndim]) for row, ndim in zip(rows, tensors.ndims.tolist(), strict=True)]
