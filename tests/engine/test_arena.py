"""The arena and what stages through it: budgets, sharing, pinning, and queues of copies."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, Memory
from remesh.pipeline import FileLayout, FilePiece
from remesh.pipeline.arena import SHARED_SLAB_CHUNKS, Arena, SharedChunks
from remesh.pipeline.stage import NUM_WRITERS, StagedChunks, Stager
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, Filled, whole_files
from remesh.storage import Buffer, MemoryStorage

PAGE = mmap.PAGESIZE


def test_a_shared_arena_is_seen_through_its_descriptor() -> None:
    num_chunks = SHARED_SLAB_CHUNKS + 3
    arena = Arena(2 * PAGE, PAGE, shared=True)
    stop = threading.Event()
    chunks = [arena.take(stop) for _ in range(2)]
    arena.grow(num_chunks * PAGE)
    chunks += [arena.take(stop) for _ in range(num_chunks - 2)]
    other = SharedChunks(arena.file, PAGE)
    slots = set()
    for number, chunk in enumerate(chunks):
        assert chunk is not None
        assert chunk.buffer.size == PAGE
        chunk.buffer[:] = number % 251
        assert (other.chunk(chunk.slot).buffer == number % 251).all()
        slots.add(chunk.slot)
    assert slots == set(range(num_chunks))
    assert arena.num_bytes == arena.budget == num_chunks * PAGE
    arena.close()
    assert arena.num_bytes == 0


def test_warming_touches_what_later_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, touched = Arena(5 * PAGE, PAGE), list[int]()
    monkeypatch.setattr("remesh.pipeline.arena.touch", lambda buffer: touched.append(buffer.size))
    arena.warm(3 * PAGE)
    assert touched == [PAGE] * 5
    assert arena.num_bytes == 5 * PAGE  # whole slabs, within the budget
    taken = [arena.take(threading.Event()) for _ in range(5)]
    assert len({chunk.slot for chunk in taken if chunk is not None}) == 5


def test_every_slab_is_pinned_and_unpinned() -> None:
    pinned: list[int] = []
    unpinned: list[int] = []

    def pin(buffer: Buffer) -> Callable[[], None]:
        pinned.append(buffer.size)
        return lambda: unpinned.append(buffer.size)

    arena = Arena(PAGE, PAGE)
    arena.pin_with(pin)
    for _ in range(2):
        assert arena.take(threading.Event()) is not None
        arena.grow(arena.budget + 20 * PAGE)
    assert sum(pinned) == arena.num_bytes
    arena.close()
    assert sorted(unpinned) == sorted(pinned)
    assert arena.take(threading.Event()) is not None  # as new: nothing pins it
    assert len(unpinned) == len(pinned)


def test_memory_that_was_refused_can_be_asked_for_again() -> None:
    def refuse(_buffer: Buffer) -> None:
        raise MemoryError("refused")

    arena = Arena(3 * PAGE, PAGE)
    arena.pin_with(refuse)
    with pytest.raises(MemoryError, match="refused"):
        arena.take(threading.Event())
    assert arena.num_bytes == 0
    arena.pin_with(lambda _buffer: None)
    taken = [arena.take(threading.Event()) for _ in range(3)]
    assert sorted(chunk.slot for chunk in taken if chunk is not None) == [0, 1, 2]


@dataclass
class Queue:
    """Copies that are done when somebody waits for them."""

    pending: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> None:
        CURRENT.queue = self

    def __exit__(self, *_error: object) -> None:
        CURRENT.queue = None

    def mark(self) -> Callable[[], None]:
        queued, self.pending = self.pending, []

        def wait() -> None:
            for copy in queued:
                copy()

        return wait


CURRENT = threading.local()


@dataclass(frozen=True)
class DeviceMemory(Memory):
    """Memory that is only copied through the queue that is entered."""

    array: npt.NDArray[Any]

    @property
    def carrier(self) -> CarrierDType:
        return self.array.dtype

    def queue_copy_out(self, box: Box, into: CarrierArray) -> None:
        source = self.array[box.slices]
        CURRENT.queue.pending.append(lambda: np.copyto(into, source))


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
def test_what_is_queued_is_done_before_it_is_handed_over(num_chunks: int) -> None:
    size = 6 * CHUNK_SIZE // 8 + 17
    source = np.random.default_rng(0).random(size)
    header = bytes(range(256)) * 16
    piece = FilePiece(DeviceMemory(source), (size,), BY_NAME["float64"], len(header))
    num_bytes = len(header) + source.nbytes
    layout = FileLayout([FilePiece.of_bytes(0, header), piece], num_bytes)
    arena = Arena(num_chunks * CHUNK_SIZE, CHUNK_SIZE)
    storage = MemoryStorage()
    expected = np.frombuffer(header + source.tobytes(), np.uint8)

    def check_and_put(chunks: Iterable[Filled]) -> None:
        for filled in chunks:
            start = filled.number * CHUNK_SIZE
            found = filled.chunk.buffer[: filled.num_bytes]
            np.testing.assert_array_equal(found, expected[start : start + filled.num_bytes])
            writer.write([filled])

    stager = Stager(layout, arena, Queue)
    assert stager.fits == (num_chunks == 7)
    staged: list[int] = []
    files = whole_files(["file"], [num_bytes], [0])
    writer = ChunkWriter(storage, files, num_bytes, arena.give, staged.append)
    stager.stage(check_and_put)
    source[:] = -1.0  # what comes after must not reach what is stored
    writer.finish()
    assert sum(staged) == num_bytes
    assert storage.read("file") == expected.tobytes()
    assert arena.num_bytes <= num_chunks * CHUNK_SIZE


def test_chunks_are_written_in_the_order_of_the_stream() -> None:
    """A storage that takes a file as a stream lets all writers wait for one that is filled late."""
    arena, stop, given = Arena((NUM_WRITERS + 1) * PAGE, PAGE), threading.Event(), list[int]()
    first = threading.Event()

    def write(chunks: Iterable[Filled]) -> None:
        for filled in chunks:
            if filled.number == 0:
                first.set()
            assert first.wait(60)
            given.append(filled.number)

    staged = StagedChunks(arena.give, stop.set, at_once=True)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(staged.stage, write)
        for number in (*range(1, NUM_WRITERS + 1), 0):
            chunk = arena.take(stop)
            assert chunk is not None
            staged.put(Filled(number, 1, chunk))
        staged.end(None)
        writing.result(120)
    assert sorted(given) == [*range(NUM_WRITERS + 1)]
