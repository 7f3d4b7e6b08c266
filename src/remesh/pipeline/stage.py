"""Writing a data file in two halves: copy it out of the trainer's memory, then write the copy.

The arena holds final file bytes. A `Stager` fills chunk after chunk and hands each over; a
`StagedWriter`, in another thread or another process, digests and writes what it gets and gives the
chunks back. The trainer waits for the stager alone: if the whole file finds touched memory in the
arena, writing does not begin before everything is staged, because it would only take memory
bandwidth and time from what the trainer waits for. Otherwise both run at once: chunks that come
back from the writer are ready sooner than memory that was never touched, and if the arena is
smaller than the file, the stager waits for them.

Copies out of a device are queued, if the device has a queue for it
(`remesh.core.memory.CopyQueue`): each thread hands a chunk over when the copies into it are done,
and queues those of the next one before it waits. When `Stager.stage` returns, all of them are done,
so nothing that the trainer does afterwards, on the host or on the device, can reach what is stored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remesh.core.integrity import WrittenFile
from remesh.core.memory import CopyQueue
from remesh.pipeline.arena import Arena, Chunk
from remesh.pipeline.workers import run_threads
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, FileLayout

NUM_STAGERS = 2
NUM_WRITERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A chunk of a file on its way from the stager to the writer."""

    number: int  # which chunk of the file it is
    num_bytes: int  # bytes of the file in it
    chunk: Chunk  # where they are


class Stager:
    """Copies a data file out of the trainer's memory, into an arena's chunks of `CHUNK_SIZE`.

    `hand_over` takes each filled chunk, in the thread that filled it. `copies` makes a queue for
    copies out of a device, for each thread; None if all memory is the host's.
    """

    def __init__(
        self,
        layout: FileLayout,
        arena: Arena,
        hand_over: Callable[[Filled], None],
        copies: Callable[[], CopyQueue] | None = None,
    ) -> None:
        assert arena.chunk_bytes == CHUNK_SIZE
        self._layout = layout
        self._arena = arena
        self._hand_over = hand_over
        self._copies = copies
        self._stop = threading.Event()
        self._numbers = iter(range(layout.num_chunks))
        self._claiming = threading.Lock()

    @property
    def fits(self) -> bool:
        """True if the arena can hold the whole file."""
        return self._arena.budget >= self._layout.num_chunks * CHUNK_SIZE

    def cancel(self) -> None:
        """Let `stage` end soon."""
        self._stop.set()
        self._arena.wake()

    def stage(
        self, on_chunk: Callable[[int], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Copy everything out of the trainer's memory, or stop early after `cancel`.

        `on_chunk` is called after each chunk, in the thread that copied it, with its size; `begin`
        before the first chunk is taken.
        """
        begin()

        def fill_some() -> None:
            waiting: tuple[Filled, Callable[[], None]] | None = None
            copies = None if self._copies is None else self._copies()
            try:
                while (claimed := self._claim()) is not None:
                    before, waiting = waiting, self._fill(*claimed, copies)
                    if before is not None:
                        self._finish(*before, on_chunk)
                    # Who may have to wait for memory keeps nothing that the writer could give back.
                    if copies is None or not self.fits:
                        now, waiting = waiting, None
                        self._finish(*now, on_chunk)
            finally:
                if waiting is not None:
                    self._finish(*waiting, on_chunk)

        run_threads(min(NUM_STAGERS, self._layout.num_chunks), fill_some, self.cancel)

    def _claim(self) -> tuple[int, Chunk] | None:
        # A number and its memory are claimed together. Otherwise one thread could hold a number
        # and wait for memory while another takes the memory for later chunks, and a storage that
        # is written in order would wait for the first.
        with self._claiming:
            number = next(self._numbers, None)
            chunk = None if number is None else self._arena.take(self._stop)
            return None if number is None or chunk is None else (number, chunk)

    def _fill(
        self, number: int, chunk: Chunk, copies: CopyQueue | None
    ) -> tuple[Filled, Callable[[], None]]:
        """Fill a chunk, or queue the copies that do; also what waits for these."""
        try:
            if copies is None:
                data = self._layout.fill_chunk(number, chunk.buffer)
                return Filled(number, len(data), chunk), _nothing
            with copies:
                data = self._layout.fill_chunk(number, chunk.buffer, queued=True)
                return Filled(number, len(data), chunk), copies.mark()
        except BaseException:
            if copies is not None:
                copies.mark()()  # nothing may still be copied into what others are given
            self._arena.give(chunk)
            raise

    def _finish(
        self, filled: Filled, is_done: Callable[[], None], on_chunk: Callable[[int], None]
    ) -> None:
        """Hand a chunk over once the copies into it are done."""
        try:
            is_done()
        except BaseException:
            self._arena.give(filled.chunk)
            raise
        self._hand_over(filled)
        on_chunk(filled.num_bytes)


def _nothing() -> None:
    """Waits for nothing."""


class StagedWriter:
    """Writes a data file from chunks that a stager hands over, and gives them back.

    `write` runs in a thread of its own, and ends only after `end`; the other methods may be called
    from any other thread. Writing begins with the first chunk (`at_once`), or when all are staged.
    """

    def __init__(self, give: Callable[[Chunk], None], *, at_once: bool) -> None:
        self._give = give
        self._filled: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._may_write = threading.Event()
        if at_once:
            self._may_write.set()

    def put(self, filled: Filled) -> None:
        """Hand a chunk over."""
        self._filled.put(filled)

    def end(self) -> None:
        """Say that no further chunk comes."""
        self._may_write.set()
        for _ in range(NUM_WRITERS):
            self._filled.put(None)

    def cancel(self) -> None:
        """Let `write` give up what is written, as soon as the stager has ended."""
        self._stop.set()
        self._may_write.set()

    def write(
        self,
        create: Callable[[], ChunkWriter],
        on_chunk: Callable[[int], None],
        on_failure: Callable[[], None],
        meanwhile: Callable[[], None],
    ) -> list[WrittenFile] | None:
        """Write what is staged and make it durable; what is known of each file.

        None if it was given up because of `cancel`. `create` begins the file, `meanwhile` is done
        once it exists, beside the writing. `on_failure` is called at the first failure and should
        make the stager end soon; the file is gone then, if the storage still can.
        """

        def fail() -> None:
            self.cancel()
            on_failure()

        self._may_write.wait()
        try:
            writer = create()
        except BaseException:
            fail()
            self._give_back()
            raise

        held: list[Filled] = []

        def write_some() -> None:
            while (item := self._filled.get()) is not None:
                is_held = False
                try:
                    if not self._stop.is_set():
                        data = item.chunk.buffer[: item.num_bytes]
                        is_held = writer.holds(item.number, data)
                        if is_held:
                            held.append(item)
                        else:
                            writer.write(item.number, data)
                            on_chunk(item.num_bytes)
                except BaseException:
                    fail()
                    self._give_back()
                    raise
                finally:
                    if not is_held:
                        self._give(item.chunk)

        try:
            try:
                run_threads(NUM_WRITERS, write_some, fail, meanwhile)
                self._settle(writer, held, on_chunk)
            finally:
                for item in held:
                    self._give(item.chunk)
            if self._stop.is_set():
                writer.abort()
                return None
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def _settle(
        self, writer: ChunkWriter, held: Sequence[Filled], on_chunk: Callable[[int], None]
    ) -> None:
        """Make the copies of files whose chunks are held, and write the chunks of the others."""
        if held and not self._stop.is_set():
            writer.copy_held()
        for item in held:
            if not self._stop.is_set() and not writer.is_copied(item.number):
                writer.write(item.number, item.chunk.buffer[: item.num_bytes])
                on_chunk(item.num_bytes)

    def _give_back(self) -> None:
        """Take a writer's place until the stager has ended, giving back all that it stages."""
        while (item := self._filled.get()) is not None:
            self._give(item.chunk)
