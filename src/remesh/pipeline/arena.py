"""Host memory for staging, under a byte budget, kept and reused.

Copying into memory that the process has never touched is ten times slower than into memory that it
has: each page must be found and zeroed by the kernel first. So an arena keeps what it has once
allocated, hands it out in chunks, and can be warmed up before it is needed. A stager that wants
more than the budget waits until a writer gives a chunk back, which bounds memory and lets a state
that is larger than the arena flow through it.
"""

from __future__ import annotations

import threading

from remesh.storage import Buffer, aligned_buffer

SLAB_CHUNKS = 16
"""Chunks that are allocated at a time; large mappings get large pages."""


class Arena:
    """Chunks of page-aligned host memory.

    Args:
        budget: Bytes at most; at least one chunk is always available.
        chunk_bytes: Size of a chunk.
    """

    def __init__(self, budget: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._max_chunks = max(1, budget // chunk_bytes)
        self._free: list[Buffer] = []
        self._num_chunks = 0
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return self._num_chunks * self.chunk_bytes

    @property
    def budget(self) -> int:
        """Bytes that may be allocated."""
        return self._max_chunks * self.chunk_bytes

    def grow(self, budget: int) -> None:
        """Raise the budget, if it is smaller."""
        with self._changed:
            self._max_chunks = max(self._max_chunks, budget // self.chunk_bytes)
            self._changed.notify_all()

    def warm(self, num_bytes: int) -> None:
        """Allocate and touch memory ahead of need, up to `num_bytes` and the budget."""
        while self.num_bytes < min(num_bytes, self.budget):
            self._allocate()

    def take(self, stop: threading.Event) -> Buffer | None:
        """A chunk; waits until there is one.

        Args:
            stop: Ends the waiting when it is set and `wake` is called.

        Returns:
            The chunk, or None if `stop` is set.
        """
        while True:
            with self._changed:
                while not self._free and self._num_chunks >= self._max_chunks:
                    if stop.is_set():
                        return None
                    self._changed.wait()
                if stop.is_set():
                    return None
                if self._free:
                    return self._free.pop()
            self._allocate()

    def give(self, chunk: Buffer) -> None:
        """Give a chunk back."""
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()

    def wake(self) -> None:
        """Let those who wait look at their `stop`."""
        with self._changed:
            self._changed.notify_all()

    def _allocate(self) -> None:
        """Add a slab. Others may use the arena meanwhile."""
        with self._changed:
            count = min(SLAB_CHUNKS, self._max_chunks - self._num_chunks)
            self._num_chunks += count
        if not count:
            return
        slab = aligned_buffer(count * self.chunk_bytes)
        chunks = [
            slab[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]
            for number in range(count)
        ]
        with self._changed:
            self._free.extend(chunks)
            self._changed.notify_all()
