"""Opening a checkpoint asks its storage few questions, which do not grow with its files."""

from __future__ import annotations

from collections import Counter

import pytest

from remesh.formats.table import Place, read_contents
from remesh.storage import MemoryStorage
from tests.fuzz.checkpoints import WRITERS, make_checkpoint

MARKS = ("remesh.json", ".metadata", "metadata.json")
"""Files that are looked for before anything is listed."""


class Counting(MemoryStorage):
    """A storage that lists with sizes, as buckets do, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.sized: list[str] = []

    def list(self, prefix: str = "") -> list[str]:
        raise AssertionError("it lists with sizes")

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        self.asked["list"] += 1
        return {path: len(super(Counting, self).read(path)) for path in super().list(prefix)}

    def size(self, path: str) -> int:
        self.sized.append(path)
        return super().size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        self.asked[path] += 1
        return super().read(path, start, stop)


@pytest.mark.parametrize("name", WRITERS)
def test_opening(name: str) -> None:
    files = make_checkpoint(name)
    storage = Counting()
    for path, content in files.items():
        storage.put(path, content, overwrite=False)
    storage.asked.clear()
    read_contents(Place(storage))
    assert storage.asked.pop("list", 0) == (name != "native")
    assert sorted(storage.sized) == sorted(MARKS)
    assert max(storage.asked.values()) <= 8
