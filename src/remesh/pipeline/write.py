"""Writing what a rank stores: pieces → chunks → digests → storage.

All that a rank writes is one stream of bytes, fully determined before the first is written: pieces
one after the other, of which headers are some. A chunk of it is gathered from wherever the pieces
lie in memory (`FileLayout`), then its blocks are digested, and it is written (`ChunkWriter`), by
the threads of `remesh.pipeline.stage`. A chunk may begin and end in the middle of a piece; which
elements those are is again a flat range, so `boxes_of_flat_range` cuts it into boxes that any
memory can copy out.

`StreamFiles` says where the bytes of the stream go. Mostly the stream is one file. Formats with
several files for a rank cut it into ranges, each of which is a file, or, where several ranks write
one file, a range of it.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from remesh.core.compression import encode_block, encode_table, table_size
from remesh.core.dtypes import BY_NAME, DType
from remesh.core.geometry import IntArray, boxes_of_flat_range
from remesh.core.integrity import BLOCK_SIZE, WrittenFile, block_digests
from remesh.core.memory import HostMemory, Memory, contiguous_bytes
from remesh.pipeline.arena import Chunk
from remesh.storage import Buffer, Storage, Writer

Compress = Literal["zstd"]
"""How files are compressed."""

CHUNK_SIZE = 4 << 20
"""Bytes written at a time: a multiple of the digest block, large enough for full disk speed, small
enough to be still in the processor's cache when it is digested and written."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePiece:
    """A box to be stored."""

    memory: Memory  # where its elements are
    shape: tuple[int, ...]  # shape of the box, at least one element
    dtype: DType  # its element type
    position: int  # byte at which it begins in the file, a multiple of the element size

    @classmethod
    def of_bytes(cls, position: int, data: bytes) -> Self:
        """Bytes that are known, such as a header."""
        array = np.frombuffer(data, np.uint8)
        return cls(HostMemory(array), array.shape, BY_NAME["uint8"], position)


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """All that determines the bytes of a stream, which mostly is one data file."""

    pieces: Sequence[FilePiece]  # what it consists of, sorted by position, without gaps
    num_bytes: int  # size of the whole stream

    @property
    def num_chunks(self) -> int:
        """Chunks of the file."""
        return -(-self.num_bytes // CHUNK_SIZE)

    def fill_chunk(self, number: int, buffer: Buffer, *, queued: bool = False) -> Buffer:
        """Gather the bytes of a chunk in the beginning of a buffer; returns that part of it.

        Copies out of a device may still be under way then if they are `queued`.
        """
        start = number * CHUNK_SIZE
        chunk = buffer[: min(CHUNK_SIZE, self.num_bytes - start)]
        self.fill(start, chunk, queued=queued)
        return chunk

    def fill(self, start: int, buffer: Buffer, *, queued: bool = False) -> None:
        """Gather the bytes of the file from `start` on, which is at an element's beginning."""
        stop = start + len(buffer)
        number = bisect.bisect_right(self.pieces, start, key=lambda piece: piece.position)
        number, at = number - 1, start
        plain: list[Buffer] = []
        while number < len(self.pieces) and (piece := self.pieces[number]).position < stop:
            data = contiguous_bytes(piece.memory)
            if data is None:
                at += _concatenate(plain, buffer[at - start :])
                at += _copy_piece(piece, buffer, start, queued=queued)
            else:
                plain.append(data[max(start - piece.position, 0) : stop - piece.position])
            number += 1
        _concatenate(plain, buffer[at - start :])


@dataclass(frozen=True, slots=True, eq=False)
class StreamFiles:
    """The files that a stream is cut into, and the ranges of it that lie in them."""

    paths: tuple[str, ...]  # names of the files
    sizes: tuple[int, ...]
    file: IntArray  # the file of each range
    start: IntArray  # byte of the stream at which each range begins, ascending
    position: IntArray  # byte of the file at which it begins
    num_bytes: IntArray  # its length; what the stream has between two ranges is not written
    is_shared: bool = False
    """Whether other ranks write other ranges of the files. Otherwise each file is one range, and
    does not exist before."""
    compress: Compress | None = None
    """How the files are compressed (`remesh.save`); None if they are not. Each begins with a chunk
    if they are."""
    element_start: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    """If they are compressed, bytes of the stream at which the size of its elements changes, from 0
    on, ascending."""
    element_bytes: IntArray = field(default_factory=lambda: np.ones(1, np.int64))
    """The size of the elements from there on."""
    replaces: bool = False  # whether files of these names, if there are any, are replaced

    @property
    def has_digests(self) -> bool:
        """True if each file begins with a chunk, so that no chunk has bytes of two files."""
        return not (self.is_shared or (self.start % CHUNK_SIZE).any())

    def encode(self, start: int, data: Buffer) -> list[Buffer]:
        """The stored form of each block of some bytes, which begin with a block."""
        encoded = []
        for at in range(0, len(data), BLOCK_SIZE):
            block = data[at : at + BLOCK_SIZE]
            middle = start + at + len(block) // 2
            row = np.searchsorted(self.element_start, middle, "right") - 1
            encoded.append(encode_block(block, int(self.element_bytes[row])))
        return encoded


def whole_files(paths: Sequence[str], sizes: Sequence[int], starts: Sequence[int]) -> StreamFiles:
    """A stream that is cut into files, each beginning at a byte of it."""
    num_bytes = np.array(sizes, np.int64)
    return StreamFiles(
        tuple(paths),
        tuple(sizes),
        np.arange(len(num_bytes)),
        np.array(starts, np.int64),
        np.zeros_like(num_bytes),
        num_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A chunk of a stream on its way from the stager to the writer."""

    number: int  # which chunk of the stream it is
    num_bytes: int  # bytes of the stream in it
    chunk: Chunk  # where they are

    @property
    def data(self) -> Buffer:
        """The bytes."""
        return self.chunk.buffer[: self.num_bytes]


class ChunkWriter:
    """The files of a stream, which is written chunk by chunk.

    The blocks of files that begin with a chunk are digested. `begin` creates a single file, so
    that a lack of room is seen before bytes are moved; several are created when the first bytes of
    each arrive. Each is finished with its last bytes. `give` takes each chunk back and `on_chunk`
    its size, in the thread that wrote it.

    Raises:
        NoSpaceError: If there is no room.
        StorageError: If the storage fails.
    """

    def __init__(
        self,
        storage: Storage,
        files: StreamFiles,
        num_bytes: int,
        give: Callable[[Chunk], None],
        on_chunk: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._files = files
        self._give = give
        self._on_chunk = on_chunk
        self._has_digests = files.has_digests
        self._digests = np.zeros((-(-num_bytes // BLOCK_SIZE), 2), dtype=np.uint64)
        self._is_compressed = files.compress is not None
        self._stored_begin = np.zeros(len(self._digests), np.int64)
        self._stored_bytes = [0] * len(files.paths)
        self._left = np.bincount(files.file, files.num_bytes, len(files.paths)).astype(np.int64)
        self._lock = threading.Lock()
        self._open: dict[int, Writer] = {}
        self._created: list[int] = []

    def begin(self) -> None:
        """Create the file, if it is a single one of this rank's."""
        if self._has_digests and len(self._files.paths) == 1:
            self._writer_of(0)

    def write(self, chunks: Iterable[Filled]) -> None:
        """Write chunks as they come; any thread, any order."""
        for filled in chunks:
            number, chunk = filled.number, filled.data
            try:
                for file, position, part in self._parts(number, chunk):
                    if self._is_compressed:
                        self._append(file, number * CHUNK_SIZE, part)
                    else:
                        self._writer_of(file).write(position, part)
                for file, _, part in self._parts(number, chunk):
                    if self._has_digests:
                        found = block_digests(part)
                        first = number * CHUNK_SIZE // BLOCK_SIZE
                        self._digests[first : first + len(found)] = found
                    if not self._is_compressed:
                        self._count(file, len(part))
            finally:
                self._give(filled.chunk)
            self._on_chunk(filled.num_bytes)

    def _append(self, file: int, start: int, part: Buffer) -> None:
        """Write the stored form of what a file has from a byte of the stream on."""
        blocks = self._files.encode(start, part)
        begins = np.cumsum([0, *map(len, blocks)])
        with self._lock:
            begins += self._stored_bytes[file]
            self._stored_bytes[file] = int(begins[-1])
        row = start // BLOCK_SIZE
        self._stored_begin[row : row + len(blocks)] = begins[:-1]
        # A copy: blocks may lie in the caller's buffer.
        self._writer_of(file).write(int(begins[0]), np.concatenate(blocks))
        self._count(file, len(part))

    def _parts(self, number: int, chunk: Buffer) -> Iterator[tuple[int, int, Buffer]]:
        """File, position in it and bytes of what a chunk consists of."""
        start, files = number * CHUNK_SIZE, self._files
        begin = max(int(np.searchsorted(files.start, start, "right")) - 1, 0)
        end = int(np.searchsorted(files.start, start + len(chunk), "left"))
        columns = (files.file, files.start, files.position, files.num_bytes)
        ranges = zip(*(column[begin:end].tolist() for column in columns), strict=True)
        for file, first, position, num_bytes in ranges:
            skipped = max(start - first, 0)
            part = chunk[first + skipped - start : max(first + num_bytes - start, 0)]
            if len(part):
                yield file, position + skipped, part

    def finish(self) -> list[WrittenFile]:
        """What is known of each file, now that all chunks are there and the files are durable."""
        assert not self._left.any(), "the files are not complete"
        return [self._written(file) for file in range(len(self._left))]

    def _written(self, file: int) -> WrittenFile:
        if not self._has_digests:
            return WrittenFile(np.zeros((0, 2), dtype=np.uint64))
        blocks = self._blocks_of(file)
        if not self._is_compressed:
            return WrittenFile(self._digests[blocks])
        begin, size = self._stored_begin[blocks], self._stored_bytes[file]
        return WrittenFile(self._digests[blocks], begin, size)

    def _blocks_of(self, file: int) -> slice:
        """Blocks of the stream that are a file's, which begins with one."""
        first = int(self._files.start[file]) // BLOCK_SIZE
        return slice(first, first - int(-self._files.num_bytes[file] // BLOCK_SIZE))

    def _write_table(self, file: int) -> int | None:
        """Write what ends a compressed file; its size. None if it is not compressed."""
        if not self._is_compressed:
            return None
        begin, size = self._stored_begin[self._blocks_of(file)], self._files.sizes[file]
        table = encode_table(begin, size, BLOCK_SIZE)
        self._writer_of(file).write(self._stored_bytes[file], table)
        self._stored_bytes[file] += len(table)
        return self._stored_bytes[file]

    def abort(self) -> None:
        """Remove what was written."""
        for file in self._created:
            if file in self._open:
                self._open[file].abort()
            elif not (self._files.is_shared or self._files.replaces):
                self._storage.delete(self._files.paths[file])

    def _writer_of(self, file: int) -> Writer:
        with self._lock:
            if file not in self._open:
                path, size = self._files.paths[file], self._files.sizes[file]
                if self._files.is_shared:
                    self._open[file] = self._storage.open_shared(path, size)
                else:
                    if self._is_compressed:
                        size += table_size(-(-size // BLOCK_SIZE))
                    replaces = self._files.replaces
                    self._open[file] = self._storage.create(path, size, overwrite=replaces)
                self._created.append(file)
            return self._open[file]

    def _count(self, file: int, num_bytes: int) -> None:
        """Finish a file when all its bytes are there."""
        with self._lock:
            self._left[file] -= num_bytes
            is_complete = not self._left[file]
        if is_complete:
            self._writer_of(file).finish(self._write_table(file))
            del self._open[file]


def _concatenate(plain: list[Buffer], into: Buffer) -> int:
    """Copy neighbouring bytes to the beginning of a buffer, and forget them; how many they were.

    One call for many small tensors costs a fraction of one call for each.
    """
    num_bytes = sum(map(len, plain))
    if plain:
        np.concatenate(plain, out=into[:num_bytes])
        plain.clear()
    return num_bytes


def _copy_piece(piece: FilePiece, chunk: Buffer, start: int, *, queued: bool) -> int:
    """Copy what a chunk holds of a piece, or queue the copies; how many bytes that is."""
    memory = piece.memory
    copy_out = memory.queue_copy_out if queued else memory.copy_out
    itemsize = piece.dtype.itemsize
    size = math.prod(piece.shape)
    first = max(0, (start - piece.position) // itemsize)
    last = min(size, (start + len(chunk) - piece.position) // itemsize)
    begin = at = piece.position + first * itemsize - start
    for box in boxes_of_flat_range(piece.shape, first, max(first, last)):
        end = at + box.size * itemsize
        into = chunk[at:end].view(piece.dtype.carrier).reshape(box.shape)
        copy_out(box, into)
        at = end
    return at - begin
