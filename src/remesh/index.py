"""The index: which named tensors a checkpoint holds, cut into which pieces, at which bytes.

An index may have many millions of pieces, so it is columns of integers, not objects: one row for
each tensor (`TensorTable`), one row for each box (`BoxTable`), and for stored pieces the file and
the byte at which each begins (`Index`). Boxes are padded to a common number of dims as
`remesh.geometry` describes. Rows of a tensor lie together, so its pieces are a slice.

The same tables describe what each rank holds before anything is stored (`BoxTable` with a role for
each row), and the same encoding carries them between ranks and into `index.safetensors`.

A piece is stored row-major, without gaps, at `position` of its file. Digests belong to files: each
file is cut into blocks of `block_size` bytes (the last may be shorter), and every block has an
xxh3-128 digest. Checkpoints of other systems have no digests; `block_size` is 0 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr
from remesh.dtypes import CODE, DTYPES, ITEMSIZES, DType
from remesh.errors import CorruptCheckpointError
from remesh.geometry import MAX_DIMS, MAX_ELEMENTS, Box, IntArray, pad_dims, row_products
from remesh.safetensors_file import decode_header, encode_header

__all__ = ["Index", "Piece", "StoredFile", "StoredTensor"]

Columns = Mapping[str, npt.NDArray[Any]]

_COLUMN_CODES = {"<i8": "I64", "<u8": "U64", "<i4": "I32", "|u1": "U8"}
_COLUMN_DTYPES = {code: np.dtype(text) for text, code in _COLUMN_CODES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class TensorTable:
    """Named global tensors, a row each.

    Attributes:
        names: Stored names.
        dtypes: Number of each dtype in `remesh.dtypes.DTYPES`.
        ndims: Number of dims of each tensor.
        shapes: (rows, d) global shapes, padded with 1.
    """

    names: tuple[str, ...]
    dtypes: IntArray
    ndims: IntArray
    shapes: IntArray

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
    """Boxes of named tensors, a row each.

    Attributes:
        tensors: The tensors.
        tensor: Row in `tensors` of each box.
        offsets: (rows, d) offsets, padded with 0.
        extents: (rows, d) shapes, padded with 1; d as in `tensors.shapes`.
    """

    tensors: TensorTable
    tensor: IntArray
    offsets: IntArray
    extents: IntArray

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

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """This table as named columns."""
        return {
            **self.tensors.columns(),
            "box.tensor": self.tensor,
            "box.offset": self.offsets,
            "box.shape": self.extents,
        }

    @classmethod
    def from_columns(cls, columns: Columns) -> BoxTable:
        """The table of what `columns` gave."""
        return cls(
            TensorTable.from_columns(columns),
            columns["box.tensor"],
            columns["box.offset"],
            columns["box.shape"],
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored box: row-major bytes at `position` of the file `path`."""

    box: Box
    path: str
    position: int
    num_bytes: int

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an index, for reading; `Index.pieces` gives what it is cut into."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_pieces: int
    num_bytes: int

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file: its path relative to the checkpoint, and its size in bytes."""

    path: str
    num_bytes: int

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, eq=False)
class Index(Mapping[str, StoredTensor]):
    """What a checkpoint holds: a mapping from names to stored tensors, aliases included.

    Attributes:
        boxes: The pieces, sorted by tensor.
        file: Row in `files` of each piece.
        position: First byte of each piece in its file.
        files: The data files.
        aliases: Further names of tensors (tied weights): alias → name.
        block_size: Bytes of a digest block; 0 if there are no digests.
        digests: (blocks, 2) xxh3-128 digests (high and low 64 bits) of the blocks of all files.
        first_block: Row in `digests` of the first block of each file, and their total.
    """

    boxes: BoxTable
    file: IntArray
    position: IntArray
    files: tuple[StoredFile, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 0
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    first_block: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    _rows: dict[str, int] = field(init=False, repr=False)
    _first_piece: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tensors = self.boxes.tensors
        rows = {name: row for row, name in enumerate(tensors.names)}
        rows.update({alias: rows[name] for alias, name in self.aliases.items()})
        object.__setattr__(self, "_rows", rows)
        counts = np.bincount(self.boxes.tensor, minlength=len(tensors))
        object.__setattr__(self, "_first_piece", np.concatenate(([0], np.cumsum(counts))))

    def __repr__(self) -> str:
        num_files = len(self.files)
        return f"Index({len(self)} tensors, {len(self.file)} pieces, {num_files} files)"

    def __getitem__(self, name: str) -> StoredTensor:
        row = self._rows[name]
        start, stop = self.piece_range(row)
        tensors = self.boxes.tensors
        shape = tensors.shape(row)
        dtype = tensors.dtype(row)
        num_bytes = math.prod(shape) * dtype.itemsize
        return StoredTensor(name, dtype.name, shape, stop - start, num_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def row(self, name: str) -> int:
        """Row of a tensor in `boxes.tensors`; aliases lead to the tensor itself."""
        return self._rows[name]

    def piece_range(self, row: int) -> tuple[int, int]:
        """First and one past the last piece of a tensor, as rows of `boxes`."""
        return int(self._first_piece[row]), int(self._first_piece[row + 1])

    def without(self, is_removed: Callable[[str], bool]) -> Index:
        """The index without some tensors, by name; an alias stays if the tensor itself does."""
        tensors = self.boxes.tensors
        kept = [row for row, name in enumerate(tensors.names) if not is_removed(name)]
        left = TensorTable(
            tuple(tensors.names[row] for row in kept),
            tensors.dtypes[kept],
            tensors.ndims[kept],
            tensors.shapes[kept],
        )
        new_row = np.full(len(tensors), -1, dtype=np.int64)
        new_row[kept] = np.arange(len(kept))
        tensor = new_row[self.boxes.tensor]
        pieces = tensor >= 0
        boxes = BoxTable(
            left, tensor[pieces], self.boxes.offsets[pieces], self.boxes.extents[pieces]
        )
        names = set(left.names)
        aliases = {
            alias: name
            for alias, name in self.aliases.items()
            if name in names and not is_removed(alias)
        }
        return Index(
            boxes,
            self.file[pieces],
            self.position[pieces],
            self.files,
            aliases,
            self.block_size,
            self.digests,
            self.first_block,
        )

    def pieces(self, name: str) -> list[Piece]:
        """What a tensor is cut into."""
        row = self._rows[name]
        itemsize = self.boxes.tensors.dtype(row).itemsize
        pieces = []
        for piece in range(*self.piece_range(row)):
            box, path = self.boxes.box(piece), self.files[self.file[piece]].path
            pieces.append(Piece(box, path, int(self.position[piece]), box.size * itemsize))
        return pieces

    def encode(self) -> bytes:
        """The stored form: a safetensors file of integer columns."""
        metadata = {
            "remesh.files": msgspec.json.encode(
                [[file.path, file.num_bytes] for file in self.files]
            ).decode(),
            "remesh.aliases": msgspec.json.encode(dict(self.aliases)).decode(),
            "remesh.block_size": str(self.block_size),
        }
        columns = {
            **self.boxes.columns(),
            "piece.file": self.file,
            "piece.position": self.position,
            "block.digest": self.digests,
            "block.first": self.first_block,
        }
        return encode_columns(columns, metadata)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Index:
        """The index of its stored form.

        Raises:
            CorruptCheckpointError: If the bytes are not a stored index.
        """
        columns, metadata = decode_columns(data, where)
        try:
            files = msgspec.json.decode(metadata["remesh.files"], type=list[tuple[str, int]])
            _check_columns(columns)
            index = cls(
                BoxTable.from_columns(columns),
                columns["piece.file"],
                columns["piece.position"],
                tuple(StoredFile(path, num_bytes) for path, num_bytes in files),
                msgspec.json.decode(metadata["remesh.aliases"], type=dict[str, str]),
                int(metadata["remesh.block_size"]),
                columns["block.digest"],
                columns["block.first"],
            )
            _check_numbers(index)
            return index
        except (KeyError, ValueError, msgspec.DecodeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{where}: not an index: {error!r}") from error


def checked(index: Index, where: str) -> Index:
    """The index itself, if its numbers are possible: pieces lie in their tensors and files.

    Raises:
        CorruptCheckpointError: If not; for what other systems wrote.
    """
    try:
        _check_numbers(index)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{where}: {error}. The checkpoint was cut short or damaged; load another one."
        ) from error
    return index


_COLUMN_DIMS = {
    "tensor.name_bytes": "c",
    "tensor.name_ends": "t",
    "tensor.dtype": "t",
    "tensor.ndim": "t",
    "tensor.shape": "td",
    "box.tensor": "b",
    "box.offset": "bd",
    "box.shape": "bd",
    "piece.file": "b",
    "piece.position": "b",
    "block.digest": "k2",
    "block.first": "f",
}
"""Dims of each column of an index; equal letters are equal extents."""

MAX_OVERLAP = 1024
"""How often, on average, bytes may belong to a piece: ties and views share them, and not more."""

_COLUMN_TYPES = {"tensor.name_bytes": np.uint8, "block.digest": np.uint64}
"""Element types of the columns that are not int64."""


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_columns(columns: Columns) -> None:
    """Check that the columns of an index have the right types and fit each other.

    Raises:
        KeyError: If one is missing.
        ValueError: If not.
    """
    extents = {"2": 2}
    for name, dims in _COLUMN_DIMS.items():
        column = columns[name]
        _require(column.dtype == _COLUMN_TYPES.get(name, np.int64), f"{name} is {column.dtype}")
        _require(column.ndim == len(dims), f"{name} has {column.ndim} dims")
        for dim, extent in zip(dims, column.shape, strict=True):
            _require(extents.setdefault(dim, extent) == extent, f"{name} has {extent} rows")
    ends = columns["tensor.name_ends"]
    _require((np.diff(ends, prepend=0) >= 0).all(), "names overlap")
    _require(columns["tensor.name_bytes"].size == (ends[-1] if len(ends) else 0), "names are cut")
    dtypes, tensor = columns["tensor.dtype"], columns["box.tensor"]
    _require(((dtypes >= 0) & (dtypes < len(DTYPES))).all(), "unknown dtype")
    _require(((tensor >= 0) & (tensor < len(dtypes))).all(), "pieces of no tensor")


def _check_numbers(index: Index) -> None:
    """Check that the numbers of a decoded index are possible.

    Raises:
        ValueError: If not.
    """
    boxes, tensors = index.boxes, index.boxes.tensors
    _require(len(index) == len(tensors) + len(index.aliases), "a name is used twice")
    num_dims = tensors.shapes.shape[1]
    _require(((tensors.ndims >= 0) & (tensors.ndims <= num_dims)).all(), "impossible ndim")
    padding = np.arange(num_dims) >= tensors.ndims[:, None]
    _require((tensors.shapes >= 0).all() and (tensors.shapes[padding] == 1).all(), "bad shape")
    _require((tensors.ndims <= MAX_DIMS).all(), f"more than {MAX_DIMS} dims")
    # As floats, for a product that is too large for integers must not look like a small one.
    sizes = np.prod(np.maximum(tensors.shapes, 1), axis=1, dtype=np.float64) * tensors.itemsizes
    _require((sizes <= MAX_ELEMENTS).all(), "a tensor is too large to exist")
    shapes = tensors.shapes[boxes.tensor]
    _require((np.diff(boxes.tensor) >= 0).all(), "pieces are not sorted by tensor")
    _require(((boxes.offsets >= 0) & (boxes.offsets <= shapes)).all(), "impossible offset")
    inside = (boxes.extents > 0) & (boxes.extents <= shapes - boxes.offsets)
    _require(inside.all(), "a piece is empty or leaves its tensor")
    _require(((index.file >= 0) & (index.file < len(index.files))).all(), "pieces of no file")
    file_sizes = [file.num_bytes for file in index.files]
    _require(all(0 <= size < 2**62 for size in file_sizes), "impossible size of a file")
    sizes_of_files = np.array(file_sizes, dtype=np.int64)
    num_bytes = np.prod(boxes.extents, axis=1, dtype=np.float64) * tensors.itemsizes[boxes.tensor]
    leaves = (index.position < 0) | (index.position + num_bytes > sizes_of_files[index.file])
    _require(not leaves.any(), "a piece leaves its file")
    _require(
        num_bytes.sum() <= MAX_OVERLAP * max(sum(file_sizes), 1),
        "pieces share their bytes so often that it would take too much memory to read them",
    )
    _require(0 <= index.block_size < 2**62, "impossible size of blocks")
    if index.block_size:
        num_blocks = [-(-size // index.block_size) for size in file_sizes]
        first_blocks = np.cumsum([0, *num_blocks])
        _require(index.first_block.tolist() == first_blocks.tolist(), "files and blocks differ")
        _require(len(index.digests) == first_blocks[-1], "files and digests differ")


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
    """The arrays and the metadata of what `encode_columns` wrote.

    Raises:
        CorruptCheckpointError: If the bytes are not such a file.
    """
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
