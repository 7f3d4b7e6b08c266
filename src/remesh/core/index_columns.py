"""The columns of a stored index: how they are called, packed and checked.

`remesh.core.index` says what they mean. All come from a file, so nothing is believed before it is
checked: neither that columns fit each other, nor how much memory their content takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.core.dtypes import DTYPES
from remesh.core.packing import unpack
from remesh.core.pieces import Lists, Pieces
from remesh.core.tables import Columns

ROWS_A_BYTE = 64
"""Pieces that there may be for each byte of an index, beside `MIN_ROWS`: what a few words stand for
shall not take more memory than their file accounts for. A writer pads an index that is shorter."""
MIN_ROWS = 1 << 18

LISTS = ("piece.offset", "piece.shape", "piece.file", "piece.step")
"""Columns of lists that tensors share, in the order of `Pieces.lists`."""

_UNPACKED = {"tensor.name_bytes": (np.uint8, 1), "block.digest": (np.uint64, 2)}
"""Element types and dims of the columns that are not packed."""

_OF_TENSORS = ["tensor.name_ends", "tensor.dtype", "tensor.ndim", "tensor.position"]

_PACKED = [
    *("tensor.shape", "file.position", "block.first", *_OF_TENSORS),
    *(f"{name}{what}" for name in LISTS for what in ("", ".list", ".ends")),
]

COMPRESSED = ("block.begin", "file.num_bytes")
"""Columns of compressed files alone."""


def max_rows_of(data: bytes) -> int:
    """Pieces that a stored index may have."""
    return MIN_ROWS + ROWS_A_BYTE * len(data)


def require(holds: object, what: str) -> None:
    """Raise a ValueError unless a condition holds."""
    if not holds:
        raise ValueError(what)


def unpacked(columns: Columns, num_files: int, max_rows: int) -> dict[str, npt.NDArray[Any]]:
    """The unpacked columns; KeyError if one is missing, ValueError if they do not fit."""
    found = {}
    for name, (dtype, num_dims) in _UNPACKED.items():
        found[name] = columns[name]
        require(columns[name].dtype == dtype, f"{name} is {columns[name].dtype}")
        require(columns[name].ndim == num_dims, f"{name} has {columns[name].ndim} dims")
    require(columns["block.digest"].shape[1] == 2, "a digest is not two numbers")
    is_compressed = any(name in columns for name in COMPRESSED)
    of_tensors = (*_OF_TENSORS, *(f"{name}.list" for name in LISTS))
    # Names differ, so that at most one of them is empty.
    most = dict.fromkeys(of_tensors, len(found["tensor.name_bytes"]) + 1)
    most |= {"block.first": num_files + 1, "block.begin": len(found["block.digest"])}
    most |= dict.fromkeys(("file.position", "file.num_bytes"), num_files)
    for name in (*_PACKED, *(COMPRESSED if is_compressed else ())):
        column = columns[name]
        require(column.dtype == np.int64 and column.ndim == 1, f"{name} is not packed")
        try:
            found[name] = unpack(column, min(max_rows, most.get(name, max_rows)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if is_compressed:
        num_files, num_blocks = len(found["block.first"]) - 1, len(found["block.digest"])
        has_all = [len(found[name]) for name in COMPRESSED] == [num_blocks, num_files]
        require(has_all, "compressed blocks are others")
    num_tensors = len(found["tensor.name_ends"])
    for name in of_tensors:
        require(len(found[name]) == num_tensors, f"{name} has {len(found[name])} rows")
    # All dims follow each other.
    num_dims, rest = divmod(len(found["tensor.shape"]), num_tensors) if num_tensors else (1, 0)
    require(num_dims > 0 and not rest, f"tensor.shape has {len(found['tensor.shape'])} numbers")
    for name in ("tensor.shape", *LISTS[:2]):
        require(len(found[name]) % num_dims == 0, f"{name} has {len(found[name])} numbers")
        found[name] = np.ascontiguousarray(found[name].reshape(num_dims, -1).T)
    ends, dtypes = found["tensor.name_ends"], found["tensor.dtype"]
    require((np.diff(ends, prepend=0) >= 0).all(), "names overlap")
    require(found["tensor.name_bytes"].size == (ends[-1] if len(ends) else 0), "names are cut")
    require(((dtypes >= 0) & (dtypes < len(DTYPES))).all(), "unknown dtype")
    return found


def pieces_of(columns: Columns, max_rows: int) -> Pieces:
    """The pieces of unpacked columns; ValueError if they do not fit, or are too many."""
    found = []
    for name in LISTS:
        number, ends, values = (columns[f"{name}{what}"] for what in (".list", ".ends", ""))
        require((np.diff(ends, prepend=0) >= 0).all(), f"{name} overlaps")
        require(len(values) == (ends[-1] if len(ends) else 0), f"{name} is cut")
        require(((number >= 0) & (number < len(ends))).all(), f"{name} lacks a list")
        found.append(Lists(number, ends, values))
    lengths = found[0].lengths
    for name, lists in zip(LISTS, found, strict=True):
        require(np.array_equal(lists.lengths, lengths), f"{name} has other lengths")
    require(lengths.sum() <= max_rows, f"{lengths.sum()} pieces")
    return Pieces(tuple(found), columns["file.position"], columns["tensor.position"])
