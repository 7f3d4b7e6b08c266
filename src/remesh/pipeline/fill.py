"""Writing a stream from memory: each of a few threads fills, digests and writes the next chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable

from remesh.core.integrity import BLOCK_SIZE, Digests, WrittenFile, block_digests
from remesh.core.memory import CopyQueue
from remesh.pipeline.workers import run_workers
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, FileLayout, StreamFiles
from remesh.storage import Buffer, Storage

NUM_THREADS = 3
"""Writers of a file: one copies and digests while the others wait for the disk, or for each other
where the file system lets only one at a time into a file."""


def write_stream(
    storage: Storage, files: StreamFiles, layout: FileLayout, on_chunk: Callable[[int], None]
) -> list[WrittenFile]:
    """Write the files of a stream and make them durable; what is known of each.

    If it fails, the files are gone, if the storage still can.
    """
    return fill_stream(ChunkWriter(storage, files, layout.num_bytes), layout, on_chunk)


def fill_stream(
    writer: ChunkWriter,
    layout: FileLayout,
    on_chunk: Callable[[int], None],
    meanwhile: Callable[[], None] | None = None,
    *,
    copies: Callable[[], CopyQueue] | None = None,
) -> list[WrittenFile]:
    """Write all chunks of a stream and make its files durable.

    `on_chunk` is called after each chunk, in the thread that wrote it, with its size; `meanwhile`
    is done beside the writing; `copies` makes a queue for the copies that fill a chunk. If it
    fails, the files are gone, if the storage still can.
    """
    written: list[WrittenFile] = []
    left, counting = layout.num_chunks, threading.Lock()

    def write_next(number: int, buffer: Buffer) -> None:
        nonlocal left
        chunk = _filled(layout, number, buffer, copies)
        writer.write(number, chunk)
        on_chunk(len(chunk))
        with counting:
            left -= 1
            is_last = left == 0
        if is_last:
            # Here, because what is done meanwhile may take longer.
            written.extend(writer.finish())

    try:
        run_workers(NUM_THREADS, layout.num_chunks, CHUNK_SIZE, write_next, meanwhile)
    except BaseException:
        writer.abort()
        raise
    return written


def has_digests(
    layout: FileLayout, digests: Digests, copies: Callable[[], CopyQueue] | None = None
) -> bool:
    """True if the blocks of a stream have these digests; ends with the first that has not."""
    if len(digests) != -(-layout.num_bytes // BLOCK_SIZE):
        return False
    differs = threading.Event()

    def look(number: int, buffer: Buffer) -> None:
        if differs.is_set():
            return
        found = block_digests(_filled(layout, number, buffer, copies))
        first = number * CHUNK_SIZE // BLOCK_SIZE
        if (found != digests[first : first + len(found)]).any():
            differs.set()

    run_workers(NUM_THREADS, layout.num_chunks, CHUNK_SIZE, look)
    return not differs.is_set()


def _filled(
    layout: FileLayout, number: int, buffer: Buffer, copies: Callable[[], CopyQueue] | None
) -> Buffer:
    """A chunk of a stream, in the beginning of a buffer."""
    if copies is None:
        return layout.fill_chunk(number, buffer)
    queue = copies()
    with queue:
        chunk = layout.fill_chunk(number, buffer, queued=True)
        queue.mark()()
    return chunk
