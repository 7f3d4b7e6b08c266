"""The index: which named tensors a checkpoint holds, cut into which pieces, at which bytes.

An index may have many millions of pieces, so it is columns of integers, not objects: one row for
each tensor (`remesh.core.tables.TensorTable`), and lists of offsets, shapes, files and positions of
pieces, which tensors that are cut alike share (`remesh.core.pieces`). Pieces are numbered, those of
a tensor together, and what is known of some of them is gathered by number (`Index.rows`).

The stored form holds the same lists, packed (`remesh.core.packing`). Its columns come from a file,
so nothing is believed before it is checked: neither that columns fit each other, nor how much
memory their content takes.

A piece is stored row-major, without gaps, at `position` of its file. Digests belong to files: each
file is cut into blocks of `block_size` bytes (the last may be shorter), and every block has an
xxh3-128 digest. Checkpoints of other systems have no digests; `block_size` is 0 then.

Files may be compressed (`remesh.core.compression`). Positions, sizes and digests are those of the
content all the same; where each block lies in the stored file is known in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr
from remesh.core.compression import (
    MAX_BLOCK_BYTES,
    BlockTable,
    are_possible,
    stored_lengths,
    table_size,
)
from remesh.core.dtypes import DTYPES
from remesh.core.geometry import MAX_DIMS, MAX_ELEMENTS, Box, IntArray
from remesh.core.packing import pack, unpack
from remesh.core.pieces import MAX_POSITION, Lists, PieceRows, Pieces, distinct, joined
from remesh.core.tables import BoxTable, Columns, Cuts, TensorTable, decode_columns, encode_columns
from remesh.errors import CorruptCheckpointError

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
    offsets, extents, files, steps = found
    in_file, in_tensor = columns["file.position"], columns["tensor.position"]
    return Pieces(offsets, extents, files, steps, in_file, in_tensor)


__all__ = ["Index", "Piece", "StoredFile", "StoredTensor"]


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
    """One tensor of an index, for reading; `Index.pieces` gives its pieces."""

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


@dataclass(frozen=True, eq=False)
class Index(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint: a mapping from names to stored tensors, aliases included.

    Pieces are numbered from 0, tensor by tensor. `rows` gives the columns of some of them;
    `boxes`, `file` and `position` are columns of all of them, which are made when they are first
    asked for and may be large.
    """

    tensors: TensorTable
    """The tensors."""
    pieces_of_tensors: Pieces
    """Their pieces."""
    files: tuple[StoredFile, ...]
    """The data files."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors (tied weights): alias → name."""
    block_size: int = 0
    """Bytes of a digest block; 0 if there are no digests."""
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    """(blocks, 2) xxh3-128 digests (high and low 64 bits) of the blocks of all files."""
    first_block: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    """Row in `digests` of the first block of each file, and their total."""
    stored_begin: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """If files are compressed, the byte of its stored file at which each block begins, -1 in files
    that are not; otherwise empty. The blocks of a file lie there without gaps, in any order."""
    stored_bytes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """If files are compressed, the size of each stored file; otherwise empty."""

    @cached_property
    def _rows(self) -> dict[str, int]:
        rows = {name: row for row, name in enumerate(self.tensors.names)}
        return rows | {alias: rows[name] for alias, name in self.aliases.items()}

    @cached_property
    def first_pieces(self) -> IntArray:
        """Number of the first piece of each tensor, and the number of all pieces."""
        ends = np.cumsum(self.pieces_of_tensors.offsets.lengths, dtype=np.int64)
        return np.concatenate(([0], ends))

    @classmethod
    def of(
        cls,
        boxes: BoxTable,
        file: IntArray,
        position: IntArray,
        files: tuple[StoredFile, ...],
        *further: Any,
        **named: Any,
    ) -> Index:
        """An index of columns of pieces.

        Args:
            boxes: The pieces, sorted by tensor.
            file: Row in `files` of each.
            position: First byte of each in its file.
            files: The data files.
            further: Attributes from `aliases` on.
            named: The same by name.
        """
        return cls.of_cuts(Cuts.of(boxes), file, position, files, *further, **named)

    @classmethod
    def of_cuts(
        cls,
        cuts: Cuts,
        file: IntArray,
        position: IntArray,
        files: tuple[StoredFile, ...],
        *further: Any,
        **named: Any,
    ) -> Index:
        """`of`, where tensors that are cut alike share lists."""
        pieces = Pieces.of(cuts.offsets, cuts.extents, file, position, len(files))
        return cls(cuts.tensors, pieces, files, *further, **named)

    def __repr__(self) -> str:
        num_files = len(self.files)
        return f"Index({len(self)} tensors, {self.num_pieces} pieces, {num_files} files)"

    def __getitem__(self, name: str) -> StoredTensor:
        row = self._rows[name]
        start, stop = self.piece_range(row)
        shape = self.tensors.shape(row)
        dtype = self.tensors.dtype(row)
        num_bytes = math.prod(shape) * dtype.itemsize
        return StoredTensor(name, dtype.name, shape, stop - start, num_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def row(self, name: str) -> int:
        """Row of a tensor in `tensors`; aliases lead to the tensor itself."""
        return self._rows[name]

    @property
    def num_pieces(self) -> int:
        """Number of all pieces."""
        return int(self.first_pieces[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        pieces = self.pieces_of_tensors
        sizes = Cuts(self.tensors, pieces.offsets, pieces.extents).num_bytes
        # Of lists that tensors share, the rows of all would be far more than the index has.
        sums, first = np.concatenate(([0], np.cumsum(sizes.values))), sizes.starts
        return int((sums[first + sizes.lengths] - sums[first]).sum())

    @property
    def is_compressed(self) -> bool:
        """True if files are stored in another form than the one that positions are of."""
        return len(self.stored_bytes) > 0

    @property
    def stored_sizes(self) -> list[int]:
        """Bytes of each file as it is stored."""
        if self.is_compressed:
            sizes: list[int] = self.stored_bytes.tolist()
            return sizes
        return [file.num_bytes for file in self.files]

    def block_table(self, file: int) -> BlockTable | None:
        """Where the blocks of a file lie; None if it is not compressed."""
        begin = self.stored_begin[self.first_block[file] : self.first_block[file + 1]]
        if (begin < 0).all():
            return None
        stored = int(self.stored_bytes[file])
        return BlockTable.of(begin, self.files[file].num_bytes, self.block_size, stored)

    def piece_range(self, row: int) -> tuple[int, int]:
        """Numbers of the first and one past the last piece of a tensor."""
        return int(self.first_pieces[row]), int(self.first_pieces[row + 1])

    def tensor_of(self, piece: IntArray) -> IntArray:
        """Row of the tensor of each of some pieces."""
        tensor: IntArray = np.searchsorted(self.first_pieces, piece, side="right") - 1
        return tensor

    def rows(self, piece: IntArray) -> PieceRows:
        """The columns of some pieces."""
        tensor = self.tensor_of(piece)
        return PieceRows(self.pieces_of_tensors, tensor, piece - self.first_pieces.take(tensor))

    def _all(self) -> PieceRows:
        return self.rows(np.arange(self.num_pieces))

    @cached_property
    def boxes(self) -> BoxTable:
        """All pieces, sorted by tensor."""
        rows = self._all()
        return BoxTable(self.tensors, rows.tensor, rows.offsets, rows.extents)

    @cached_property
    def file(self) -> IntArray:
        """Row in `files` of each piece."""
        return self._all().file

    @cached_property
    def position(self) -> IntArray:
        """First byte of each piece in its file."""
        return self._all().position

    def without(self, is_removed: Callable[[str], bool]) -> Index:
        """The index without some tensors, by name; an alias stays if the tensor itself does."""
        tensors = self.tensors
        left = [row for row, name in enumerate(tensors.names) if not is_removed(name)]
        kept = np.array(left, dtype=np.int64)
        names = {tensors.names[row] for row in left}
        aliases = {
            alias: name
            for alias, name in self.aliases.items()
            if name in names and not is_removed(alias)
        }
        return replace(
            self,
            tensors=tensors.among(kept),
            pieces_of_tensors=self.pieces_of_tensors.among(kept),
            aliases=aliases,
        )

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a tensor."""
        row = self._rows[name]
        start, stop = self.piece_range(row)
        found = self.rows(np.arange(start, stop))
        itemsize, ndim = self.tensors.dtype(row).itemsize, self.tensors.ndims[row]
        columns = (found.offsets, found.extents, found.file, found.position)
        pieces = []
        for offset, extent, file, position in zip(*(c.tolist() for c in columns), strict=True):
            box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            pieces.append(Piece(box, self.files[file].path, position, box.size * itemsize))
        return pieces

    def encode(self) -> bytes:
        """The stored form: a safetensors file of packed columns."""
        metadata = {
            "remesh.files": msgspec.json.encode(
                [[file.path, file.num_bytes] for file in self.files]
            ).decode(),
            "remesh.aliases": msgspec.json.encode(dict(self.aliases)).decode(),
            "remesh.block_size": str(self.block_size),
        }
        pieces = self.pieces_of_tensors
        columns = {
            **self.tensors.columns(),
            "tensor.position": pieces.in_tensor,
            "file.position": pieces.in_file,
            "block.digest": self.digests,
            "block.first": self.first_block,
        }
        if self.is_compressed:
            columns |= dict(zip(COMPRESSED, (self.stored_begin, self.stored_bytes), strict=True))
        for name, lists in zip(LISTS, pieces.lists, strict=True):
            columns |= {f"{name}.list": lists.number, f"{name}.ends": lists.ends}
            columns[name] = lists.values
        packed = {
            name: pack(column.T.reshape(-1)) if column.dtype == np.int64 else column
            for name, column in columns.items()
        }
        data = encode_columns(packed, metadata)
        num_rows = max(self.num_pieces, *(len(lists.values) for lists in pieces.lists))
        lacking = -(-(num_rows - max_rows_of(data)) // ROWS_A_BYTE)
        if lacking > 0:
            packed["padding"] = np.zeros(lacking, dtype=np.uint8)
            data = encode_columns(packed, metadata)
        return data

    @classmethod
    def decode(cls, data: bytes, where: str) -> Index:
        """The index of its stored form.

        Raises:
            CorruptCheckpointError: If the bytes are not a stored index.
        """
        columns, metadata = decode_columns(data, where)
        try:
            files = tuple(
                StoredFile(path, num_bytes)
                for path, num_bytes in msgspec.json.decode(
                    metadata["remesh.files"], type=list[tuple[str, int]]
                )
            )
            columns = unpacked(columns, len(files), max_rows_of(data))
            index = cls(
                TensorTable.from_columns(columns),
                pieces_of(columns, max_rows_of(data)),
                files,
                msgspec.json.decode(metadata["remesh.aliases"], type=dict[str, str]),
                int(metadata["remesh.block_size"]),
                columns["block.digest"],
                columns["block.first"],
                *(columns[name] for name in COMPRESSED if name in columns),
            )
            _check_numbers(index)
            return index
        except (KeyError, ValueError, msgspec.DecodeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{where}: not an index: {error!r}") from error


def checked(index: Index, where: str) -> Index:
    """The index that another system wrote, if its numbers are possible."""
    try:
        _check_numbers(index)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{where}: {error}. The checkpoint was cut short or damaged; load another one."
        ) from error
    return index


MAX_OVERLAP = 1024
"""How often, on average, bytes may belong to a piece: ties and views share them, and not more."""


def _check_numbers(index: Index) -> None:
    """Check that the numbers of a decoded index are possible."""
    tensors = index.tensors
    require(len(index) == len(tensors) + len(index.aliases), "a name is used twice")
    num_dims = tensors.shapes.shape[1]
    require(((tensors.ndims >= 0) & (tensors.ndims <= num_dims)).all(), "impossible ndim")
    padding = np.arange(num_dims) >= tensors.ndims[:, None]
    require((tensors.shapes >= 0).all() and (tensors.shapes[padding] == 1).all(), "bad shape")
    require((tensors.ndims <= MAX_DIMS).all(), f"more than {MAX_DIMS} dims")
    # As floats, for a product that is too large for integers must not look like a small one.
    sizes = np.prod(np.maximum(tensors.shapes, 1), axis=1, dtype=np.float64) * tensors.itemsizes
    require((sizes <= MAX_ELEMENTS).all(), "a tensor is too large to exist")
    file_sizes = [file.num_bytes for file in index.files]
    require(all(0 <= size < MAX_ELEMENTS for size in file_sizes), "impossible size of a file")
    _check_pieces(index, np.array(file_sizes, dtype=np.int64))
    require(0 <= index.block_size < MAX_ELEMENTS, "impossible size of blocks")
    if index.block_size:
        num_blocks = [-(-size // index.block_size) for size in file_sizes]
        first_blocks = np.cumsum([0, *num_blocks])
        require(index.first_block.tolist() == first_blocks.tolist(), "files and blocks differ")
        require(len(index.digests) == first_blocks[-1], "files and digests differ")
    if index.is_compressed:
        _check_stored(index)


def _check_stored(index: Index) -> None:
    """Check that the stored blocks of compressed files are possible."""
    require(0 < index.block_size <= MAX_BLOCK_BYTES, "impossible size of compressed blocks")
    sizes = np.array([file.num_bytes for file in index.files], dtype=np.int64)
    stored = index.stored_bytes
    num_blocks = np.diff(index.first_block)
    file = np.repeat(np.arange(len(sizes)), num_blocks)
    is_plain = np.ones(len(sizes), np.bool_)
    is_plain[file[index.stored_begin != -1]] = False
    require((stored[is_plain] == sizes[is_plain]).all(), "a file has two sizes")
    tables = table_size(num_blocks)
    is_possible = is_plain | ((stored >= tables) & (stored <= sizes + tables))
    require(is_possible.all(), "impossible size of a compressed file")
    rows = ~is_plain[file]
    begin, of = index.stored_begin[rows], file[rows]
    full = np.full(len(file), index.block_size)
    last = index.first_block[1:][num_blocks > 0] - 1
    full[last] = (sizes - (num_blocks - 1) * index.block_size)[num_blocks > 0]
    length = stored_lengths(begin, of, stored - tables)
    starts = np.flatnonzero(np.diff(of, prepend=-1))
    is_covered = not len(of) or not np.minimum.reduceat(begin, starts).any()
    require(is_covered, "compressed blocks leave a gap")
    require(are_possible(begin, length, full[rows]), "impossible size of a compressed block")


def _lie_in(numbers: IntArray, lowest: int, highest: int) -> bool:
    return not numbers.size or bool(numbers.min() >= lowest and numbers.max() <= highest)


def _check_pieces(index: Index, file_sizes: IntArray) -> None:
    """Check that pieces lie in their tensors and files; tensors that are cut alike only once."""
    pieces, tensors = index.pieces_of_tensors, index.tensors
    offsets, extents, file = (one.values for one in (pieces.offsets, pieces.extents, pieces.files))
    require(len(pieces.in_file) == len(file_sizes), "positions of other files")
    require(_lie_in(file, 0, len(file_sizes) - 1), "pieces of no file")
    require(_lie_in(offsets, 0, MAX_ELEMENTS - 1), "impossible offset")
    require(_lie_in(extents, 1, MAX_ELEMENTS), "a piece is empty or leaves its tensor")
    for part in (pieces.in_file, pieces.in_tensor, pieces.steps.values):
        require(_lie_in(part, -MAX_POSITION, MAX_POSITION), "a piece leaves its file")
    filled = np.flatnonzero(pieces.offsets.lengths)
    if not len(filled):
        return
    own, itemsizes = pieces.among(filled), tensors.itemsizes[filled]
    kinds, of = distinct(*(one.number for one in own.lists), itemsizes)
    lengths = own.offsets.lengths[kinds]
    first = np.cumsum(lengths) - lengths
    offsets, extents, file, steps = (
        joined(one.values, one.starts[kinds], lengths) for one in own.lists
    )
    num_bytes = np.repeat(itemsizes[kinds].astype(np.float64), lengths)
    for dim in range(tensors.shapes.shape[1]):
        highest = np.maximum.reduceat(offsets[:, dim] + extents[:, dim], first)[of]
        is_inside = (highest <= tensors.shapes[filled, dim]).all()
        require(is_inside, "a piece is empty or leaves its tensor")
        num_bytes *= extents[:, dim]
    begin = pieces.in_file[file] + steps
    low = np.minimum.reduceat(begin, first)[of] + own.in_tensor
    high = np.maximum.reduceat(begin + num_bytes - file_sizes[file], first)[of]
    leaves = (low < 0) | (high + own.in_tensor > 0)
    require(not leaves.any(), "a piece leaves its file")
    total = np.add.reduceat(num_bytes, first)[of].sum()
    require(
        total <= MAX_OVERLAP * max(sum(file_sizes.tolist()), 1),
        "pieces share their bytes so often that it would take too much memory to read them",
    )
