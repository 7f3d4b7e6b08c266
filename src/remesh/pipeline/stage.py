"""Writing a data file in two halves: copy it out of the trainer's memory, then write the copy.

The arena holds final file bytes. A stager fills chunk after chunk and hands each over; writers
digest and write what they get and give the chunks back. The trainer waits for the stager alone: if
the arena can hold the whole file, writers do not begin before everything is staged, because they
would only take memory bandwidth and time from what the trainer waits for. If the arena is smaller,
both run at once, and the stager waits for chunks that come back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from remesh.pipeline.arena import Arena
from remesh.pipeline.workers import run_threads
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, FileLayout, WrittenFile
from remesh.storage import Buffer, Storage

NUM_STAGERS = 2
NUM_WRITERS = 2


class StagedFile:
    """A data file on its way through an arena.

    `stage` runs in the trainer's thread and `write` in another one; both must be called, in any
    order, whatever happens in the other.

    Args:
        layout: What the file holds.
        arena: Where the copy lives until it is written; its chunks are `CHUNK_SIZE` long.
    """

    def __init__(self, layout: FileLayout, arena: Arena) -> None:
        assert arena.chunk_bytes == CHUNK_SIZE
        self._layout = layout
        self._arena = arena
        self._filled: queue.SimpleQueue[tuple[int, Buffer, Buffer] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._may_write = threading.Event()
        if arena.budget < layout.num_chunks * CHUNK_SIZE:
            self._may_write.set()

    def cancel(self) -> None:
        """Let `stage` and `write` end soon; what is written is given up."""
        self._stop.set()
        self._may_write.set()
        self._arena.wake()

    def stage(self, on_chunk: Callable[[int], None]) -> None:
        """Copy everything out of the trainer's memory, or stop early after `cancel`.

        Args:
            on_chunk: Called after each chunk, in the thread that copied it, with its size.
        """
        numbers = iter(range(self._layout.num_chunks))
        claiming = threading.Lock()

        def claim() -> tuple[int, Buffer] | None:
            # A number and its buffer are claimed together. Otherwise one thread could hold a number
            # and wait for a buffer while another takes the buffers for later chunks, and a storage
            # that is written in order would wait for the first.
            with claiming:
                number = next(numbers, None)
                buffer = None if number is None else self._arena.take(self._stop)
                return None if number is None or buffer is None else (number, buffer)

        def fill_some() -> None:
            while (claimed := claim()) is not None:
                number, buffer = claimed
                try:
                    chunk = self._layout.fill_chunk(number, buffer)
                except BaseException:
                    self._arena.give(buffer)
                    raise
                self._filled.put((number, chunk, buffer))
                on_chunk(len(chunk))

        try:
            run_threads(min(NUM_STAGERS, self._layout.num_chunks), fill_some, self.cancel)
        finally:
            self._may_write.set()
            for _ in range(NUM_WRITERS):
                self._filled.put(None)

    def write(
        self, storage: Storage, path: str, on_chunk: Callable[[int], None]
    ) -> WrittenFile | None:
        """Write what is staged and make it durable.

        Args:
            storage: Where to.
            path: Name of the file; it must not exist.
            on_chunk: Called after each chunk, in the thread that wrote it, with its size.

        Returns:
            The file, or None if it was given up because of `cancel`.

        Raises:
            StorageError: If the storage fails; the file is gone then, if the storage still can.
        """
        self._may_write.wait()
        try:
            writer = ChunkWriter(storage, path, self._layout.num_bytes)
        except BaseException:
            self.cancel()
            self._give_back()
            raise

        def write_some() -> None:
            while (item := self._filled.get()) is not None:
                number, chunk, buffer = item
                try:
                    if not self._stop.is_set():
                        writer.write(number, chunk)
                        on_chunk(len(chunk))
                except BaseException:
                    self.cancel()
                    self._give_back()
                    raise
                finally:
                    self._arena.give(buffer)

        try:
            run_threads(NUM_WRITERS, write_some, self.cancel)
            if self._stop.is_set():
                writer.abort()
                return None
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def _give_back(self) -> None:
        """Take a writer's place until the stager has ended, giving back all that it stages."""
        while (item := self._filled.get()) is not None:
            self._arena.give(item[2])
