"""What dead saves left: found by age, and nothing else is ever touched."""

from __future__ import annotations

import os
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.maintenance import orphans
from remesh.maintenance.orphans import Orphan
from remesh.storage import FileSystemSpace, LocalStorage, MemoryStorage
from tests.support import FaultInjector, FaultyStorage, run_ranks

NOW = 1_000_000.0
HOUR = 3600.0
DEAD = "data-0123456789ab"


class Unsure(FaultyStorage):
    """A place of which the ranks do not know whether they share it; it notes what is written."""

    def space(self) -> FileSystemSpace | None:
        return None


@pytest.mark.parametrize("file_format", ["remesh", "huggingface"])
@pytest.mark.parametrize("fails", [False, True])
def test_every_file_of_a_save_is_known(file_format: str, fails: bool, tmp_path: Path) -> None:
    """Whichever of them are left when the save is killed."""
    place = Unsure(LocalStorage(tmp_path / "place"), [])

    def save(exchange: Exchange) -> None:
        faults = FaultInjector()
        if fails:
            faults.fail_at(1, "save.staged")
        saver = remesh.Saver(group=exchange, format=file_format, on_event=faults)
        wait([saver.save_async({"w": np.arange(1000.0)}, place)])

    run_ranks(3, save)
    written = [path for operation, path in place.calls if operation in ("put", "create")]
    names = {path.rpartition("/")[2] for path in written if path.startswith("data-")}
    assert "meeting" in names
    assert {"failed.msgpack", "failed-00001.msgpack"} <= names or not fails
    assert "part-00001.msgpack" in names or fails
    assert ("committed.msgpack" in names) == (not fails and file_format != "remesh")
    leave(tmp_path / "dead", DEAD, *sorted(names - {"index.safetensors"}))
    assert [one.kept for one in find(tmp_path / "dead").values()] == [""]


@pytest.mark.parametrize("index", ["index.safetensors", "index-0123456789ab.safetensors"])
def test_what_lacks_only_its_record_is_kept(index: str, tmp_path: Path) -> None:
    folder = leave(tmp_path, DEAD, "00000.safetensors", index)
    assert "remesh repair" in find(tmp_path)[DEAD].kept
    remesh.save({"w": np.ones(3)}, tmp_path)
    age(folder, 2 * HOUR)
    assert find(tmp_path)[DEAD].kept == ""


def age(path: Path, seconds: float) -> None:
    for entry in (path, *path.rglob("*")):
        if not entry.is_symlink():
            os.utime(entry, (NOW - seconds, NOW - seconds))


def leave(place: Path, name: str = DEAD, *files: str) -> Path:
    """What a save leaves that was killed two hours ago."""
    folder = place / name
    folder.mkdir(parents=True)
    for file in files or ("00000.safetensors", "part-00001.msgpack"):
        (folder / file).write_bytes(bytes(10))
    age(folder, 2 * HOUR)
    return folder


def find(root: Path, older_than: float = HOUR) -> dict[str, Orphan]:
    found = orphans.find_orphans(root, now=NOW, older_than=older_than)
    return {str(Path(one.path).relative_to(root)): one for one in found}


def prune(root: Path) -> list[str]:
    """Remove all garbage; what was removed."""
    return [
        name
        for name, one in find(root).items()
        if not one.kept and orphans.remove_orphan(one, root, now=NOW, older_than=HOUR)
    ]


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_dead_save_goes_with_its_directory(tmp_path: Path) -> None:
    leave(tmp_path / "runs" / "step_2")
    remesh.save({"a": np.ones(3)}, tmp_path / "runs" / "step_1")
    age(tmp_path / "runs" / "step_1", 5 * HOUR)
    before = files_of(tmp_path / "runs" / "step_1")
    found = find(tmp_path)
    assert found[f"runs/step_2/{DEAD}"] == Orphan(
        str(tmp_path / "runs" / "step_2" / DEAD),
        "save",
        2 * HOUR,
        20,
        "",
        ("00000.safetensors", "part-00001.msgpack"),
    )
    assert list(found) == [f"runs/step_2/{DEAD}"]
    assert prune(tmp_path) == [f"runs/step_2/{DEAD}"]
    assert not (tmp_path / "runs" / "step_2").exists()
    assert files_of(tmp_path / "runs" / "step_1") == before
    assert remesh.Checkpoint(tmp_path / "runs" / "step_1").verify().ok
    assert prune(tmp_path) == []


def test_the_root_itself_stays(tmp_path: Path) -> None:
    leave(tmp_path)
    assert prune(tmp_path) == [DEAD]
    assert list(tmp_path.iterdir()) == []


def test_one_fresh_file_keeps_the_folder(tmp_path: Path) -> None:
    folder = leave(tmp_path / "step")
    os.utime(folder / "00000.safetensors", (NOW - 10, NOW - 10))
    assert "may be running" in find(tmp_path)[f"step/{DEAD}"].kept
    assert find(tmp_path, older_than=5)[f"step/{DEAD}"].kept == ""


@pytest.mark.parametrize("name", ["data-0123", "data-0123456789AB", "data-0123456789abc", "data"])
def test_other_folders_are_not_seen(tmp_path: Path, name: str) -> None:
    leave(tmp_path / "step", name)
    assert find(tmp_path) == {}


def test_what_no_save_writes_is_kept(tmp_path: Path) -> None:
    leave(tmp_path / "a", DEAD, "00000.safetensors", "notes.txt")
    (leave(tmp_path / "b") / "folder").mkdir()
    age(tmp_path / "b" / DEAD, 2 * HOUR)
    (tmp_path / "elsewhere").write_text("mine")
    (leave(tmp_path / "c") / "00001.safetensors").symlink_to(tmp_path / "elsewhere")
    age(tmp_path / "c" / DEAD, 2 * HOUR)
    found = find(tmp_path)
    assert "notes.txt" in found[f"a/{DEAD}"].kept
    assert "folder" in found[f"b/{DEAD}"].kept
    assert found[f"c/{DEAD}"].kept
    assert prune(tmp_path) == []
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_lost_or_damaged_record_protects_its_files(tmp_path: Path) -> None:
    for name in ("lost", "damaged"):
        remesh.save({"a": np.ones(3)}, tmp_path / name)
    (tmp_path / "lost" / native.RECORD_NAME).unlink()
    (tmp_path / "damaged" / native.RECORD_NAME).write_text("{}")
    for name in ("lost", "damaged"):
        age(tmp_path / name, 2 * HOUR)
    reasons = {name.partition("/")[0]: one.kept for name, one in find(tmp_path).items()}
    assert "remesh repair" in reasons["lost"]
    assert "cannot be read" in reasons["damaged"]
    assert prune(tmp_path) == []


def test_hidden_files_of_puts(tmp_path: Path) -> None:
    remesh.save({"a": np.ones(3)}, tmp_path / "step")
    (folder,) = (tmp_path / "step").glob("data-*")
    old = [tmp_path / "step" / ".remesh-put-0a", folder / ".remesh-put-0b"]
    young = tmp_path / "step" / ".remesh-put-0c"
    others = tmp_path / "step" / ".hidden"
    for file in (*old, young, others):
        file.write_bytes(b"12")
    for file in (*old, others):
        age(file, 2 * HOUR)
    os.utime(young, (NOW, NOW))
    assert set(prune(tmp_path)) == {str(file.relative_to(tmp_path)) for file in old}
    assert young.exists()
    assert others.exists()
    assert remesh.Checkpoint(tmp_path / "step").verify().ok


def test_links_are_not_followed(tmp_path: Path) -> None:
    leave(tmp_path / "outside" / "step")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / DEAD).symlink_to(tmp_path / "outside" / "step" / DEAD)
    assert find(tmp_path / "runs") == {}


def test_what_changed_after_it_was_seen_stays(tmp_path: Path) -> None:
    folder = leave(tmp_path / "step")
    (leftover,) = find(tmp_path).values()
    os.utime(folder / "00000.safetensors", (NOW, NOW))
    assert not orphans.remove_orphan(leftover, tmp_path, now=NOW, older_than=HOUR)
    assert (folder / "00000.safetensors").exists()


def test_what_was_committed_after_it_was_seen_stays(tmp_path: Path) -> None:
    remesh.save({"a": np.ones(3)}, tmp_path / "step")
    (folder,) = (tmp_path / "step").glob("data-*")
    record = (tmp_path / "step" / native.RECORD_NAME).read_bytes()
    (tmp_path / "step" / native.RECORD_NAME).unlink()
    index = (folder / "index.safetensors").read_bytes()
    (folder / "index.safetensors").unlink()
    age(folder, 2 * HOUR)
    (leftover,) = find(tmp_path).values()
    assert not leftover.kept
    (folder / "index.safetensors").write_bytes(index)
    LocalStorage(tmp_path / "step").put(native.RECORD_NAME, record, overwrite=False)
    age(folder, 2 * HOUR)
    assert not orphans.remove_orphan(leftover, tmp_path, now=NOW, older_than=HOUR)
    assert remesh.Checkpoint(tmp_path / "step").verify().ok


def test_a_storage_that_does_not_say_when_files_were_changed() -> None:
    storage = MemoryStorage()
    storage.put(
        f"step/{native.data_folder('0123456789ab')}/00000.safetensors", b"1", overwrite=True
    )
    (leftover,) = orphans.find_orphans(storage, now=NOW, older_than=0)
    assert leftover.kept == "the storage does not say when it was changed"
