"""The catalog of checkpoints, random streams, each on its own."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh import catalog
from remesh.errors import CheckpointNotFoundError, NoSpaceError, StateError
from remesh.events import Event
from remesh.exchange import Alone
from remesh.maintenance.orphans import find_orphans
from remesh.storage import Directory, LocalStorage, open_storage
from remesh.training import rng
from tests.engine.small_checkpoint import without_privileges
from tests.flipped_reads import first_readings, flip_reads
from tests.support import run_ranks

# ---------------------------------------------------------------------------------------------
# The catalog
# ---------------------------------------------------------------------------------------------


def save(root: Path, name: str) -> Path:
    remesh.save({"w": np.arange(5.0)}, root / name)
    return root / name


def test_looking_finds_committed_checkpoints_by_their_numbers(tmp_path: Path) -> None:
    assert catalog.list_checkpoints(open_storage(tmp_path / "none")) == []
    for name in ("step_00000010", "epoch-9", "final", "step_00000011"):
        save(tmp_path, name)
    (tmp_path / "step_00000011" / "remesh.json").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "epoch-9")
    infos = catalog.list_checkpoints(open_storage(tmp_path))
    assert [(info.name, info.step) for info in infos] == [("epoch-9", 9), ("step_00000010", 10)]
    record = remesh.Checkpoint(tmp_path / "epoch-9").record
    assert infos[0].save_id == record.save_id
    assert infos[0].num_bytes == sum(
        path.stat().st_size for path in (tmp_path / "epoch-9").glob("data-*/*")
    )


def test_a_spoiled_record_or_note_is_a_problem_and_no_error(tmp_path: Path) -> None:
    for step, note in ((1, {"step": "x"}), (2, None), (3, None)):
        metadata = {} if note is None else {"manager": note}
        remesh.save({"w": np.arange(5.0)}, tmp_path / f"step_{step}", metadata=metadata)
    (tmp_path / "step_2" / "remesh.json").write_text("{}")
    (tmp_path / "step_3" / "failures.json").write_text("{}")
    first, second, third = catalog.list_checkpoints(open_storage(tmp_path))
    assert "is not a manager's" in first.problem
    assert second.problem == "remesh.json is not what was written"
    assert third.problem == "failures.json cannot be read"


def test_removing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    path, storage = save(tmp_path, "step_1"), open_storage(tmp_path)
    catalog.note_failure(storage, "step_1", "it was unreadable for a moment")
    (path / "notes.txt").write_text("mine")
    assert catalog.remove(storage, "step_1", now=0.0)
    assert [file.name for file in path.rglob("*")] == ["notes.txt"]
    assert not catalog.remove(storage, "step_1", now=0.0)


@pytest.mark.parametrize("num_refused", [1, 2])
def test_a_full_disk_gets_room_by_removals(num_refused: int, tmp_path: Path) -> None:
    class Full(LocalStorage):
        """It has no room for the next marks."""

        left = num_refused

        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            self.left -= 1
            if self.left >= 0:
                raise NoSpaceError(f"cannot write {self.url}/{path}: no space left on device")
            super().put(path, data, overwrite=overwrite)

    path = save(tmp_path, "step_1")
    catalog.pin(path)
    Full.left = 9  # no room for the record either, once it has been removed
    assert not catalog.remove(Full(tmp_path), "step_1", now=0.0)
    assert remesh.Checkpoint(path).verify().ok
    catalog.unpin(path)
    Full.left = num_refused
    assert catalog.remove(Full(tmp_path), "step_1", now=0.0)
    assert not path.exists()


@pytest.mark.parametrize(
    ("pattern", "num_flips"), [("*/in-use-*", 2), ("*/in-use-*", -1), ("*/remesh.json", 2)]
)
def test_bits_that_flip_while_a_checkpoint_in_use_is_to_be_removed(
    pattern: str, num_flips: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = save(tmp_path, "step_1"), LocalStorage(tmp_path)
    record = (path / "remesh.json").read_bytes()
    flipped: list[str] = []
    with catalog.lease(path, now=0.0, seconds=100.0), monkeypatch.context() as patch:
        flip_reads(patch, LocalStorage, first_readings(pattern, num_flips, flipped))
        assert not catalog.remove(storage, "step_1", now=50.0)
    assert flipped
    assert (path / "remesh.json").read_bytes() == record
    assert remesh.Checkpoint(path).verify().ok


def test_a_save_that_is_committed_where_one_is_removed(tmp_path: Path) -> None:
    path = save(tmp_path, "step_1")

    class Racing(LocalStorage):
        """Another save is committed when the record has gone."""

        def delete(self, path: str) -> None:
            super().delete(path)
            if path == "step_1/remesh.json":
                remesh.save({"w": np.ones(2)}, tmp_path / "step_1")

    assert not catalog.remove(Racing(tmp_path), "step_1", now=0.0)
    assert remesh.Checkpoint(path).read_array("w").tolist() == [1, 1]
    assert not (path / "removing.json").exists()


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_save_that_is_written_where_one_is_removed(
    tmp_path: Path, dies: bool, is_damaged: bool
) -> None:
    """Its data files are there, and its index comes after the removal."""
    path = save(tmp_path, "step_1")
    if is_damaged:
        (path / "remesh.json").write_bytes(b"{}")
    at_commit = threading.Barrier(2, timeout=60)

    def wait(event: Event) -> None:
        if event.point == "save.parts_gathered":
            at_commit.wait()
            at_commit.wait()

    with ThreadPoolExecutor(1) as pool:
        state = {"w": np.ones(2)}
        saving = pool.submit(remesh.save, state, path, overwrite=True, on_event=wait)
        at_commit.wait()
        if dies:
            with pytest.raises(DyingError):
                catalog.remove(Mortal(tmp_path, 3), "step_1", now=0.0)
            assert catalog.finish_removals(open_storage(tmp_path)) == ["step_1"]
        else:
            assert catalog.remove(open_storage(tmp_path), "step_1", now=0.0)
        at_commit.wait()
        saving.result()
    assert remesh.Checkpoint(path).read_array("w").tolist() == [1, 1]
    assert len([*path.glob("data-*")]) == 1


def test_what_a_killed_save_left_goes_with_the_step(tmp_path: Path) -> None:
    path = save(tmp_path, "step_1")
    (path / "remesh.json").unlink()  # as if it had been killed then, some minutes ago
    for file in path.glob("data-*/*"):
        os.utime(file, (time.time() - 300,) * 2)
    save(tmp_path, "step_1")
    assert len([*path.glob("data-*")]) == 2
    assert catalog.remove(open_storage(tmp_path), "step_1", now=0.0)
    assert not list(path.rglob("data-*"))


class Crossed(LocalStorage):
    """A storage in which another process has removed everything when this one has looked at it."""

    def list_directory(self, path: str = "") -> Directory:
        found = super().list_directory(path)
        if path:
            self.delete_many(self.list(path))
        return found


def test_a_folder_of_links_is_as_young_as_itself(tmp_path: Path) -> None:
    """Links to files of an earlier checkpoint are older than the commit; the save still runs."""
    path = save(tmp_path, "step_1")
    running = path / "data-0123456789ab"
    running.mkdir()
    [old] = path.glob("data-*/00000.safetensors")
    os.utime(old, (1e9, 1e9))
    (running / "00000.safetensors").hardlink_to(old)
    assert catalog.remove(open_storage(tmp_path), "step_1", now=0.0)
    assert [*running.iterdir()]


def test_a_checkpoint_that_was_moved_away_is_found_by_its_link(tmp_path: Path) -> None:
    """And is not removed through it; a second name of one that is here does not count."""
    path = save(tmp_path / "root", "step_1")
    path.rename(tmp_path / "step_1")
    path.symlink_to(tmp_path / "step_1")
    here = save(tmp_path / "root", "step_2")
    (tmp_path / "root" / "best_3").symlink_to(here)
    (tmp_path / "root" / "latest").symlink_to(tmp_path / "step_1")
    storage = open_storage(tmp_path / "root")
    found = catalog.list_checkpoints(storage)
    assert [(info.name, info.is_pinned) for info in found] == [("step_1", True), ("step_2", False)]
    (tmp_path / "step_1" / "remesh.json").rename(tmp_path / "record")  # its owner removes it
    (tmp_path / "step_1" / "removing.json").write_text('{"folders": []}')
    assert catalog.finish_removals(storage) == []
    assert (tmp_path / "step_1" / "removing.json").exists()


def test_closed_directories_are_not_looked_into() -> None:
    """At the root of a disk, `lost+found` belongs to the system."""
    with without_privileges() as root:
        save(root, "step_1")
        (root / "lost+found").mkdir(mode=0)
        storage = open_storage(root)
        assert [info.step for info in catalog.list_checkpoints(storage)] == [1]
        assert find_orphans(root, now=1e12, older_than=1.0) == []
        assert catalog.finish_removals(storage) == []


def test_removals_that_another_process_finishes(tmp_path: Path) -> None:
    save(tmp_path, "step_1")
    with pytest.raises(DyingError):
        catalog.remove(Mortal(tmp_path, 3), "step_1", now=0.0)
    assert catalog.finish_removals(Crossed(tmp_path)) == []
    assert catalog.list_checkpoints(open_storage(tmp_path)) == []


class DyingError(Exception):
    """The process dies here."""


class Mortal(LocalStorage):
    """A storage whose process dies after so many changes."""

    def __init__(self, root: Path, num_changes: int) -> None:
        super().__init__(root)
        self.left = num_changes

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise DyingError

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        self._change()
        super().put(path, data, overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._change()
        super().delete(path)


@pytest.mark.parametrize("num_changes", range(8))
def test_removing_may_die_anywhere(tmp_path: Path, num_changes: int) -> None:
    path = save(tmp_path, "step_1")
    save(tmp_path, "step_2")
    died = False
    try:
        assert catalog.remove(Mortal(tmp_path, num_changes), "step_1", now=0.0)
    except DyingError:
        died = True
    assert died == (num_changes < 7)
    if (path / "remesh.json").exists():
        assert remesh.Checkpoint(path).verify().ok
    # Once more from anywhere, and it is gone, or as good as new.
    catalog.finish_removals(open_storage(tmp_path))
    assert not (path / "removing.json").exists()
    if path.exists():
        assert num_changes <= 1
        assert remesh.Checkpoint(path).verify().ok
    assert remesh.Checkpoint(tmp_path / "step_2").verify().ok


class Crossing(LocalStorage):
    """A storage in which a reader comes just when a file is deleted."""

    def __init__(self, root: Path, arrive: Callable[[], None]) -> None:
        super().__init__(root)
        self._arriving = [arrive]

    def delete(self, path: str) -> None:
        if path.endswith("remesh.json") and self._arriving:
            self._arriving.pop()()
        super().delete(path)


def test_a_reader_that_comes_while_it_is_removed_keeps_it(tmp_path: Path) -> None:
    path = save(tmp_path, "step_1")
    reader = catalog.lease(path, now=0.0, seconds=100.0)
    storage = Crossing(tmp_path, reader.__enter__)
    assert not catalog.remove(storage, "step_1", now=50.0)
    assert remesh.Checkpoint(path).verify().ok
    reader.__exit__(None, None, None)
    assert sorted(file.name for file in path.iterdir() if file.is_file()) == ["remesh.json"]
    with catalog.lease(path, now=0.0, seconds=100.0):
        assert catalog.remove(storage, "step_1", now=150.0), "the mark is too old to count"
    with pytest.raises(CheckpointNotFoundError), catalog.lease(path, now=0.0):
        pass


def test_a_checkpoint_that_is_pinned_while_it_is_removed_stays_or_the_pin_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, "step_1")
    assert not catalog.remove(Crossing(tmp_path, lambda: catalog.pin(path)), "step_1", now=0.0)
    assert remesh.Checkpoint(path).verify().ok
    assert not catalog.remove(open_storage(tmp_path), "step_1", now=0.0)
    catalog.unpin(path)

    class Late(LocalStorage):
        """The checkpoint is removed just before the pin is there."""

        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            assert catalog.remove(open_storage(tmp_path), "step_1", now=0.0)
            super().put(path, data, overwrite=overwrite)

    monkeypatch.setattr(catalog, "open_storage", Late)
    with pytest.raises(CheckpointNotFoundError):
        catalog.pin(path)
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# Random streams
# ---------------------------------------------------------------------------------------------

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def numpy_generator(kind: str) -> tuple[object, Callable[[], list[float]]]:
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.integers(0, 3, 5, dtype=np.uint8)
    return generator, lambda: generator.normal(size=5).tolist()


def own_generators() -> dict[str, tuple[object, Callable[[], list[float]]]]:
    python, legacy = random.Random(3), np.random.RandomState(3)
    torch_cpu = torch.Generator().manual_seed(3)
    python.gauss(0, 1)
    legacy.normal()
    return {
        **{kind: numpy_generator(kind) for kind in BIT_GENERATORS},
        "python": (python, lambda: [python.gauss(0, 1) for _ in range(5)]),
        "legacy": (legacy, lambda: legacy.normal(size=5).tolist()),
        "torch": (torch_cpu, lambda: torch.rand(5, generator=torch_cpu).tolist()),
    }


def test_every_kind_of_generator_goes_on_where_it_was() -> None:
    own = own_generators()
    streams = rng.streams_of({name: one for name, (one, _) in own.items()}, is_alone=True)
    draws = {f"generators.{name}": draw for name, (_, draw) in own.items()}
    draws["python"] = lambda: [random.gauss(0, 1) for _ in range(5)]
    draws["numpy"] = lambda: np.random.normal(size=5).tolist()
    draws["torch"] = lambda: torch.randn(5).tolist()
    assert set(draws) <= set(streams)
    roles = rng.Roles({"dp": (1, 2), "tp": (0, 3)}, 0)
    saved = rng.rows_of(streams, roles)
    assert saved["torch"].global_shape == (2, 3, rng.ROW_BYTES)
    assert saved["torch"].parts[0].box.offset == (1, 0, 0)
    first = {name: draw() for name, draw in draws.items()}
    rng.take_rows(streams, saved)
    assert {name: draw() for name, draw in draws.items()} == first
    # Seeded anew they differ from that and from each other, and repeat themselves.
    seeded = []
    for _ in range(2):
        for name, stream in streams.items():
            stream.seed(rng.derived_seed(1, 2, name, roles.own))
        seeded.append({name: draw() for name, draw in draws.items()})
    assert seeded[0] == seeded[1]
    role = {"dp": (1, 4), "tp": (0, 2)}  # of which docs/manager.md says how it becomes a seed
    assert rng.derived_seed(7, 300, "torch", role) == 17507673589695757485
    assert all(seeded[0][name] != first[name] for name in draws)


@pytest.mark.parametrize(
    ("is_initialized", "is_alone", "expected"),
    [(True, True, [0, 1, 2]), (True, False, [1]), (False, True, [])],
)
def test_which_devices_are_the_process_s_own(
    *, is_initialized: bool, is_alone: bool, expected: list[int]
) -> None:
    generators = [torch.Generator() for _ in range(3)]
    module = SimpleNamespace(
        default_generators=generators,
        is_initialized=lambda: is_initialized,
        current_device=lambda: 1,
    )
    fake: Any = SimpleNamespace(
        accelerator=SimpleNamespace(current_accelerator=lambda: torch.device("cuda")),
        get_device_module=lambda _device: module,
    )
    found = rng._device_generators(fake, is_alone=is_alone)
    assert [generators.index(one) for one in found] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generator_of_a_device_goes_on_where_it_was() -> None:
    torch.rand(3, device="cuda")
    streams = rng.streams_of({}, is_alone=False)
    rows = rng.rows_of(streams, rng.Roles({}, 0))
    first = torch.rand(5, device="cuda")
    rng.take_rows(streams, rows)
    assert torch.equal(torch.rand(5, device="cuda"), first)
    streams["device_0"].seed(5)
    assert not torch.equal(torch.rand(5, device="cuda"), first)


def test_roles_count_their_replicas() -> None:
    def play(exchange: Any) -> tuple[int, tuple[tuple[str, int], ...]]:
        roles = rng.agree_on_roles(exchange, {"dp": (exchange.rank % 2, 2)})
        return roles.replica, roles.grid

    assert run_ranks(6, play) == [(n // 2, (("dp", 2),)) for n in range(6)]
    default = rng.agree_on_roles(Alone(), None)
    assert (default.own, default.grid) == ({"rank": (0, 1)}, (("rank", 1),))
    with pytest.raises(StateError, match="coordinate 2 of 'dp'"):
        rng.agree_on_roles(Alone(), {"dp": (2, 2)})


def test_what_is_no_generator_or_no_state() -> None:
    with pytest.raises(StateError, match="generator 'x' is a int\nGive a numpy Generator"):
        rng.streams_of({"x": 5}, is_alone=True)
    streams = rng.streams_of({"a": np.random.default_rng(0)}, is_alone=True)
    rows = rng.rows_of(streams, rng.Roles({}, 0), is_empty=True)
    for name in streams:
        with pytest.raises(StateError, match=f"manager.rng.{name}: what is stored is not"):
            rng.take_rows(streams, {name: rows[name]})
