"""Tables of tensors and of boxes, as columns of integers; and columns as bytes.

There may be many millions of boxes, so a table is columns, not objects: one row for each tensor
(`TensorTable`), one row for each box (`BoxTable`). Boxes are padded to a common number of dims as
`remesh.core.geometry` describes. Named columns are stored, and sent to other ranks, as a
safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.core.dtypes import CODE, DTYPES, ITEMSIZES, DType
from remesh.core.geometry import Box, IntArray, pad_dims, row_products
from remesh.core.pieces import Lists, distinct
from remesh.core.safetensors_file import decode_header, encode_header
from remesh.errors import CorruptCheckpointError

Columns = Mapping[str, npt.NDArray[Any]]

_COLUMN_CODES = {"<i8": "I64", "<u8": "U64", "<i4": "I32", "|u1": "U8"}
_COLUMN_DTYPES = {code: np.dtype(text) for text, code in _COLUMN_CODES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class TensorTable:
    """Named global tensors, a row each."""

    names: tuple[str, ...]  # stored names
    dtypes: IntArray  # number of each dtype in `remesh.core.dtypes.DTYPES`
    ndims: IntArray  # number of dims of each tensor
    shapes: IntArray  # (rows, d) global shapes, padded with 1

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, Sequence[int]]]) -> TensorTable:
        """A table of (name, dtype name, global shape) rows."""
        num_dims = max((len(shape) for _, _, shape in rows), default=1)
        return cls(
            tuple(name for name, _, _ in rows),
            np.array([CODE[dtype] for _, dtype, _ in rows], dtype=np.int64),
            np.array([len(shape) for _, _, shape in rows], dtype=np.int64),
            pad_dims([shape for _, _, shape in rows], max(num_dims, 1), 1),
        )

    def __len__(self) -> int:
        return len(self.names)

    def dtype(self, row: int) -> DType:
        """Element type of a row."""
        return DTYPES[int(self.dtypes[row])]

    def shape(self, row: int) -> tuple[int, ...]:
        """Global shape of a row."""
        return tuple(self.shapes[row, : self.ndims[row]].tolist())

    def among(self, rows: IntArray) -> TensorTable:
        """A table of some of the rows."""
        names = tuple(self.names[row] for row in rows.tolist())
        return TensorTable(names, self.dtypes[rows], self.ndims[rows], self.shapes[rows])

    @property
    def itemsizes(self) -> IntArray:
        """Bytes of an element, row by row."""
        return ITEMSIZES[self.dtypes]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """This table as named columns."""
        encoded = [name.encode() for name in self.names]
        return {
            "tensor.name_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
            "tensor.name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
            "tensor.dtype": self.dtypes,
            "tensor.ndim": self.ndims,
            "tensor.shape": self.shapes,
        }

    @classmethod
    def from_columns(cls, columns: Columns) -> TensorTable:
        """The table of what `columns` gave."""
        text = columns["tensor.name_bytes"].tobytes()
        ends = columns["tensor.name_ends"].tolist()
        starts = [0, *ends[:-1]]
        names = tuple(text[a:b].decode() for a, b in zip(starts, ends, strict=False))
        return cls(names, columns["tensor.dtype"], columns["tensor.ndim"], columns["tensor.shape"])


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """Boxes of named tensors, a row each."""

    tensors: TensorTable
    tensor: IntArray  # row in `tensors` of each box
    offsets: IntArray  # (rows, d) offsets, padded with 0
    extents: IntArray  # (rows, d) shapes, padded with 1; d as in `tensors.shapes`

    @classmethod
    def of(cls, tensors: TensorTable, rows: Sequence[tuple[int, Box]]) -> BoxTable:
        """A table of (row in `tensors`, box) rows."""
        num_dims = tensors.shapes.shape[1]
        return cls(
            tensors,
            np.array([row for row, _ in rows], dtype=np.int64),
            pad_dims([box.offset for _, box in rows], num_dims, 0),
            pad_dims([box.shape for _, box in rows], num_dims, 1),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> Box:
        """The box of a row, without padding."""
        ndim = self.tensors.ndims[self.tensor[row]]
        return Box(
            tuple(self.offsets[row, :ndim].tolist()), tuple(self.extents[row, :ndim].tolist())
        )

    def bounds(self, rows: IntArray) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Offset and shape of the boxes of some rows, without padding: `box` for many."""
        ndims = self.tensors.ndims[self.tensor[rows]].tolist()
        offsets, extents = self.offsets[rows].tolist(), self.extents[rows].tolist()
        return (
            [tuple(row[:ndim]) for row, ndim in zip(offsets, ndims, strict=True)],
            [tuple(row[:ndim]) for row, ndim in zip(extents, ndims, strict=True)],
        )

    @property
    def num_bytes(self) -> IntArray:
        """Bytes of each box."""
        sizes: IntArray = row_products(self.extents) * self.tensors.itemsizes[self.tensor]
        return sizes


@dataclass(frozen=True, eq=False)
class Cuts:
    """Tensors, and the boxes that each is cut into; those that are cut alike share lists."""

    tensors: TensorTable
    offsets: Lists  # offsets of the boxes of each tensor, padded with 0
    extents: Lists  # their shapes, padded with 1

    @classmethod
    def of(cls, boxes: BoxTable) -> Cuts:
        """The cuts of boxes that are sorted by tensor."""
        bounds = np.searchsorted(boxes.tensor, np.arange(len(boxes.tensors) + 1))
        offsets, extents = (Lists.apart(rows, bounds) for rows in (boxes.offsets, boxes.extents))
        return cls(boxes.tensors, offsets, extents)

    def __len__(self) -> int:
        return int(self.offsets.lengths.sum())

    @property
    def bounds(self) -> IntArray:
        """First box of each tensor, and the number of boxes."""
        return np.concatenate(([0], np.cumsum(self.offsets.lengths)))

    @property
    def num_bytes(self) -> Lists:
        """Bytes of the boxes of each tensor."""
        itemsizes = self.tensors.itemsizes
        kinds, of = distinct(self.extents.number, itemsizes)
        extents = self.extents.among(kinds)
        sizes = row_products(extents.rows) * np.repeat(itemsizes[kinds], extents.lengths)
        return Lists(of, np.cumsum(extents.lengths), sizes)

    @cached_property
    def boxes(self) -> BoxTable:
        """All boxes, sorted by tensor; made when they are first asked for, and may be large."""
        tensor = np.repeat(np.arange(len(self.tensors)), self.offsets.lengths)
        return BoxTable(self.tensors, tensor, self.offsets.rows, self.extents.rows)


def encode_columns(columns: Columns, metadata: Mapping[str, str] | None = None) -> bytes:
    """Named integer arrays as one safetensors file."""
    arrays = {
        name: np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        for name, array in columns.items()
    }
    header, _ = encode_header(
        [
            (name, _COLUMN_CODES[array.dtype.str], array.shape, array.nbytes)
            for name, array in arrays.items()
        ],
        metadata or {},
    )
    return b"".join([header, *(array.tobytes() for array in arrays.values())])


def decode_columns(data: bytes, where: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays and the metadata of what `encode_columns` wrote."""
    header = decode_header(data, where)
    columns = {}
    for name, entry in header.entries.items():
        start, stop = (header.data_start + offset for offset in entry.data_offsets)
        try:
            flat = np.frombuffer(data[start:stop], dtype=_COLUMN_DTYPES[entry.dtype])
            columns[name] = flat.reshape(entry.shape)
        except (KeyError, ValueError) as error:
            raise CorruptCheckpointError(f"{where}: column {name!r}: {error!r}") from error
    return columns, header.metadata
