"""Several jobs that overwrite one path, and jobs that died there: the next save cleans up."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh import catalog
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.maintenance.orphans import DEFAULT_AGE
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.support import FaultInjector, InjectedError, Raised, Returned, run_ranks_outcomes

REPLACED_AGE = 2 * DEFAULT_AGE


def save(place: Storage | Path, number: int, overtaken_at: str = "") -> None:
    def on_event(event: Event) -> None:
        if event.point == overtaken_at:
            save(place, number + 1)

    remesh.save({"a": np.full(100, number)}, place, overwrite=True, on_event=on_event)


def loaded(place: Storage | Path) -> int:
    state = {"a": np.full(100, -1)}
    remesh.load(state, place)
    assert len(set(state["a"].tolist())) == 1
    return int(state["a"][0])


def folders(storage: Storage) -> set[str]:
    return {path.partition("/")[0] for path in storage.list("data-")}


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "checkpoint") if request.param == "local" else MemoryStorage()


@pytest.mark.parametrize("point", ["save.planned", "save.file_finished", "save.before_commit"])
def test_a_save_removes_what_another_job_committed_meanwhile(place: Storage, point: str) -> None:
    for _ in range(2):  # first with nothing there, then over a checkpoint
        save(place, 1, overtaken_at=point)
        assert loaded(place) == 1
        assert folders(place) == {native.data_folder(native.read_record(place).save_id)}


def killed_save(path: Path, *, age: float) -> Path:
    """What a save leaves that was killed some time ago; its folder."""
    before = folders(LocalStorage(path))
    # The files are copied away while they are there: a save that fails removes them.
    kept: dict[str, bytes] = {}

    def on_event(event: Event) -> None:
        if event.point == "save.before_commit":
            storage = LocalStorage(path)
            kept.update({name: storage.read(name) for name in storage.list("data-")})
            raise InjectedError

    with pytest.raises(InjectedError):
        remesh.save({"a": np.zeros(100)}, path, overwrite=True, on_event=on_event)
    folder = next(name for name in {n.partition("/")[0] for n in kept} if name not in before)
    for name, data in kept.items():
        if name.startswith(folder):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)
    then = (path / native.RECORD_NAME).stat().st_mtime - age
    for file in [*(path / folder).iterdir(), path / folder]:
        os.utime(file, (then, then))
    return path / folder


def test_the_next_save_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    dead = killed_save(tmp_path, age=REPLACED_AGE)
    alive = killed_save(tmp_path, age=0)
    save(tmp_path, 2)
    assert not dead.exists()
    assert alive.exists()
    assert loaded(tmp_path) == 2


def test_a_failed_save_removes_nothing_of_others(tmp_path: Path) -> None:
    save(tmp_path, 1)
    dead = killed_save(tmp_path, age=REPLACED_AGE)
    faults = FaultInjector().fail_at(0, "save.before_commit")
    with pytest.raises(InjectedError):
        remesh.save({"a": np.zeros(3)}, tmp_path, overwrite=True, on_event=faults)
    assert dead.exists()
    assert loaded(tmp_path) == 1


def test_of_two_concurrent_saves_one_wins() -> None:
    storage = MemoryStorage()

    def race(exchange: Exchange) -> None:
        value = float(exchange.rank)
        part = np.full((2, 5), value, dtype=np.float32)

        def wait_for_the_other(event: Event) -> None:
            # Both jobs, of one rank each, have looked for a checkpoint before either commits.
            if event.point == "save.before_commit":
                exchange.all_gather(b"")

        remesh.save({"w": part, "step": value}, storage, on_event=wait_for_the_other)

    outcomes = run_ranks_outcomes(2, race)
    winners = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Returned)]
    assert len(winners) == 1
    loser = outcomes[1 - winners[0]]
    assert isinstance(loser, Raised)
    assert isinstance(loser.error, remesh.errors.CheckpointExistsError)
    assert remesh.Checkpoint(storage).values["step"] == winners[0]
    assert remesh.Checkpoint(storage).verify().ok


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_what_was_said_of_the_replaced_one_is_not_said_of_the_new_one(
    how: str, is_damaged: bool, tmp_path: Path
) -> None:
    place, root = tmp_path / "step_1", LocalStorage(tmp_path)
    remesh.save({"a": 1}, place)
    catalog.note_failure(root, "step_1", "its values are damaged")
    catalog.pin(place)
    if is_damaged:
        (place / "remesh.json").write_text("{}")
    with remesh.Saver() as saver:
        getattr(saver, how)({"a": 2}, place, overwrite=True)
    [info] = catalog.list_checkpoints(root)
    assert (info.problem, info.num_failures, info.is_pinned) == ("", 0, False)
    assert sorted(path.name for path in place.glob("*.json")) == ["remesh.json"]
