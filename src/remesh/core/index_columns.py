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

_VERSION_1 = {"box.offset": "bd", "box.shape": "bd", "piece.file": "b", "piece.position": "b"}
_VERSION_1 |= {"box.tensor": "b", "tensor.name_ends": "t", "tensor.dtype": "t", "tensor.ndim": "t"}
_VERSION_1 |= {"tensor.shape": "td", "block.first": "f"}
"""Dims of each column in version 1; equal letters are equal extents."""


COMPRESSED = ("block.begin", "file.num_bytes")
"""Columns of compressed files alone."""


def max_rows_of(data: bytes) -> int:
    """Pieces that a stored index may have."""
    return MIN_ROWS + ROWS_A_BYTE * len(data)


def require(holds: object, what: str) -> None:
    """Check a condition.

    Raises:
        ValueError: If it does not hold.
    """
    if not holds:
        raise ValueError(what)


def check_version_1(columns: Columns, num_files: int) -> None:
    """Check that the columns of an index of version 1 fit each other.

    Raises:
        KeyError: If one is missing.
        ValueError: If not.
    """
    _check_unpacked(columns)
    extents: dict[str, int] = {}
    for name, dims in _VERSION_1.items():
        column = columns[name]
        require(column.dtype == np.int64, f"{name} is {column.dtype}")
        require(column.ndim == len(dims), f"{name} has {column.ndim} dims")
        for dim, extent in zip(dims, column.shape, strict=True):
            require(extents.setdefault(dim, extent) == extent, f"{name} has {extent} rows")
    _check_tensors(columns)
    tensor, file = columns["box.tensor"], columns["piece.file"]
    require(((tensor >= 0) & (tensor < extents["t"])).all(), "pieces of no tensor")
    require((np.diff(tensor) >= 0).all(), "pieces are not sorted by tensor")
    require(((file >= 0) & (file < num_files)).all(), "pieces of no file")


def _check_unpacked(columns: Columns) -> None:
    for name, (dtype, num_dims) in _UNPACKED.items():
        column = columns[name]
        require(column.dtype == dtype, f"{name} is {column.dtype}")
        require(column.ndim == num_dims, f"{name} has {column.ndim} dims")
    require(columns["block.digest"].shape[1] == 2, "a digest is not two numbers")


def _check_tensors(columns: Columns) -> None:
    """Check what the columns say of tensors."""
    ends, dtypes = columns["tensor.name_ends"], columns["tensor.dtype"]
    require((np.diff(ends, prepend=0) >= 0).all(), "names overlap")
    require(columns["tensor.name_bytes"].size == (ends[-1] if len(ends) else 0), "names are cut")
    require(((dtypes >= 0) & (dtypes < len(DTYPES))).all(), "unknown dtype")


def unpacked(columns: Columns, num_files: int, max_rows: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of an index, unpacked, which fit each other.

    Args:
        columns: The columns as they are stored.
        num_files: Data files of which the index speaks.
        max_rows: Numbers that any column may have.

    Raises:
        KeyError: If one is missing.
        ValueError: If not.
    """
    _check_unpacked(columns)
    found = {name: columns[name] for name in _UNPACKED}
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
    _check_tensors(found)
    return found


def pieces_of(columns: Columns, max_rows: int) -> Pieces:
    """The pieces that unpacked columns say.

    Raises:
        ValueError: If lists are cut, or differ in their lengths, or there are too many pieces.
    """
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
