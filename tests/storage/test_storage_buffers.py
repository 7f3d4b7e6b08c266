from __future__ import annotations

import ctypes
import errno
import mmap
import sys

import pytest

from remesh.storage import aligned_buffer


def test_pages_are_backed_at_once() -> None:
    size = 64 << 20
    buffer = aligned_buffer(size)
    address = buffer.ctypes.data
    assert _resident_share(address, size) > 0.9
    del buffer
    assert _resident_share(address, size) < 0.1


def test_refused_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="memory budget"):
        aligned_buffer(sys.maxsize - mmap.PAGESIZE)


def _resident_share(address: int, size: int) -> float:
    """The share of the pages of a range that are in memory; of this range, whatever others do."""
    num_pages = size // mmap.PAGESIZE
    found = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore(address, size, found) != 0:
        assert ctypes.get_errno() == errno.ENOMEM, "pages that are mapped to nothing"
        return 0.0
    return sum(page & 1 for page in found) / num_pages
