"""The commit protocol: whatever fails wherever, a reader sees the old state or the new one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore

import remesh
from remesh import catalog
from remesh.core.geometry import Box
from remesh.errors import RankFailedError
from remesh.events import SAVE_POINTS, Event
from remesh.exchange import Exchange
from remesh.storage import LocalStorage, MemoryStorage, Storage
from remesh.storage.object_store import ObjectStorage
from tests.engine.filled import part_of, stored_value
from tests.support import (
    Died,
    FaultInjector,
    InjectedError,
    Raised,
    Returned,
    run_processes_outcomes,
    run_ranks,
    run_ranks_outcomes,
)

WORLD_SIZE = 3
state_of = partial(part_of, WORLD_SIZE)
RANK_0_POINTS = (
    "save.planned",
    *SAVE_POINTS[
        SAVE_POINTS.index("save.parts_gathered") : SAVE_POINTS.index("save.committed") + 1
    ],
)
CASES = [
    (rank, point)
    for rank in (0, 2)
    for point in SAVE_POINTS
    if point not in ("save.done", "save.chunk_staged", "save.staged")
    and (rank == 0 or point not in RANK_0_POINTS)
]


def save_value(
    exchange: Exchange, place: Storage | Path, value: float, faults: FaultInjector
) -> None:
    state = state_of(exchange.rank, value)
    remesh.save(state, place, overwrite=True, group=exchange, on_event=faults)


def in_objects() -> Storage:
    """An object store, into which the files of `save_value` are uploaded in several parts."""
    return ObjectStorage("memory://x", MemoryStore(), part_bytes=100)


@pytest.mark.parametrize("make", [MemoryStorage, in_objects])
@pytest.mark.parametrize(("rank", "point"), CASES)
def test_an_error_anywhere_reaches_all_ranks_and_keeps_the_old_checkpoint(
    rank: int, point: str, make: Callable[[], Storage]
) -> None:
    storage = make()
    run_ranks(WORLD_SIZE, save_value, storage, 1.0, FaultInjector())
    files_before = storage.list()
    faults = FaultInjector().fail_at(rank, point)
    outcomes = run_ranks_outcomes(WORLD_SIZE, save_value, storage, 2.0, faults)
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), (number, outcome)
        if number == rank:
            assert isinstance(outcome.error, InjectedError)
        else:
            assert isinstance(outcome.error, RankFailedError)
            assert outcome.error.rank == rank
            assert f"injected at {point}" in str(outcome.error)
    if point == "save.committed":
        assert stored_value(storage) == 2.0
    else:
        assert stored_value(storage) == 1.0
        assert storage.list() == files_before
    run_ranks(WORLD_SIZE, save_value, storage, 3.0, FaultInjector())
    assert stored_value(storage) == 3.0


def test_a_killed_first_save_does_not_exist_for_any_reader(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    faults = FaultInjector().kill_at(1, "save.chunk_written")
    outcomes = run_processes_outcomes(WORLD_SIZE, save_value, path, 2.0, faults)
    assert [type(outcome) for outcome in outcomes] == [Raised, Died, Raised]
    assert list(path.rglob("*.safetensors"))
    with pytest.raises(remesh.CheckpointNotFoundError, match="remesh repair"):
        remesh.Checkpoint(path)
    with pytest.raises(remesh.CheckpointNotFoundError, match="remesh repair"):
        remesh.load(state_of(0, 0.0), path)


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


def test_overwriting_removes_the_replaced_files(tmp_path: Path) -> None:
    remesh.save({"a": np.zeros(3)}, tmp_path)
    first = set(tmp_path.rglob("*.safetensors"))
    remesh.save({"a": np.ones(3)}, tmp_path, overwrite=True)
    assert not first & set(tmp_path.rglob("*.safetensors"))
    assert remesh.Checkpoint(tmp_path).read_array("a", Box((0,), (3,))).tolist() == [1, 1, 1]


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


def test_a_checkpoint_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    remesh.save({"a": 1}, tmp_path)
    with pytest.raises(remesh.errors.CheckpointExistsError, match="overwrite=True"):
        remesh.save({"a": 2}, tmp_path)
    assert remesh.Checkpoint(LocalStorage(tmp_path)).values == {"a": 1}
