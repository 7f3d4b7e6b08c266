from __future__ import annotations

import mmap
import sys

import pytest

from remesh.storage import ALIGNMENT, aligned_buffer


@pytest.mark.parametrize("size", [1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT + 5, (4 << 20) + 1])
def test_buffers_are_aligned_zeroed_and_writable(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.shape == (size,)
    assert buffer.ctypes.data % ALIGNMENT == 0
    assert buffer.flags.c_contiguous
    assert not buffer.any()
    buffer[:] = 7
    assert int(buffer.sum()) == 7 * size


def test_empty_buffer() -> None:
    assert aligned_buffer(0).shape == (0,)


def test_pages_are_backed_at_once() -> None:
    size = 64 << 20
    before = _resident_bytes()
    buffer = aligned_buffer(size)
    assert _resident_bytes() - before > size * 0.9
    del buffer
    assert _resident_bytes() - before < size * 0.5


def test_refused_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="memory budget"):
        aligned_buffer(sys.maxsize - mmap.PAGESIZE)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
