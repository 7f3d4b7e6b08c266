"""The commit protocol: whatever fails wherever, a reader sees the old state or the new one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh import catalog
from remesh.core.geometry import Box
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.storage import LocalStorage, MemoryStorage
from tests.support import (
    Raised,
    Returned,
    run_ranks_outcomes,
)


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
