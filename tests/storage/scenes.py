"""What tests of storages do again and again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from remesh.errors import CheckpointExistsError
from remesh.storage import ALIGNMENT, Buffer, Storage, aligned_buffer


def pattern(size: int) -> Buffer:
    """Bytes that tell positions apart, also those that differ by a multiple of a page."""
    return (np.arange(size, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


def aligned(data: Buffer) -> Buffer:
    """The same bytes, fit for direct I/O."""
    buffer = aligned_buffer(data.size)
    buffer[:] = data
    return buffer


def write(storage: Storage, path: str, content: Buffer, chunk: int = 4 * ALIGNMENT) -> None:
    writer = storage.create(path, content.size)
    for start in range(0, content.size, chunk):
        writer.write(start, aligned(content[start : start + chunk]))
    writer.finish()


def winners_of(storages: Sequence[Storage], path: str, times: int = 1) -> list[int]:
    """Let writers put their number to one path at the same time; the numbers of who succeeded."""
    barrier = threading.Barrier(len(storages))

    def race(number: int) -> bool:
        barrier.wait()
        try:
            storages[number].put(path, b"%d" % number * times, overwrite=False)
        except CheckpointExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(storages)) as pool:
        won = list(pool.map(race, range(len(storages))))
    return [number for number, has_won in enumerate(won) if has_won]
