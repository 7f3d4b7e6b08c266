"""Host memory for staging, under a byte budget, kept and reused.

Copying into memory that the process has never touched is ten times slower than into memory that it
has: each page must be found and zeroed by the kernel first. So an arena keeps what it has once
allocated, hands it out in chunks, and can be warmed up before it is needed. Where it was not, the
first copy into a chunk finds its pages, so that the threads that copy share this work. A stager
that wants more than the budget waits until a writer gives a chunk back, which bounds memory and
lets a state that is larger than the arena flow through.

An arena can be shared: its chunks then lie one after the other in an unnamed file in memory, whose
descriptor another process may be given. The file has no name that could be left behind: it is gone
as soon as the last process that has it is gone, however that ends. And it can be pinned, slab by
slab, so that a device copies into it by itself.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from remesh.storage import Buffer, map_memory, touch

SLAB_CHUNKS = 8
"""Chunks that are mapped at a time; large mappings get large pages."""

SHARED_SLAB_CHUNKS = 128
"""The same for shared arenas, where each mapping costs its processes a descriptor."""

_LOGGER = logging.getLogger("remesh")

Pin = Callable[[Buffer], Callable[[], None] | None]
"""Pins memory for a device, and returns what undoes that; None if the system refuses."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk of an arena."""

    slot: int  # its place in the arena, counted in chunks
    buffer: Buffer  # its memory


class Arena:
    """Chunks of page-aligned host memory, at least one.

    The budget is in bytes; `chunk_bytes` is a multiple of the page size.
    """

    def __init__(self, budget: int, chunk_bytes: int, *, shared: bool = False) -> None:
        self.chunk_bytes = chunk_bytes
        self._max_chunks = self._least_chunks = max(1, budget // chunk_bytes)
        self._chunks: list[Chunk] = []
        self._fresh: list[Chunk] = []
        self._free: list[Chunk] = []
        self._changed = threading.Condition(threading.RLock())
        self._warming: threading.Thread | None = None
        self._pin: Pin | None = None
        self._unpin: list[Callable[[], None]] = []
        self._shared = shared
        self._file: int | None = None
        self._slab_chunks = SHARED_SLAB_CHUNKS if shared else SLAB_CHUNKS

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return len(self._chunks) * self.chunk_bytes

    @property
    def num_ready_bytes(self) -> int:
        """Bytes that are free now and were touched before."""
        return len(self._free) * self.chunk_bytes

    @property
    def budget(self) -> int:
        """Bytes that may be allocated."""
        return self._max_chunks * self.chunk_bytes

    @property
    def file(self) -> int:
        """The descriptor of a shared arena; slot `n` begins at `n * chunk_bytes` of the file."""
        assert self._shared
        with self._changed:
            if self._file is None:
                self._file = os.memfd_create("remesh-arena", os.MFD_CLOEXEC)
            return self._file

    def grow(self, budget: int) -> None:
        """Raise the budget, if it is smaller."""
        with self._changed:
            self._max_chunks = max(self._max_chunks, budget // self.chunk_bytes)
            self._changed.notify_all()

    def pin_with(self, pin: Pin) -> None:
        """Pin all slabs that are allocated from now on."""
        with self._changed:
            self._pin = pin

    @property
    def is_warming(self) -> bool:
        """True while `warm_beside` is at work."""
        return self._warming is not None and self._warming.is_alive()

    def warm_beside(self, num_bytes: int, after: Callable[[], object] = lambda: None) -> None:
        """Call `after` and then `warm` in the background, unless that has nothing to do."""
        with self._changed:
            is_warm = not self._fresh and self.num_bytes >= min(num_bytes, self.budget)
        if is_warm or self.is_warming:
            return

        def warm() -> None:
            after()
            self.warm(num_bytes)

        warming = threading.Thread(target=warm, name="remesh-warm", daemon=True)
        try:
            warming.start()
        except (RuntimeError, MemoryError) as error:
            # What needs the memory gets it by itself, only later.
            _LOGGER.warning("memory for the next save is not made ready ahead: %s", error)
        else:
            self._warming = warming

    def warm(self, num_bytes: int) -> None:
        """Allocate and touch memory ahead of need, up to `num_bytes` and the budget."""
        while self.num_bytes < min(num_bytes, self.budget):
            self._allocate()
        while True:
            with self._changed:
                if not self._fresh:
                    return
                chunk = self._fresh.pop()
            touch(chunk.buffer)
            self.give(chunk)

    def take(self, stop: threading.Event) -> Chunk | None:
        """A chunk; waits until there is one.

        The wait ends with None when `stop` is set and `wake` is called. Unless it was used or
        warmed before, its memory has never been touched.
        """
        with self._changed:
            while not stop.is_set():
                for chunks in (self._free, self._fresh):
                    if chunks:
                        return chunks.pop()
                if len(self._chunks) < self._max_chunks:
                    self._allocate()
                else:
                    self._changed.wait()
            return None

    def give(self, chunk: Chunk) -> None:
        """Give a chunk back."""
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()

    def chunk(self, slot: int) -> Chunk:
        """The chunk in a slot."""
        return self._chunks[slot]

    def wake(self) -> None:
        """Let those who wait look at their `stop`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back to the system: no chunk that was taken may be used any more.

        The arena is as new then, with its first budget.
        """
        if self._warming is not None:
            self._warming.join()
        with self._changed:
            self._chunks.clear()
            self._fresh.clear()
            self._free.clear()
            self._max_chunks = self._least_chunks
            while self._unpin:
                self._unpin.pop()()
            self._pin = None
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _resize(self, num_bytes: int) -> None:
        """Let the shared file have room for more chunks."""
        try:
            os.ftruncate(self.file, num_bytes)
        except OSError as error:
            raise MemoryError(
                f"no shared memory of {num_bytes} bytes ({error})\nRaise `ulimit -f`, which counts "
                "for it, or lower the memory budget"
            ) from error

    def _allocate(self) -> None:
        """Add a slab, which takes no memory yet unless it is pinned."""
        with self._changed:
            first = len(self._chunks)
            # Slabs end at multiples of their size, also where the budget grew in between.
            end = min(first - first % self._slab_chunks + self._slab_chunks, self._max_chunks)
            if end <= first:
                return
            if self._shared:
                # Others map whole slabs. What was never touched takes no memory.
                whole = -(-end // self._slab_chunks) * self._slab_chunks
                self._resize(whole * self.chunk_bytes)
            size = self.chunk_bytes
            slab = map_memory((end - first) * size, self._file, first * size)
            unpin = None if self._pin is None else self._pin(slab)
            if unpin is not None:
                self._unpin.append(unpin)
            chunks = [
                Chunk(slot, slab[(slot - first) * size : (slot - first + 1) * size])
                for slot in range(first, end)
            ]
            self._chunks += chunks
            self._fresh.extend(reversed(chunks))
            self._changed.notify_all()


class SharedChunks:
    """The chunks of another process's shared arena, given its descriptor."""

    def __init__(self, file: int, chunk_bytes: int) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._slabs: dict[int, Buffer] = {}

    def chunk(self, slot: int) -> Chunk:
        """A chunk by its place; to be called from one thread."""
        number, within = divmod(slot, SHARED_SLAB_CHUNKS)
        if number not in self._slabs:
            num_bytes = SHARED_SLAB_CHUNKS * self._chunk_bytes
            self._slabs[number] = map_memory(num_bytes, self._file, number * num_bytes)
        start = within * self._chunk_bytes
        return Chunk(slot, self._slabs[number][start : start + self._chunk_bytes])
