"""Buffers that direct I/O and device copies like: page-aligned, and already backed by memory.

The memory is a mapping of its own: anonymous and private, or a part of a file in memory that
several processes share. It starts at a page boundary, goes back to the system as soon as the last
view of it is gone, and is asked for in huge pages where the system offers them, which makes
touching it, and later pinning it for a device, several times cheaper. `aligned_buffer` touches
every page, so that running out of memory shows up now and not in the middle of a copy, and so
that the first copy into the buffer runs at full speed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from remesh.storage.base import Buffer

ALIGNMENT = 4096
"""Bytes. Addresses and ranges at multiples of this may use direct I/O."""


def aligned_buffer(num_bytes: int) -> Buffer:
    """A zeroed buffer whose address is a multiple of `ALIGNMENT`.

    Args:
        num_bytes: Its length; zero is allowed.

    Raises:
        MemoryError: If the system refuses the memory.
    """
    buffer = map_memory(num_bytes)
    touch(buffer)
    return buffer


def map_memory(num_bytes: int, file: int | None = None, start: int = 0) -> Buffer:
    """A buffer of zeros at a page boundary that takes no memory yet; private, unless of a file.

    A file in memory is shared from byte `start` on, a multiple of the page size. MemoryError if the
    system refuses the memory.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        if file is None:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, offset=start)
    except OSError as error:
        raise MemoryError(
            f"no memory for a buffer of {num_bytes} bytes ({error}); lower the memory budget"
        ) from error
    # Systems without transparent huge pages refuse the advice; ordinary pages do as well.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def touch(buffer: Buffer) -> None:
    """Let the system find memory for every page of a buffer; sets a byte of each to zero."""
    buffer[:: mmap.PAGESIZE] = 0
