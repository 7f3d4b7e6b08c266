"""Ranks that do not save to one place: no save succeeds that lacks the files of other ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from obstore.store import MemoryStore

import remesh
from remesh.checkpoint import sharing
from remesh.errors import NotSharedError
from remesh.exchange import Exchange
from remesh.storage import Buffer, FileSystemSpace, LocalStorage, MemoryStorage
from remesh.storage.object_store import ObjectStorage
from remesh.training.export import export_weights
from tests.engine.scenes import all_are, errors_of, share_of
from tests.support import run_ranks


class OwnDisk(LocalStorage):
    """A disk of a node, which has the path that all nodes use."""

    @property
    def url(self) -> str:
        return "/checkpoints/step_00000001"

    def space(self) -> FileSystemSpace | None:
        return FileSystemSpace(str(self._root), 1 << 40)


class Unheard(MemoryStorage):
    """A storage whose listings are older than its files."""

    def list(self, prefix: str = "") -> list[str]:
        return []


def state_of(rank: int) -> dict[str, Any]:
    whole = np.repeat(np.arange(3, dtype=np.float32), 10).reshape(6, 5)
    return {"w": share_of("w", whole, rank, 3), "step": 1}


def files_below(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def save_now(exchange: Exchange, place: Any) -> None:
    remesh.save(state_of(exchange.rank), place, group=exchange)


def save_beside(exchange: Exchange, place: Any) -> None:
    with remesh.Saver(group=exchange) as saver:
        saver.save_async(state_of(exchange.rank), place).result()


def save_foreign(exchange: Exchange, place: Any) -> None:
    remesh.save(state_of(exchange.rank), place, format="torch_dcp", group=exchange)


def save_foreign_beside(exchange: Exchange, place: Any) -> None:
    with remesh.Saver(group=exchange, format="torch_dcp") as saver:
        saver.save_async(state_of(exchange.rank), place).result()


def export(exchange: Exchange, place: Any) -> None:
    state = {"model": {f"w{number}": torch.ones(64) for number in range(6)}}
    export_weights(state, place, max_file_bytes=256, group=exchange)


SAVES = [save_now, save_beside, save_foreign, save_foreign_beside, export]


def not_shared(act: Callable[[Exchange], None]) -> list[Exception]:
    """What three ranks raise that find that they share no place."""
    errors = errors_of(3, act)
    assert all(isinstance(one.__cause__ or one, NotSharedError) for one in errors)
    return errors


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another rank is there at once or never."""
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 0.0)


@pytest.mark.parametrize("save", SAVES)
def test_paths_that_differ_are_an_error_before_anything_is_written(
    save: Any, tmp_path: Path
) -> None:
    def one(exchange: Exchange) -> None:
        save(exchange, LocalStorage(tmp_path / f"2026-01-0{1 + exchange.rank // 2}"))

    for error in not_shared(one):
        first, *more = str(error).splitlines()
        assert "ranks 0 and 2 save to different places" in first
        assert len(first) <= 100
        assert "2026-01-01" in more[0]
        assert "2026-01-02" in more[1]
        assert "broadcast" in more[2]
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("save", SAVES)
def test_disks_of_nodes_under_one_path_are_an_error_and_are_left_clean(
    save: Any, tmp_path: Path
) -> None:
    def one(exchange: Exchange) -> None:
        save(exchange, OwnDisk(tmp_path / str(exchange.rank)))

    for error in not_shared(one):
        first, *more = str(error).splitlines()
        assert "does not see" in first
        assert len(first) <= 100
        assert "mounted under the same path" in "".join(more)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("part_bytes", [None, 100])
def test_object_stores_of_nodes_under_one_url_are_an_error_and_are_left_clean(
    part_bytes: int | None,
) -> None:
    """As endpoints on the loopback of each node are."""
    places = [
        ObjectStorage("s3://bucket/step_1", MemoryStore(), part_bytes=part_bytes) for _ in range(3)
    ]
    errors = not_shared(lambda exchange: save_now(exchange, places[exchange.rank]))
    all_are(errors, Exception, "rank 0 does not see the files of ranks 1, 2.")
    assert [place.list() for place in places] == [[], [], []]


class CutStorage(MemoryStorage):
    """A storage in which a file of rank 2 ends too early."""

    def size(self, path: str) -> int:
        return 10 if re.search(r"/00002\.safetensors|__2_", path) else super().size(path)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        return min(super().read_into(path, start, buffer), max(self.size(path) - start, 0))


@pytest.mark.parametrize("save", [save_now, save_beside, save_foreign, save_foreign_beside])
def test_a_file_that_is_shorter_than_its_rank_says_is_not_committed(save: Any) -> None:
    storage = CutStorage()

    def one(exchange: Exchange) -> None:
        save(exchange, storage)

    told = ("rank 0 does not see the files of ranks 2.", "10 bytes of it")
    all_are(not_shared(one), Exception, *told)
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.Checkpoint(storage)


@pytest.mark.parametrize("save", [save_now, save_foreign])
def test_a_listing_that_is_older_than_the_files_is_no_error(save: Any) -> None:
    storage = Unheard()
    run_ranks(3, save, storage)
    stored = remesh.Checkpoint(storage).read_array("w") if save is save_now else None
    assert stored is None or stored[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_data_files_are_looked_for_by_one_listing_of_their_folder() -> None:
    """Rank 0 does not ask for the files one by one where a listing has their sizes."""

    class Listing(MemoryStorage):
        calls: list[str]

        def list_sizes(self, prefix: str = "") -> dict[str, int]:
            self.calls.append(f"list {prefix}")
            return {path: MemoryStorage.size(self, path) for path in self.list(prefix)}

        def size(self, path: str) -> int:
            self.calls.append(f"size {path}")
            return super().size(path)

    storage = Listing()
    storage.calls = []
    run_ranks(3, save_now, storage)
    (folder,) = {path.partition("/")[0] for path in storage.list() if "/" in path}
    assert [call for call in storage.calls if folder in call] == [f"list {folder}/"]


def test_ranks_meet_before_the_first_background_save_to_a_directory_only(tmp_path: Path) -> None:
    class Disk(LocalStorage):
        """A directory that may be another one on every rank."""

        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.names: list[str] = []

        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            self.names.append(path)
            super().put(path, data, overwrite=overwrite)

        def space(self) -> FileSystemSpace | None:
            return super().space() if self._root.name == "local" else None

    def save(exchange: Exchange) -> list[bool]:
        met = []
        saver = remesh.Saver(group=exchange)
        for name in ("local", "run/1", "run/2", "other/1", "other/2"):
            if name == "other/2" and exchange.rank == 2:
                saver.close()
                saver = remesh.Saver(group=exchange)  # as another process, on another node
            storage = Disk(tmp_path / name)
            saver.save_async(state_of(exchange.rank), storage).result()
            met.append(any(path.endswith("/meeting") for path in storage.names))
        saver.close()
        return met

    # All see that a local directory is one and the same.
    assert run_ranks(3, save) == [[False, True, False, True, True], [False] * 5, [False] * 5]
    assert not [path for path in files_below(tmp_path) if path.name == "meeting"]


def test_a_directory_has_one_name_for_all_and_another_one_has_another(tmp_path: Path) -> None:
    def name(path: Path) -> str:
        space = LocalStorage(path).space()
        assert space is not None
        return space.directory

    assert name(tmp_path / "a") == name(tmp_path / "a") != name(tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert name(tmp_path / "a") == name(tmp_path / "a") != name(tmp_path / "b")
