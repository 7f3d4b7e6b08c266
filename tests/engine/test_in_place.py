"""Files of other systems that lie in the page cache are read to where they go, without a copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import remesh
from remesh.core.geometry import Box
from remesh.core.sharded import Part
from remesh.errors import CorruptCheckpointError
from remesh.storage import Buffer, LocalStorage
from remesh.storage.base import aligned_buffer

STORED = {
    "a": torch.arange(64 * 96, dtype=torch.float32).reshape(64, 96),
    "b": torch.arange(5000).to(torch.bfloat16),
    "c": torch.arange(7, dtype=torch.int64),
}


class Watched(LocalStorage):
    """Counts the bytes that are read, and how; `before` is called before a read in place."""

    num_in_place = num_copied = 0
    before: Callable[[], object] = staticmethod(lambda: None)

    def read_cached(self, path: str, start: int, parts: Sequence[Buffer]) -> bool:
        self.before()
        is_read = super().read_cached(path, start, parts)
        self.num_in_place += is_read * sum(map(len, parts))
        return is_read

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        self.num_copied += buffer.size
        return super().read_into(path, start, buffer)


@pytest.fixture
def place(tmp_path: Path) -> Watched:
    """A checkpoint in the page cache, if the system says what is there."""
    remesh.save(STORED, tmp_path, format="safetensors")
    [file] = tmp_path.iterdir()
    num_bytes = len(file.read_bytes())
    if not LocalStorage(tmp_path).read_cached(file.name, 0, [aligned_buffer(num_bytes)]):
        pytest.skip("the file system does not say what lies in the page cache")
    return Watched(tmp_path)


@pytest.mark.parametrize(
    ("names", "make", "is_in_place"),
    [
        pytest.param("abc", torch.zeros_like, True, id="all"),
        pytest.param("ac", torch.zeros_like, True, id="with a gap between them"),
        pytest.param("a", lambda a: torch.zeros(128, 96)[::2], False, id="every second row"),
        pytest.param("a", lambda a: torch.zeros(96, 64).T, False, id="columns first"),
        pytest.param("b", lambda b: torch.zeros(b.shape), False, id="cast"),
    ],
)
def test_memory_without_gaps_is_filled_in_place(
    place: Watched,
    names: str,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_in_place: bool,
) -> None:
    target = {name: make(STORED[name]) for name in names}
    remesh.load(target, place, cast=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, STORED[name].to(tensor.dtype)), name
    assert (place.num_in_place > 0, place.num_copied > 0) == (is_in_place, not is_in_place)


def test_files_that_are_not_cached_are_read_through_a_buffer(
    place: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "read_cached", lambda *_: False)
    target = {name: torch.zeros_like(tensor) for name, tensor in STORED.items()}
    remesh.load(target, place)
    assert all(torch.equal(target[name], tensor) for name, tensor in STORED.items())
    assert place.num_copied > 0


def part_of_a(data: torch.Tensor, offset: tuple[int, int]) -> remesh.ShardedTensor:
    box = Box(offset, tuple(data.shape))
    return remesh.ShardedTensor("a", (64, 96), (Part(box, data),))


def test_a_part_of_a_tensor_is_filled_in_place(place: Watched) -> None:
    rows, columns = torch.zeros(10, 96), torch.zeros(64, 10)
    remesh.load({"a": part_of_a(rows, (20, 0))}, place)
    assert torch.equal(rows, STORED["a"][20:30])
    assert place.num_copied == 0
    remesh.load({"a": part_of_a(columns, (0, 20))}, place)
    assert torch.equal(columns, STORED["a"][:, 20:30])
    assert place.num_copied > 0


def test_a_file_that_is_cut_meanwhile_is_an_error(place: Watched) -> None:
    [path] = Path(place.url).iterdir()
    place.before = lambda: os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CorruptCheckpointError, match="The file was cut short"):
        remesh.load({name: torch.zeros_like(tensor) for name, tensor in STORED.items()}, place)


def test_native_files_are_not_read_in_place(tmp_path: Path) -> None:
    """Their digests are checked before anything reaches a tensor."""
    remesh.save(STORED, tmp_path)
    place = Watched(tmp_path)
    remesh.load({name: torch.zeros_like(tensor) for name, tensor in STORED.items()}, place)
    assert place.num_in_place == 0
    assert place.num_copied > 0
