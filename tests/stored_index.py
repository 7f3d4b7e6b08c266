"""The stored form of an index with unpacked columns, so that tests can change single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.core.packing import pack, unpack
from remesh.core.tables import decode_columns, encode_columns

Columns = dict[str, npt.NDArray[Any]]

_BY_DIM = ("tensor.shape", "piece.offset", "piece.shape")
"""Columns of a row for each tensor or piece, and a number for each dim."""


def plain_columns(data: bytes) -> tuple[Columns, dict[str, str]]:
    """Columns, unpacked and writable, and metadata of a stored index."""
    stored, metadata = decode_columns(data, "index")
    columns = {
        name: unpack(column, 1 << 20).copy() if column.dtype == np.int64 else column.copy()
        for name, column in stored.items()
    }
    num_dims = len(columns["tensor.shape"]) // max(len(columns["tensor.ndim"]), 1)
    for name in _BY_DIM:
        columns[name] = columns[name].reshape(max(num_dims, 1), -1).T.copy()
    return columns, metadata


def packed_columns(columns: Columns, metadata: dict[str, str]) -> bytes:
    """The stored form again."""
    packed = {
        name: pack(column.T.reshape(-1)) if column.dtype == np.int64 else column
        for name, column in columns.items()
    }
    return encode_columns(packed, metadata)
