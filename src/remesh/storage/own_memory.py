"""Reads whose bytes lie in memory already, as the response of an object store does.

What a file holds is read into the caller's buffer, which may be used again and again. A response of
the network lies in memory of its own; to copy it into a buffer first takes as long as to copy it to
where it goes, and twice the memory.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from remesh.storage.protocol import Buffer, Storage


@runtime_checkable
class OwnMemory(Protocol):
    """A storage that reads into memory of its own."""

    def read_own(self, path: str, start: int, stop: int) -> Buffer:
        """Bytes [start, stop) of a file, fewer if it ends before; they may be read-only."""
        ...


def buffer_bytes_for(storage: Storage, num_bytes: int) -> int:
    """Size of the buffer that `read_range` needs for ranges of at most this length."""
    return 0 if isinstance(storage, OwnMemory) else num_bytes


def read_range(storage: Storage, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:
    """Bytes of a file from `start` on, fewer if it ends before.

    The buffer is used if the storage has no memory of its own, see `buffer_bytes_for`.
    """
    if isinstance(storage, OwnMemory):
        return storage.read_own(path, start, start + num_bytes)
    target = buffer[:num_bytes]
    return target[: storage.read_into(path, start, target)]
