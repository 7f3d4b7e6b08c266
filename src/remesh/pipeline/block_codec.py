"""Whether and how the blocks of a file are compressed while it is written, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from remesh.compression import encode_block
from remesh.geometry import IntArray
from remesh.integrity import BLOCK_SIZE
from remesh.storage import Buffer

FIRST_BYTES = 64 << 20
"""Bytes that are compressed before it is measured whether that pays: storages that take a file as a
stream have room for the first few, so these say nothing of how fast they take the rest."""

SMOOTHING = 0.25
"""Weight of the newest measurement."""

MAX_EARLY = 8
"""Chunks of a compressed file that wait for others, so that blocks lie in their order."""


@dataclass(slots=True)
class BlockCodec:
    """Encodes the blocks of a stream, chunk by chunk.

    If it adapts, a chunk is compressed if encoding takes less time than writing the bytes that it
    saves, as measured for the chunks before. So where the storage is the limit, threads encode
    instead of waiting for it, and where it is not, they do not spend their time on it.

    Args:
        adapts: Whether it measures if encoding pays; otherwise it encodes always.
        start: Bytes of the stream at which the size of the elements changes, from 0 on, ascending.
        num_planes: The size of the elements from there on.
        clock: Seconds.
    """

    adapts: bool
    start: IntArray
    num_planes: IntArray
    clock: Callable[[], float] = time.perf_counter
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _num_bytes: int = field(init=False, default=0)
    _encoding: float = field(init=False, default=0.0)  # seconds a byte
    _saving: float = field(init=False, default=0.0)  # bytes a byte
    _writing: float = field(init=False, default=0.0)  # seconds a stored byte

    def encode(self, start: int, data: Buffer) -> list[Buffer]:
        """The stored form of each block of some bytes, which begin with a block.

        Args:
            start: Byte of the stream at which they begin.
            data: The bytes.
        """
        blocks = [data[at : at + BLOCK_SIZE] for at in range(0, len(data), BLOCK_SIZE)]
        with self._lock:
            is_first = self._num_bytes < FIRST_BYTES
            pays = is_first or self._encoding < self._saving * self._writing
            self._num_bytes += len(data)
        if self.adapts and not pays:
            return blocks
        began = self.clock()
        encoded = [
            encode_block(block, self._planes_at(start + number * BLOCK_SIZE + len(block) // 2))
            for number, block in enumerate(blocks)
        ]
        seconds, num_saved = self.clock() - began, len(data) - sum(map(len, encoded))
        with self._lock:
            self._encoding = _smoothed(self._encoding, seconds / len(data))
            self._saving = _smoothed(self._saving, num_saved / len(data))
        return encoded

    def written(self, num_bytes: int, seconds: float) -> None:
        """Take notice of how long it took to write so many bytes, in their stored form."""
        with self._lock:
            self._writing = _smoothed(self._writing, seconds / num_bytes)

    def _planes_at(self, position: int) -> int:
        return int(self.num_planes[np.searchsorted(self.start, position, "right") - 1])


def _smoothed(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """The stored form of a chunk.

    Attributes:
        num_bytes: Bytes that it stands for.
        lengths: Stored bytes of its blocks.
        data: Its blocks, one after the other.
    """

    num_bytes: int
    lengths: IntArray
    data: Buffer


class ChunkOrder:
    """Stored chunks of a compressed file, which are handed on in their order, or nearly.

    The place of a chunk is known when the lengths of those before it are. Threads finish chunks a
    little out of order, and a file in that order would take a reader of several chunks several
    reads. So a chunk that comes early is kept, without waiting, until those before it have come or
    too many are kept.

    Args:
        first: Number of the first chunk.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._early: dict[int, StoredChunk] = {}

    def take(self, number: int, chunk: StoredChunk) -> list[tuple[int, StoredChunk]]:
        """Take a chunk; those that are to be stored now, after what was handed on before."""
        self._early[number] = chunk
        ready = []
        while self._early:
            first = min(self._early)
            if first > self._next and len(self._early) <= MAX_EARLY:
                break
            ready.append((first, self._early.pop(first)))
            self._next = max(self._next, first + 1)
        return ready
