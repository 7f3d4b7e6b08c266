from __future__ import annotations

import numpy as np
import pytest

from remesh.errors import CheckpointNotFoundError, NoSpaceError
from remesh.storage import MemoryStorage


def test_unfinished_files_are_invisible() -> None:
    storage = MemoryStorage()
    writer = storage.create("file", 4)
    writer.write(0, np.arange(4, dtype=np.uint8))
    assert storage.list() == []
    with pytest.raises(CheckpointNotFoundError):
        storage.read("file")
    writer.finish()
    assert storage.read("file") == bytes(range(4))


def test_capacity_is_shared_by_all_files() -> None:
    storage = MemoryStorage(capacity=100)

    def free() -> int:
        space = storage.space()
        assert space is not None
        return space.free_bytes

    storage.put("a", bytes(30), overwrite=False)
    writer = storage.create("b", 60)
    assert free() == 10
    with pytest.raises(NoSpaceError, match=r"11 bytes more and 10 are free"):
        storage.put("c", bytes(11), overwrite=False)
    with pytest.raises(NoSpaceError):
        storage.create("c", 11)
    storage.put("a", bytes(40), overwrite=True)
    assert free() == 0
    writer.abort()
    assert free() == 60
    storage.delete("a")
    assert free() == 100
    assert storage.list() == []


def test_storages_are_separate() -> None:
    first, second = MemoryStorage(), MemoryStorage()
    first.put("file", b"x", overwrite=False)
    assert second.list() == []
    assert first.url != second.url


def test_later_changes_of_a_written_buffer_do_not_reach_the_file() -> None:
    storage = MemoryStorage()
    data = np.arange(4, dtype=np.uint8)
    writer = storage.create("file", 4)
    writer.write(0, data)
    data[:] = 9
    writer.finish()
    assert storage.read("file") == bytes(range(4))
