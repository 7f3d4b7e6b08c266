"""Opening a checkpoint asks its storage few questions, which do not grow with its files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from remesh.formats.place import Place
from remesh.formats.table import read_contents
from remesh.storage import LocalStorage, MemoryStorage
from tests.fuzz.checkpoints import WRITERS, make_checkpoint

MARKS = ("remesh.json", ".metadata", "metadata.json")
"""Files that are looked for before anything is listed."""


class Counting(MemoryStorage):
    """A storage that lists with sizes, as buckets do, and counts what it is asked."""

    lists_sizes = True

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
    assert storage.asked.pop("list", 0) == (not name.startswith("native"))
    assert sorted(storage.sized) == sorted(MARKS)
    assert max(storage.asked.values()) <= 8


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole state, and a comparison, take a few reads for hundreds of tensors."""
    tensors = {f"w{number}": torch.full((3,), float(number)) for number in range(300)}
    remesh.save(tensors, tmp_path / "many")
    asked: list[str] = []
    read_into = LocalStorage.read_into

    def counted(storage: LocalStorage, path: str, *rest: Any) -> Any:
        asked.append(path)
        return read_into(storage, path, *rest)

    monkeypatch.setattr(LocalStorage, "read_into", counted)
    found = remesh.Checkpoint(tmp_path / "many").state()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    ended = CliRunner().invoke(cli, ["diff", str(tmp_path / "many"), str(tmp_path / "many")])
    assert ended.exit_code == 0
    assert "equal: 300 tensors" in ended.output
    assert 2 <= sum(path.startswith("data-") for path in asked) <= 20
