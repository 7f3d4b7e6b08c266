"""Writing one data file: pieces → chunks → digests → storage.

The file's bytes are fully determined before the first is written: a header, then the pieces one
after the other. Each thread takes the next chunk of the file, gathers its bytes from wherever the
pieces lie in memory, digests its blocks and writes it. A chunk may begin and end in the middle of
a piece; which elements those are is again a flat range, so `boxes_of_flat_range` cuts it into
boxes that any memory can copy out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.dtypes import DType
from remesh.geometry import boxes_of_flat_range
from remesh.integrity import BLOCK_SIZE, Digests, block_digests
from remesh.memory import Memory
from remesh.pipeline.workers import run_workers
from remesh.storage import Buffer, Storage

CHUNK_SIZE = 4 << 20
"""Bytes written at a time: a multiple of the digest block, large enough for full disk speed."""

NUM_THREADS = 2
"""Writers of a file: one copies and digests while the other waits for the disk."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePiece:
    """A box to be stored.

    Attributes:
        memory: Where its elements are.
        shape: Shape of the box, at least one element.
        dtype: Its element type.
        position: Byte at which it begins in the file, a multiple of the element size.
    """

    memory: Memory
    shape: tuple[int, ...]
    dtype: DType
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class WrittenFile:
    """A finished data file."""

    path: str
    num_bytes: int
    digests: Digests


def write_file(
    storage: Storage,
    path: str,
    header: bytes,
    pieces: Sequence[FilePiece],
    num_bytes: int,
    on_chunk: Callable[[int], None],
) -> WrittenFile:
    """Write a data file and make it durable.

    Args:
        storage: Where to.
        path: Name of the file; it must not exist.
        header: The file's first bytes.
        pieces: What follows, sorted by position, without gaps.
        num_bytes: Size of the whole file.
        on_chunk: Called after each chunk, in the thread that wrote it, with its size.

    Raises:
        NoSpaceError: If there is no room; the file is gone then.
        StorageError: If the storage fails; the file is gone then, if the storage still can.
    """
    writer = storage.create(path, num_bytes)
    digests = np.zeros((-(-num_bytes // BLOCK_SIZE), 2), dtype=np.uint64)
    positions = [piece.position for piece in pieces]

    def write_chunk(number: int, buffer: Buffer) -> None:
        start = number * CHUNK_SIZE
        chunk = buffer[: min(CHUNK_SIZE, num_bytes - start)]
        _fill(chunk, start, header, pieces, positions)
        first = start // BLOCK_SIZE
        found = block_digests(chunk)
        digests[first : first + len(found)] = found
        writer.write(start, chunk)
        on_chunk(len(chunk))

    try:
        num_chunks = -(-num_bytes // CHUNK_SIZE)
        run_workers(NUM_THREADS, num_chunks, min(CHUNK_SIZE, num_bytes), write_chunk)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return WrittenFile(path, num_bytes, digests)


def _fill(
    chunk: Buffer,
    start: int,
    header: bytes,
    pieces: Sequence[FilePiece],
    positions: Sequence[int],
) -> None:
    """Gather the bytes of the file from `start` on."""
    stop = start + len(chunk)
    if start < len(header):
        part = np.frombuffer(header, dtype=np.uint8)[start:stop]
        chunk[: len(part)] = part
    number = max(bisect.bisect_right(positions, start) - 1, 0)
    while number < len(pieces) and positions[number] < stop:
        _copy_piece(pieces[number], chunk, start)
        number += 1


def _copy_piece(piece: FilePiece, chunk: Buffer, start: int) -> None:
    """Copy what a chunk holds of a piece."""
    itemsize = piece.dtype.itemsize
    size = int(np.prod(piece.shape, dtype=np.int64))
    first = max(0, (start - piece.position) // itemsize)
    last = min(size, (start + len(chunk) - piece.position) // itemsize)
    at = piece.position + first * itemsize - start
    for box in boxes_of_flat_range(piece.shape, first, max(first, last)):
        end = at + box.size * itemsize
        into = chunk[at:end].view(piece.dtype.carrier).reshape(box.shape)
        piece.memory.copy_out(box, into)
        at = end
