"""Writing a stream: its chunks are filled from the tensors, then digested and written.

The threads of a `Stager` fill chunks of an arena with final file bytes, and hand them over to be
digested and written. Each chunk is given back then. There are two ways to take them:

* The thread that has filled a chunk writes it, while it is hot in the cache, so a few chunks are
  enough (`remesh.pipeline.collect.direct_stager`). The caller waits until all is written.
* The trainer waits for the stager alone, which hands the chunks over to another thread or another
  process (`StagedChunks`, `remesh.background`).

Copies out of a device are queued, if the device has a queue for it
(`remesh.core.memory.CopyQueue`): each thread hands a chunk over when the copies into it are done,
and queues those of the next one before it waits. When `Stager.stage` returns, all of them are done,
so nothing that the trainer does afterwards, on the host or on the device, can reach what is stored.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from remesh.core.integrity import BLOCK_SIZE, Digests, WrittenFile, block_digests
from remesh.core.memory import CopyQueue
from remesh.pipeline.arena import Arena, Chunk
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, FileLayout, Filled, StreamFiles
from remesh.storage import Storage
from remesh.storage.workers import run_threads

NUM_STAGERS = 2
NUM_WRITERS = 3
"""Threads that write a stream: one copies and digests while the others wait for the disk, or for
each other where the file system lets only one at a time into a file."""


Consume = Callable[[Iterable[Filled]], object]
"""Takes chunks as they are filled, and has them given back; several threads call it at once."""


_Queued = tuple[Filled, Callable[[], None]]
"""A chunk, and what waits until the copies into it are done."""


class Stager:
    """Copies a stream out of the trainer's memory, into an arena's chunks of `CHUNK_SIZE`.

    `copies` makes a queue for copies out of a device, for each thread; None if all memory is the
    host's.
    """

    def __init__(
        self,
        layout: FileLayout,
        arena: Arena,
        copies: Callable[[], CopyQueue] | None = None,
        *,
        num_threads: int = NUM_STAGERS,
    ) -> None:
        assert arena.chunk_bytes == CHUNK_SIZE
        self._layout = layout
        self._arena = arena
        self.give = arena.give
        self._copies = copies
        self._queued: list[deque[_Queued]] = []  # of each thread, chunks that are being filled
        self._num_threads = min(num_threads, layout.num_chunks)
        self._stop = threading.Event()
        self._numbers = iter(range(layout.num_chunks))
        self._claiming = threading.Lock()

    @property
    def fits(self) -> bool:
        """True if the arena can hold the whole stream."""
        return self._arena.budget >= self._layout.num_chunks * CHUNK_SIZE

    def cancel(self) -> None:
        """Let `stage` end soon."""
        self._stop.set()
        self._arena.wake()

    def stage(self, consume: Consume, begin: Callable[[], None] = lambda: None) -> None:
        """Copy everything out of the trainer's memory, or stop early after `cancel`.

        `consume` takes the filled chunks, in the threads that fill them; `begin` is called before
        the first chunk is taken.
        """
        begin()
        try:
            run_threads(self._num_threads, partial(consume, self), self.cancel)
        finally:
            for queued in self._queued:  # those of threads that failed
                while queued:
                    self._arena.give(self._finished(queued).chunk)

    def __iter__(self) -> Iterator[Filled]:
        """The chunks that one thread fills."""
        copies = None if self._copies is None else self._copies()
        queued: deque[_Queued] = deque()
        self._queued.append(queued)
        while (claimed := self._claim()) is not None:
            queued.append(self._fill(*claimed, copies))
            # A thread that may have to wait for memory keeps nothing that the writer could give
            # back.
            while len(queued) > (1 if copies is not None and self.fits else 0):
                yield self._finished(queued)
        while queued:
            yield self._finished(queued)

    def _finished(self, queued: deque[_Queued]) -> Filled:
        """The first of some chunks, once the copies into it are done."""
        filled, wait = queued.popleft()
        try:
            wait()
        except BaseException:
            self._arena.give(filled.chunk)
            raise
        return filled

    def _claim(self) -> tuple[int, Chunk] | None:
        # A number and its memory are claimed together. Otherwise one thread could hold a number
        # and wait for memory while another takes the memory for later chunks, and a storage that
        # is written in order would wait for the first.
        with self._claiming:
            number = next(self._numbers, None)
            chunk = None if number is None else self._arena.take(self._stop)
            return None if number is None or chunk is None else (number, chunk)

    def _fill(self, number: int, chunk: Chunk, copies: CopyQueue | None) -> _Queued:
        """Fill a chunk, or queue the copies that do; also what waits for these."""
        try:
            if copies is None:
                data = self._layout.fill_chunk(number, chunk.buffer)
                return Filled(number, len(data), chunk), lambda: None
            with copies:
                data = self._layout.fill_chunk(number, chunk.buffer, queued=True)
                return Filled(number, len(data), chunk), copies.mark()
        except BaseException:
            try:
                if copies is not None:
                    copies.mark()()  # nothing may still be copied into what others are given
            finally:
                self._arena.give(chunk)
            raise


class StagedChunks:
    """Chunks that a stager hands over in another thread or process: to what writes them, a stager.

    If the whole stream finds touched memory in the arena, writing does not begin before everything
    is staged, because it would only take memory bandwidth and time from what the trainer waits for.
    Otherwise both run `at_once`: chunks that come back from the writer are ready sooner than memory
    that was never touched, and if the arena is smaller than the stream, the stager waits for them.

    `give` gives a chunk back, and `stop` makes the stager end soon, which then calls `end`.
    """

    def __init__(
        self, give: Callable[[Chunk], None], stop: Callable[[], None], *, at_once: bool
    ) -> None:
        self.give = give
        self._stop = stop
        self._at_once = at_once
        self._changed = threading.Condition()
        self._filled: dict[int, Filled] = {}  # by their numbers, those that nobody has taken
        self._next = 0  # which is taken next
        self._is_cancelled = False
        self._error: BaseException | None = None
        self.ended = threading.Event()  # no further chunk comes

    def put(self, filled: Filled) -> None:
        """Hand a chunk over."""
        with self._changed:
            self._filled[filled.number] = filled
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Say that no further chunk comes; the error says why, if not all is staged."""
        if error is not None:
            self.cancel(error)
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    def cancel(self, error: BaseException | None = None) -> None:
        """Let `stage` take no more of what is staged, and raise the error when all has ended."""
        self._error = self._error or error
        self._is_cancelled = True
        self._stop()

    def stage(self, consume: Consume, begin: Callable[[], None] = lambda: None) -> None:
        """As in `Stager`; ends only after `end`."""
        if not self._at_once:
            self.ended.wait()
        try:
            begin()
            run_threads(NUM_WRITERS, partial(consume, self), self.cancel)
        except BaseException:
            self.cancel()
            raise
        finally:
            # What is still staged is given back, so that the stager does not wait for memory.
            while (filled := self._take()) is not None:
                self.give(filled.chunk)
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[Filled]:
        """The chunks that one thread takes."""
        while (filled := self._take()) is not None:
            if self._is_cancelled:
                self.give(filled.chunk)
            else:
                yield filled

    def _take(self) -> Filled | None:
        """The next chunk of the stream; None when there is no further one.

        A storage that takes a file as a stream lets who is ahead wait. If all writers waited for a
        chunk that takes long to fill, none would be left to take it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._filled or self.ended.is_set())
            if not self._filled:
                return None
            # After a failure some never come.
            number = self._next if self._next in self._filled else min(self._filled)
            self._next = number + 1
            return self._filled.pop(number)


def write_staged(
    storage: Storage,
    files: StreamFiles,
    num_bytes: int,
    stager: Stager | StagedChunks,
    *,
    on_chunk: Callable[[int], None],
    begin: Callable[[], None] = lambda: None,
) -> list[WrittenFile]:
    """Write the chunks of a stream and make its files durable; what is known of each.

    `begin` is called before; `on_chunk` takes the size of each chunk, in the thread that wrote it.
    If it fails, the files are gone, if the storage still can.
    """
    writer = ChunkWriter(storage, files, num_bytes, stager.give, on_chunk)

    def create() -> None:
        begin()
        writer.begin()

    try:
        stager.stage(writer.write, create)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def has_digests(
    layout: FileLayout, digests: Digests, copies: Callable[[], CopyQueue] | None = None
) -> bool:
    """True if the blocks of a stream have these digests; ends with the first that has not."""
    if len(digests) != -(-layout.num_bytes // BLOCK_SIZE):
        return False
    arena = Arena(min(NUM_WRITERS, layout.num_chunks) * CHUNK_SIZE, CHUNK_SIZE)
    stager = Stager(layout, arena, copies, num_threads=NUM_WRITERS)
    differ: list[int] = []

    def look(chunks: Iterable[Filled]) -> None:
        for filled in chunks:
            first, found = filled.number * CHUNK_SIZE // BLOCK_SIZE, block_digests(filled.data)
            arena.give(filled.chunk)
            if (found != digests[first : first + len(found)]).any():
                differ.append(filled.number)
                stager.cancel()

    stager.stage(look)
    return not differ
