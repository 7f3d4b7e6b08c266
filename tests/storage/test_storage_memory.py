from __future__ import annotations

import numpy as np
import pytest

from remesh.errors import CheckpointNotFoundError
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
