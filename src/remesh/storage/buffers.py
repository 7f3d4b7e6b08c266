"""Buffers that direct I/O and device copies like: page-aligned, and already backed by memory.

The memory is an anonymous private mapping of its own. It starts at a page boundary, goes back to
the system as soon as the last view of it is gone, and is asked for in huge pages where the system
offers them, which makes touching it, and later pinning it for a device, several times cheaper.
Every page is touched here, so that running out of memory shows up now and not in the middle of
a copy, and so that the first copy into the buffer runs at full speed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from remesh.storage.protocol import Buffer

ALIGNMENT = 4096
"""Bytes. Addresses and ranges at multiples of this may use direct I/O."""


def aligned_buffer(num_bytes: int) -> Buffer:
    """A zeroed buffer whose address is a multiple of `ALIGNMENT`.

    Args:
        num_bytes: Its length; zero is allowed.

    Raises:
        MemoryError: If the system refuses the memory.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for a buffer of {num_bytes} bytes ({error}); lower the memory budget"
        ) from error
    # Kernels without transparent huge pages refuse the advice; ordinary pages do as well.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:: mmap.PAGESIZE] = 0
    return buffer
