"""The manager: when it saves, what it keeps, how it resumes. Ranks are threads."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh import catalog
from remesh.elastic.process_socket import Instruction, ProcessSockets
from remesh.elastic.progress import RankProgress
from remesh.elastic.training_job import TrainingJob
from remesh.errors import (
    AgentLostError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    NoSpaceError,
    OptionError,
    RankFailedError,
    StateError,
    StorageError,
)
from remesh.events import Event
from remesh.exchange import Alone, ThreadExchange
from remesh.sharding import NamedModule
from remesh.storage import LocalStorage, open_storage
from remesh.training import manager as manager_module
from remesh.training.manager import Manager
from remesh.training.policies import (
    EverySeconds,
    EverySteps,
    KeepEvery,
    KeepLast,
    OnRequest,
    OnSignals,
    SavePolicy,
)
from remesh.training.resuming import MAX_FAILURES, Resumed
from remesh.training.rng import Randomness
from tests.engine import small_checkpoint
from tests.support import run_ranks
from tests.waiting import wait_until


def state_of(step: int, exchange: ThreadExchange | None = None) -> dict[str, Any]:
    """A tensor of twelve numbers that depend on the step, cut evenly among the ranks."""
    rank, world_size = (0, 1) if exchange is None else (exchange.rank, exchange.world_size)
    size = 12 // world_size
    rows = np.arange(size, dtype=np.float32) + size * rank + 100 * step
    return {"w": remesh.ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size))}


def content(state: Mapping[str, Any]) -> list[float]:
    return state["w"].parts[0].data.tolist()  # type: ignore[no-any-return]


def expected(step: int, rank: int = 0, world_size: int = 1) -> list[float]:
    size = 12 // world_size
    return [float(n + size * rank + 100 * step) for n in range(size)]


def names(root: Path) -> list[str]:
    """The steps of the checkpoints, by what lies on the disk."""
    return sorted(path.parent.name.removeprefix("step_0000") for path in root.glob("*/remesh.json"))


def flip(path: Path) -> None:
    (file,) = path.glob("data-*/00000.safetensors")
    small_checkpoint.flip(file, -1)


def resume(root: Path, state: Any = None, **options: Any) -> tuple[Resumed, Manager]:
    """Resume alone, and end; what was resumed, and the manager that is closed."""
    with Manager(root, group=Alone(), **options) as manager:
        resumed = manager.resume(state_of(0) if state is None else state)
    assert resumed is not None
    return resumed, manager


def train(root: Path, last: int, **options: Any) -> None:
    """Train alone from the newest checkpoint to a step, saving after each."""
    with Manager(root, every=1, group=Alone(), **options) as manager:
        resumed = manager.resume(state_of(0))
        for step in range(0 if resumed is None else resumed.step + 1, last + 1):
            manager.step(step, state_of(step))


# ---------------------------------------------------------------------------------------------
# Saving and resuming
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_a_run_resumes_in_another_world_size(tmp_path: Path, *, background: bool) -> None:
    def play(exchange: ThreadExchange, last: int) -> tuple[int | None, list[float]]:
        with Manager(tmp_path, every=4, group=exchange, background=background) as manager:
            state = state_of(0, exchange)
            resumed = manager.resume(state)
            found = None if resumed is None else resumed.step
            loaded = content(state)
            for step in range((found or 0) + 1, last + 1):
                assert manager.step(step, state_of(step, exchange)) == (step % 4 == 0)
        assert manager.saved_step == last
        return found, loaded

    assert run_ranks(2, play, 6) == [(None, expected(0, r, 2)) for r in range(2)]
    assert names(tmp_path) == ["0004", "0006"]
    assert run_ranks(3, play, 9) == [(6, expected(6, r, 3)) for r in range(3)]
    assert names(tmp_path) == ["0004", "0006", "0008", "0009"]
    assert run_ranks(1, play, 9) == [(9, expected(9))]
    assert remesh.Checkpoint(tmp_path / "step_00000009").verify().ok


@pytest.mark.parametrize("rules", [{"": None, "w": "v.w"}, {"": "v."}])
def test_random_numbers_keep_their_names_in_a_transformation(
    rules: dict[str, str | None], tmp_path: Path
) -> None:
    with Manager(tmp_path) as manager:
        manager.save(1, {"w": np.arange(3.0)})
    drawn = torch.rand(3)
    target = {"v": {"w": np.zeros(3)}}
    with Manager(tmp_path) as manager:
        assert manager.resume(target, transform=rules)
    assert target["v"]["w"].tolist() == [0, 1, 2]
    assert torch.equal(torch.rand(3), drawn)


def test_what_is_recorded(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, float("nan"))):
        with Manager(tmp_path) as manager:
            manager.resume(state_of(0))
            manager.save(step, state_of(step), metrics={"loss": loss}, metadata={"why": "test"})
    first, second = manager.checkpoints
    assert (first.step, first.name, first.world_size) == (1, "step_00000001", 1)
    assert first.run == second.run == manager.run
    assert first.metrics == {"loss": 0.5}
    assert second.metrics == {"loss": None}
    assert first.note is not None
    assert second.note is not None
    assert first.note.parent == ""
    assert second.note.parent == f"{first.path}#{first.save_id}"
    assert manager.latest == second
    checkpoint = remesh.Checkpoint(second.path)
    assert checkpoint.metadata["why"] == "test"
    assert {"w", "manager.rng.python", "manager.rng.numpy"} <= set(checkpoint.index)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every": 4}, [4, 6]),
        ({"every": 4, "save_at_end": False}, [4]),
        ({"every": OnRequest("asks for nothing")}, []),
    ],
)
def test_the_last_step_is_saved_at_the_end(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    def play(exchange: ThreadExchange) -> None:
        with Manager(tmp_path, group=exchange, **options) as manager:
            for step in range(1, 7):
                manager.step(step, state_of(step, exchange), metrics={"loss": float(step)})

    run_ranks(2, play)
    infos = catalog.list_checkpoints(open_storage(tmp_path))
    assert [(info.step, info.metrics["loss"]) for info in infos] == [(n, n) for n in steps]


@pytest.mark.parametrize("how", ["a step", "past the version"])
def test_a_state_that_changed_after_its_step_is_not_saved_at_the_end(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Manager(tmp_path, every=4, group=Alone()) as manager:
        manager.step(2, {"model": model, "optimizer": optimizer})
        if how == "a step":
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        else:  # as averages are swapped in
            model.bias.data.copy_(torch.ones(2))
    assert names(tmp_path) == []
    assert "step 2 is not saved at the end: the state has changed since" in caplog.text
    assert how == "a step" or "Rank 0 changed state.model.bias" in caplog.text


class Counting(torch.nn.Module):
    number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def test_a_step_is_saved_again_only_if_it_is_another_state(tmp_path: Path) -> None:
    model, stage, counting = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Counting()
    array = np.zeros(3)
    named = NamedModule(stage, {"": "stage"})
    state = {"model": model, "array": array, "value": 1, "named": named, "counting": counting}

    def save_id() -> str:
        return remesh.Checkpoint(tmp_path / "step_00000002").record.save_id

    with Manager(tmp_path, every=2, group=Alone()) as manager:
        manager.step(2, state)
        manager.save(2, state)
        first = save_id()
        catalog.pin(tmp_path / "step_00000002")
        manager.save(2, state, metrics={"accuracy": 0.9})
        manager.wait()
        assert save_id() != first
        assert manager.latest is not None
        assert manager.latest.metrics == {"accuracy": 0.9}
        assert manager.latest.is_pinned
        for change in (
            lambda: state.update(value=2),
            lambda: array.fill(1),
            lambda: torch.nn.init.zeros_(model.bias),
            lambda: torch.nn.init.zeros_(stage.bias),
            lambda: setattr(counting, "number", 1),
            model.weight.data.zero_,
        ):
            change()
            with pytest.raises(CheckpointExistsError):
                manager.save(2, state)
    with Manager(tmp_path, group=Alone()) as manager:
        assert manager.resume(state) is not None
        manager.save(2, state)
    with Manager(tmp_path, group=Alone()) as manager:
        with pytest.raises(CheckpointExistsError) as refused:
            manager.save(2, state)
        assert "call `resume`" in refused.value.__notes__[0]
    assert names(tmp_path) == ["0002"]


def test_a_pinned_step_that_is_saved_again_is_pinned_from_the_commit_on(tmp_path: Path) -> None:
    pinned = []

    def look(event: Event) -> None:
        if event.point == "save.done" and event.rank == 0:
            [info] = catalog.list_checkpoints(open_storage(tmp_path))
            pinned.append(info.is_pinned)

    state = {"w": torch.rand(2)}
    with Manager(tmp_path, every=2, group=Alone(), on_event=look) as manager:
        manager.step(2, state)
        manager.wait()
        catalog.pin(tmp_path / "step_00000002")
        manager.save(2, state, metrics={"accuracy": 0.9})
        manager.wait()
        assert pinned == [False, True]
        catalog.unpin(tmp_path / "step_00000002")
        manager.save(2, state, metrics={"accuracy": 0.8})
    assert pinned == [False, True, False]
    catalog.pin(tmp_path / "step_00000002")
    remesh.save(state, tmp_path / "step_00000002", overwrite=True)
    [info] = catalog.list_checkpoints(open_storage(tmp_path))
    assert not info.is_pinned


def test_copies_under_another_name_neither_count_nor_go(tmp_path: Path) -> None:
    state = {"w": torch.rand(2)}
    with Manager(tmp_path, every=1, keep=2, group=Alone()) as manager:
        for step in range(1, 6):
            manager.step(step, state)
            manager.wait()
            if step == 2:
                shutil.copytree(tmp_path / "step_00000002", tmp_path / "backup_2")
            if step == 4:
                shutil.copytree(tmp_path / "step_00000004", tmp_path / "zoo_4")
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == [
        "backup_2",
        "step_00000004",
        "step_00000005",
        "zoo_4",
    ]


def test_what_rank_0_has_to_tell_of_a_saved_step_decides_for_all(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> None:
        with Manager(tmp_path, every=2, group=exchange) as manager:
            manager.step(2, state_of(2, exchange))
            for rank in range(2):
                metrics = {"accuracy": float(rank)} if exchange.rank == rank else None
                manager.save(2, state_of(2, exchange), metrics=metrics)

    run_ranks(2, play)
    [info] = catalog.list_checkpoints(open_storage(tmp_path))
    assert info.metrics == {"accuracy": 0.0}


def test_a_closed_manager_refuses_calls(tmp_path: Path) -> None:
    with Manager(tmp_path, every=1, group=Alone()) as manager:
        manager.step(1, state_of(1))
    manager.close()
    for call in (
        lambda: manager.step(2, state_of(2)),
        lambda: manager.save(2, state_of(2)),
        lambda: manager.resume(state_of(2)),
        manager.wait,
    ):
        with pytest.raises(StateError, match="this manager was closed; make a new one"):
            call()


def test_a_manager_takes_over_from_one_that_was_abandoned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    policies: list[SavePolicy] = [EverySteps(1), OnSignals((signal.SIGUSR1,))]
    older = Manager(tmp_path, every=policies, group=Alone())
    older.step(1, state_of(1))
    with Manager(tmp_path, every=1, group=Alone()) as manager:
        assert "was not closed; it is closed now" in caplog.text
        assert signal.getsignal(signal.SIGUSR1) == before
        with pytest.raises(StateError, match="replaced by a later Manager"):
            older.step(2, state_of(2))
        resumed = manager.resume(state_of(0))
        assert resumed is not None
        assert resumed.step == 1
        manager.step(2, state_of(2))
    assert names(tmp_path) == ["0001", "0002"]


def test_a_manager_of_an_earlier_entry_is_closed_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainingJob()
    older = Manager(tmp_path, every=1, group=Alone(), job=job)
    job.entries += 1
    with Manager(tmp_path, every=1, group=Alone(), job=job):
        assert "was not closed" not in caplog.text
        with pytest.raises(StateError, match="replaced by a later Manager"):
            older.step(1, state_of(1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": "5"}, "every= must be a number of steps, a policy or a list of policies, not"),
        ({"every": ["5"]}, "every= must be"),
        ({"every": 2.5}, "every= must be"),
        ({"every": True}, "every= must be"),
        ({"keep": "3"}, "keep= must be a number of checkpoints"),
        ({"background": "false"}, "background= must be True or False, not 'false'"),
        ({"save_at_end": 0}, "save_at_end= must be True or False"),
        ({"deadline": "60"}, "deadline= must be a number of seconds"),
        ({"arena_bytes": "1e9"}, "arena_bytes= must be a whole number"),
        ({"compress": True}, "compress= must be 'zstd', not"),
        ({"memory_every": "2"}, "memory_every= must be a whole number, 1 or more"),
        ({"memory_every": 0}, "memory_every= must be a whole number"),
        ({"memory_every": 1, "memory_replicas": -1}, "memory_replicas= must be a whole number"),
    ],
)
def test_options_of_a_wrong_type_are_errors_at_once(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        Manager(tmp_path, group=Alone(), **options)


def test_after_an_option_was_refused_the_root_has_a_manager_as_before(tmp_path: Path) -> None:
    """Also while the exception is kept, as a notebook does."""
    with Manager(tmp_path, every=1, group=Alone()) as manager:
        with pytest.raises(OptionError) as kept:
            Manager(tmp_path, compress=True, group=Alone())  # type: ignore[arg-type]
        manager.step(1, state_of(1))
    train(tmp_path, 2)
    assert names(tmp_path) == ["0001", "0002"]
    assert kept.value is not None


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> None:
        number: Any = np.int64  # which type checkers do not take for an int
        with Manager(tmp_path, every=number(2), keep=number(1), group=exchange) as manager:
            for step in map(number, (1, 2, 3)):
                assert manager.step(step, state_of(step, exchange)) == (step == 2)
            loss: Any = np.float32(0.5)
            manager.save(number(5), state_of(5, exchange), metrics={"loss": loss})

    run_ranks(2, play)
    assert names(tmp_path) == ["0005"]
    assert catalog.list_checkpoints(open_storage(tmp_path))[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize("metric", [None, "good", 10**400, torch.ones(2)], ids=type)
def test_metrics_that_are_no_numbers_are_refused(metric: Any, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="metrics: 'loss' is no number"):
        Manager(tmp_path, group=Alone()).save(1, state_of(1), metrics={"loss": metric})


def test_a_relative_root_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Manager("run", every=[EverySteps(1), OnRequest("ask")], group=Alone()) as manager:
        tmp_path.joinpath("other").mkdir()
        monkeypatch.chdir("other")
        tmp_path.joinpath("ask").write_text("save-and-stop")
        manager.step(1, state_of(1))
        assert manager.should_stop
    assert names(tmp_path / "run") == ["0001"]


def test_ranks_look_at_once_after_steps_have_gone_back(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> bool:
        root, ask = tmp_path / "run", tmp_path / "ask"
        with Manager(root, every=OnRequest(str(ask)), group=exchange) as manager:
            manager.save(1, state_of(1, exchange))
            for step in (1, 500, 1000):
                manager.step(step, state_of(step, exchange))
            manager.resume(state_of(0, exchange))
            ask.write_text("save")
            return manager.step(2, state_of(2, exchange))

    assert run_ranks(2, play) == [True, True]


def test_the_name_of_the_manager_is_refused(tmp_path: Path) -> None:
    manager = Manager(tmp_path, group=Alone())
    with pytest.raises(StateError, match="'manager' is taken"):
        manager.save(1, {"manager": 1})
    with pytest.raises(StateError, match="'manager' is taken"):
        manager.save(1, {"own": 1}, metadata={"manager": 1})


def test_plain_checkpoints_can_be_resumed_from(tmp_path: Path) -> None:
    remesh.save(state_of(7), tmp_path / "epoch-7")
    resumed, _ = resume(tmp_path, state := state_of(0))
    assert (resumed.step, resumed.same_random, resumed.info.run) == (7, False, "")
    assert content(state) == expected(7)


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 3)
    flip(tmp_path / "step_00000003")

    def play(exchange: ThreadExchange) -> tuple[int, list[float]]:
        with Manager(tmp_path, keep=2, group=exchange) as manager:
            state = state_of(0, exchange)
            resumed = manager.resume(state)
            assert resumed is not None
            ((name, reason),) = resumed.passed_over
            assert name == "step_00000003"
            assert "are not what was written" in reason
            manager.save(4, state_of(4, exchange))
        return resumed.step, content(state)

    with caplog.at_level(logging.WARNING, "remesh"):
        assert run_ranks(2, play) == [(2, expected(2, r, 2)) for r in range(2)]
    assert sum("passed over" in record.message for record in caplog.records) == 1
    # What is damaged is kept and counts for nothing: 2 and 4 are the last two good ones.
    assert names(tmp_path) == ["0002", "0003", "0004"]

    (tmp_path / "step_00000004" / "remesh.json").write_text("{}")
    with Manager(tmp_path, every=1, keep=2, group=Alone()) as manager:
        resumed = manager.resume(state_of(0))
        assert resumed is not None
        assert resumed.step == 2
        assert [name for name, _ in resumed.passed_over] == ["step_00000004", "step_00000003"]
        for step in (3, 4):
            manager.step(step, state_of(step))
    for step in (3, 4):
        assert remesh.Checkpoint(tmp_path / f"step_0000000{step}").verify().ok
    assert names(tmp_path) == ["0003", "0004"]
    assert [info.num_failures for info in manager.checkpoints] == [0, 0]


def test_what_fails_again_and_again_is_not_tried_any_more(tmp_path: Path) -> None:
    train(tmp_path, 2)
    flip(tmp_path / "step_00000002")
    loads: list[str] = []

    def hear(event: Event) -> None:
        if event.point == "load.opened":
            loads.append(event.point)

    for number in range(MAX_FAILURES + 2):
        loads.clear()
        resumed, manager = resume(tmp_path, on_event=hear)
        assert resumed.step == 1
        assert ("not tried" in resumed.passed_over[0][1]) == (number >= MAX_FAILURES)
        assert len(loads) == (2 if number < MAX_FAILURES else 1)
        assert manager.checkpoints[-1].num_failures == min(number + 1, MAX_FAILURES)


def test_a_checkpoint_that_loads_after_all_is_forgiven(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for _ in range(2):
        flip(tmp_path / "step_00000002")
        resumed, manager = resume(tmp_path)
    assert (resumed.step, resumed.info.num_failures) == (2, 1)
    assert [info.num_failures for info in manager.checkpoints] == [0, 0, 0]


def test_a_look_at_a_part_forgives_nothing(tmp_path: Path) -> None:
    """The part may be whole where the rest is not, and the look would find the same for ever."""
    train(tmp_path, 2)
    flip(tmp_path / "step_00000002")
    resumed, _ = resume(tmp_path)
    flip(tmp_path / "step_00000002")  # what was damaged is no part of what is looked at
    manager = Manager(tmp_path, group=Alone())
    assert manager._peek(state_of(0))
    assert (resumed.step, manager.checkpoints[-1].num_failures) == (1, 1)


def test_if_nothing_loads_it_is_an_error_and_not_a_new_beginning(tmp_path: Path) -> None:
    train(tmp_path, 0)
    flip(tmp_path / "step_00000000")
    manager = Manager(tmp_path, group=Alone())
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint there can be loaded"):
        manager.resume(state_of(0))


def test_a_mismatch_is_raised_and_hides_nothing(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with Manager(tmp_path, group=Alone()) as manager:
        with pytest.raises(MismatchError):
            manager.resume({**state_of(0), "new": np.zeros(2)})
        resumed = manager.resume({**state_of(0), "new": np.zeros(2)}, missing="keep")
    assert resumed is not None
    assert [info.num_failures for info in manager.checkpoints] == [0, 0]


# ---------------------------------------------------------------------------------------------
# Failures while saving
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 100])
def test_a_failure_in_the_background_is_raised_once_on_every_rank(
    tmp_path: Path, every: int
) -> None:
    """Also if no further save is due."""

    def play(exchange: ThreadExchange) -> tuple[int, str]:
        broken = threading.Event()

        def hear(event: Event) -> None:
            if event.rank == 1 and event.point == "save.file_finished" and not broken.is_set():
                broken.set()
                raise StorageError("the disk is on fire")

        with Manager(tmp_path, every=every, group=exchange, on_event=hear) as manager:
            manager.save(1, state_of(1, exchange))
            for step in itertools.count(2):
                try:
                    manager.step(step, state_of(step, exchange))
                except StorageError as error:
                    manager.step(step + 1, state_of(step + 1, exchange))
                    return step, str(error)
        raise AssertionError

    (step, text), second = run_ranks(2, play)
    assert second == (step, "the disk is on fire")
    assert text.startswith("the disk is on fire")
    assert every > 1 or step == 2
    assert names(tmp_path) == [f"{step + 1:04}"]


def test_a_failure_to_remove_is_raised_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> bool:
        raise StorageError("cannot remove")

    monkeypatch.setattr(catalog, "remove", fail)

    def play(exchange: ThreadExchange) -> None:
        manager = Manager(tmp_path, keep=1, group=exchange)
        manager.save(1, state_of(1, exchange))
        manager.save(2, state_of(2, exchange))
        with pytest.raises(StorageError, match="cannot remove"):
            manager.close()

    run_ranks(2, play)
    assert names(tmp_path) == ["0001", "0002"]


def test_an_exception_in_the_block_is_not_replaced_and_saves_nothing_more(tmp_path: Path) -> None:
    def divide(manager: Manager) -> None:
        with manager:
            for step in (1, 2, 3):
                manager.step(step, state_of(step))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        divide(Manager(tmp_path, every=2, group=Alone()))
    assert names(tmp_path) == ["0002"]


# ---------------------------------------------------------------------------------------------
# When
# ---------------------------------------------------------------------------------------------


def test_the_clock_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> list[int]:
        with Manager(tmp_path, every=EverySeconds(1e-9), group=exchange) as manager:
            if exchange.rank == 1:
                manager._began = 1e18  # this one's clock would never say so
            return [n for n in range(8) if manager.step(n, state_of(n, exchange))]

    first, second = run_ranks(2, play)
    assert first == second
    assert first[:2] == [0, 1]


def test_a_request_seen_by_one_rank_saves_on_all_and_stops(tmp_path: Path) -> None:
    root, files = tmp_path / "run", [tmp_path / f"ask-{rank}" for rank in range(3)]

    def play(exchange: ThreadExchange) -> list[int]:
        saved = []
        policy = OnRequest(str(files[exchange.rank]))
        with Manager(root, every=[policy], group=exchange) as manager:
            for step in itertools.count(1):
                if step == 5 and exchange.rank == 2:
                    files[2].write_text("save")
                if manager.step(step, state_of(step, exchange)):
                    saved.append(step)
                    if exchange.rank == 1 and len(saved) == 1:
                        files[1].write_text("save-and-stop")
                if manager.should_stop:
                    break
        return saved

    first, second, third = run_ranks(3, play)
    assert first == second == third
    assert len(first) == 2
    assert first[0] >= 5
    assert [info.step for info in Manager(root, group=Alone()).checkpoints] == first
    assert not any(file.exists() for file in files)


def test_signals_save_and_stop_and_are_given_back(tmp_path: Path) -> None:
    former = signal.getsignal(signal.SIGUSR1)
    with Manager(tmp_path, every=OnSignals(), group=Alone()) as manager:
        manager.step(1, state_of(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.step(2, state_of(2))
        stopped = manager.should_stop
    assert stopped
    assert names(tmp_path) == ["0002"]
    assert signal.getsignal(signal.SIGUSR1) == former


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="main thread"):
        run_ranks(1, lambda _exchange: Manager(tmp_path, every=OnSignals(), group=Alone()))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessSockets]:
    (tmp_path / "agent").mkdir()
    with contextlib.closing(ProcessSockets(str(tmp_path / "agent"), 1)) as sockets:
        monkeypatch.setenv("REMESH_AGENT_SOCKET", sockets.path_of(0))
        yield sockets


def test_an_agent_sees_the_progress_and_asks_for_saves(
    tmp_path: Path, agent: ProcessSockets
) -> None:
    def progress() -> RankProgress:
        agent.take()
        return agent.progress()[0]

    def play() -> None:
        wait_until(lambda: progress().waits, "the rank waits")
        assert (progress().step, progress().saved_step) == (2, 2)
        agent.request(None)

    with Manager(tmp_path / "run", group=Alone()) as manager, ThreadPoolExecutor(1) as pool:
        manager.step(1, state_of(1))
        first = progress()
        assert (first.step, first.saved_step, first.step_seconds) == (1, None, None)
        agent.request("save-and-hold")
        played = pool.submit(play)
        manager.step(2, state_of(2), own_seconds=np.float64(0.25))
        played.result()
        second = progress()
        assert second.time >= first.time
        assert second.step_seconds == 0.25
        assert not manager.should_stop
        agent.begin([0], Instruction())
        with pytest.raises(AgentLostError, match="has started another in its place"):
            manager.step(3, state_of(3))
        manager.abandon("has no agent")
    assert names(tmp_path / "run") == ["0002"]


def test_an_agent_hears_of_the_save_at_the_end(tmp_path: Path, agent: ProcessSockets) -> None:
    with Manager(tmp_path / "run", every=EverySteps(10), group=Alone()) as manager:
        for step in range(1, 4):
            manager.step(step, state_of(step))
    agent.take()
    assert (agent.progress()[0].step, agent.progress()[0].saved_step) == (3, 3)


def test_after_a_request_to_wait_no_rank_makes_a_step_until_it_is_removed(
    tmp_path: Path, agent: ProcessSockets
) -> None:
    root = tmp_path / "run"
    is_released = threading.Event()

    def play(exchange: ThreadExchange) -> int:
        num_steps_after = 0
        with Manager(root, group=exchange) as manager:
            for step in itertools.count(1):
                if catalog.list_checkpoints(open_storage(root)):
                    assert is_released.is_set()
                    num_steps_after += 1
                if num_steps_after == 3:
                    return manager.saved_step or 0
                if exchange.rank == 0 and step == 3:
                    agent.take()
                    agent.request("save-and-hold")
                manager.step(step, state_of(step, exchange))
        raise AssertionError

    def release() -> None:
        wait_until(lambda: bool(catalog.list_checkpoints(open_storage(root))), "a checkpoint")
        is_released.set()
        agent.request(None)

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release)
        saved = run_ranks(3, play)
        released.result()
    assert [info.step for info in catalog.list_checkpoints(open_storage(root))] == [saved[0]]
    assert saved[0] >= 3


def test_ranks_that_wait_without_a_save_save_if_they_are_asked_after_all(
    tmp_path: Path, agent: ProcessSockets
) -> None:
    def play() -> None:
        wait_until(lambda: waits_at(None), "the rank waits")
        agent.request("save-and-hold")
        wait_until(lambda: waits_at(1), "it has saved")
        agent.request(None)

    def waits_at(saved: int | None) -> bool:
        agent.take()
        progress = agent.progress().get(0)
        return progress is not None and progress.waits and progress.saved_step == saved

    job = TrainingJob(is_reentrant=True)
    with Manager(tmp_path / "run", group=Alone(), job=job) as manager:
        agent.request("hold")
        agent.take()
        with ThreadPoolExecutor(1) as pool:
            played = pool.submit(play)
            manager.step(1, state_of(1))
            played.result()
        assert names(tmp_path / "run") == ["0001"]


def test_what_cannot_be_reached_or_read_is_said_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REMESH_AGENT_SOCKET", str(tmp_path / "gone" / "0.socket"))
    monkeypatch.setattr("remesh.training.watch.REPORT_SECONDS", 0.0)
    ask = tmp_path / "ask"
    ask.write_text("quit")
    every: list[SavePolicy] = [OnRequest(str(ask)), EverySteps(3)]
    with Manager(tmp_path / "run", every=every, group=Alone()) as manager:
        for step in range(1, 5):
            manager.step(step, state_of(step))
    warnings = [r.message for r in caplog.records if (r.name, r.levelname) == ("remesh", "WARNING")]
    first, second = warnings
    assert first.startswith(f"the agent cannot be reached at {tmp_path / 'gone' / '0.socket'}")
    assert second.startswith(f"{ask} asks for 'quit'; write save or save-and-stop into it")
    assert names(tmp_path / "run") == ["0003", "0004"]


def test_a_rank_that_cannot_save_tells_the_others(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> str:
        with Manager(tmp_path, group=exchange) as manager:
            if exchange.rank == 1:
                manager.trackers["what"] = 5
            with pytest.raises((ValueError, RankFailedError)) as caught:
                manager.save(1, state_of(1, exchange))
            manager.trackers.clear()
            manager.save(2, state_of(2, exchange))
        return str(caught.value)

    assert all("is of no tracker" in said for said in run_ranks(2, play))
    assert names(tmp_path) == ["0002"]


@pytest.mark.usefixtures("server")
def test_two_launches_in_a_store_that_has_no_directories() -> None:
    from tests.storage.object_servers import BUCKET

    root = f"s3://{BUCKET}/run"
    for first, last in ((1, 5), (6, 9)):
        with Manager(root, every=1, keep=[KeepLast(2), KeepEvery(4)], group=Alone()) as manager:
            state = state_of(0)
            resumed = manager.resume(state)
            assert (0 if resumed is None else resumed.step) == first - 1
            assert content(state) == expected(first - 1)
            for step in range(first, last + 1):
                manager.step(step, state_of(step))
            if last == 5:
                manager.wait()
                catalog.pin(manager.checkpoints[-1].path)
    assert [info.step for info in manager.checkpoints] == [4, 5, 8, 9]
    assert {path.partition("/")[0] for path in open_storage(root).list()} == {
        f"step_0000000{step}" for step in (4, 5, 8, 9)
    }


# ---------------------------------------------------------------------------------------------
# What is kept
# ---------------------------------------------------------------------------------------------


def test_pinned_held_and_foreign_checkpoints_stay(tmp_path: Path) -> None:
    remesh.save(state_of(1), tmp_path / "step_00000001")
    remesh.save(state_of(2), tmp_path / "backup")
    with Manager(tmp_path, every=1, keep=1, group=Alone()) as manager:
        for step in (3, 4, 5):
            manager.step(step, state_of(step))
            manager.wait()
            if step == 3:
                catalog.pin(tmp_path / "step_00000003")
        with catalog.lease(tmp_path / "step_00000005", now=0.0, seconds=1e12):
            manager.save(6, state_of(6))
            manager.wait()
        assert names(tmp_path) == ["0001", "0003", "0005", "0006", "backup"]
        catalog.unpin(tmp_path / "step_00000003")
        manager.save(7, state_of(7))
    assert names(tmp_path) == ["0001", "0007", "backup"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "backup", "step_00000001", "step_00000007"
    ]  # fmt: skip


def test_marks_of_the_run_s_own_dead_processes_do_not_count(tmp_path: Path) -> None:
    train(tmp_path, 3)
    (run,) = {info.run for info in catalog.list_checkpoints(open_storage(tmp_path))}
    with ExitStack() as readers:
        for step, who in ((1, run), (2, "")):
            place = tmp_path / f"step_0000000{step}"
            readers.enter_context(catalog.lease(place, now=0.0, seconds=1e12, run=who))
        with Manager(tmp_path, keep=1, group=Alone()) as manager:
            manager.resume(state_of(0))
            manager.save(4, state_of(4))
    assert names(tmp_path) == ["0002", "0004"]


class ReadOnly(LocalStorage):
    """A storage that takes nothing, as a disk that is full or mounted read-only."""

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        raise NoSpaceError(f"cannot write {self.url}/{path}: no space left on device")

    def delete(self, path: str) -> None:
        raise StorageError(f"cannot remove {self.url}/{path}: read-only file system")


def test_a_run_resumes_from_a_disk_that_takes_no_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 3)
    storage = open_storage(tmp_path)
    (run,) = {info.run for info in catalog.list_checkpoints(storage)}
    # Everything that a resume would like to tidy up.
    with catalog.lease(tmp_path / "step_00000001", now=0.0, seconds=1e12, run=run):
        kept = storage.list("step_00000001/in-use-")
        marks = {path: storage.read(path) for path in kept}
    for path, data in marks.items():
        storage.put(path, data, overwrite=True)
    catalog.note_failure(storage, "step_00000002", "unreadable for a moment")
    storage.put("step_00000000/removing.json", b"{}", overwrite=True)
    (data_file,) = (tmp_path / "step_00000003").glob("data-*/*0.safetensors")
    data_file.write_bytes(data_file.read_bytes()[:-1])

    monkeypatch.setattr(manager_module, "open_storage", ReadOnly)
    monkeypatch.setattr("remesh.catalog.open_storage", ReadOnly)
    state = state_of(0)
    manager = Manager(tmp_path, group=Alone())
    with caplog.at_level(logging.WARNING, logger="remesh"):
        resumed = manager.resume(state)
    assert resumed is not None
    assert resumed.step == 2
    assert [name for name, _ in resumed.passed_over] == ["step_00000003"]
    for action in ("marking", "removing", "noting"):
        assert any(record.getMessage().startswith(action) for record in caplog.records), action


def test_what_was_half_removed_is_finished(tmp_path: Path) -> None:
    train(tmp_path, 2)
    storage = open_storage(tmp_path)
    for step in (0, 1):
        [folder] = (tmp_path / f"step_0000000{step}").glob("data-*")
        mark = json.dumps({"folders": [folder.name]}).encode()
        storage.put(f"step_0000000{step}/removing.json", mark, overwrite=True)
    storage.delete("step_00000000/remesh.json")
    (tmp_path / "step_00000000" / "notes.txt").write_text("mine")
    resume(tmp_path)
    assert names(tmp_path) == ["0001", "0002"]
    assert [path.name for path in (tmp_path / "step_00000000").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "step_00000001" / "removing.json").exists()


def test_what_dead_saves_left_long_ago_goes_when_the_run_resumes(tmp_path: Path) -> None:
    train(tmp_path, 1)
    old, young = (tmp_path / "step_00000002" / f"data-{n:012x}" for n in (1, 2))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "00000.safetensors").write_bytes(bytes(100))
    for path in (old / "00000.safetensors", old):
        os.utime(path, (1e9, 1e9))
    resume(tmp_path)
    assert not old.exists()
    assert young.exists()


# ---------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------


def draw(generator: np.random.Generator) -> list[int]:
    return generator.integers(0, 1 << 40, 4).tolist()  # type: ignore[no-any-return]


def test_random_numbers_go_on_by_role_and_not_by_rank(tmp_path: Path) -> None:
    """Two parts of data, each on two ranks; after the restart ranks have other roles."""

    def play(exchange: ThreadExchange, stride: int, *, resume: bool) -> tuple[int, list[int], bool]:
        part = exchange.rank // stride % 2
        generator = np.random.default_rng(part if not resume else 99)
        randomness = Randomness({"dp": (part, 2)}, {"dropout": generator})
        with Manager(tmp_path, group=exchange, randomness=randomness) as manager:
            same = False
            if resume:
                resumed = manager.resume(state_of(0, exchange))
                assert resumed is not None
                same = resumed.same_random
            else:
                draw(generator)
                manager.save(1, state_of(1, exchange))
        return part, draw(generator), same

    before = run_ranks(4, lambda exchange: play(exchange, 1, resume=False))
    after = run_ranks(4, lambda exchange: play(exchange, 2, resume=True))
    drawn = {part: numbers for part, numbers, _ in before}
    assert drawn[0] != drawn[1]
    for part, numbers, same in after:
        assert numbers == drawn[part]
        assert same
    # With six ranks each their own role, everything is derived, differs, and can be repeated.
    again = [run_ranks(6, _derive, tmp_path) for _ in range(2)]
    assert again[0] == again[1]
    assert len({tuple(numbers) for numbers in again[0]}) == 6


def _derive(exchange: ThreadExchange, root: Path) -> list[int]:
    generator = np.random.default_rng()
    randomness = Randomness(generators={"dropout": generator})
    with Manager(root, group=exchange, randomness=randomness) as manager:
        resumed = manager.resume(state_of(0, exchange))
    assert resumed is not None
    assert not resumed.same_random
    [text] = resumed.seeded_anew
    assert text.startswith("on all ranks: generators.dropout, numpy, python")
    assert text.endswith("(roles were dp=2, and are rank=6)")
    return draw(generator)


def test_a_generator_that_one_rank_has_is_seeded_anew_there(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange, *, has_more: bool) -> tuple[str, ...]:
        generators = {"dropout": np.random.default_rng()} if has_more else {}
        randomness = Randomness(generators=generators)
        with Manager(tmp_path, group=exchange, randomness=randomness) as manager:
            resumed = manager.resume(state_of(0, exchange))
            if resumed is None:
                manager.save(1, state_of(1, exchange))
        return () if resumed is None else resumed.seeded_anew

    run_ranks(2, lambda exchange: play(exchange, has_more=False))
    after = run_ranks(2, lambda exchange: play(exchange, has_more=exchange.rank == 1))
    assert after == [("on rank 1: generators.dropout (not stored)",)] * 2


def test_ranks_with_other_axes_are_refused(tmp_path: Path) -> None:
    def play(exchange: ThreadExchange) -> None:
        role = {"dp": (exchange.rank, 2 + exchange.rank)}
        with pytest.raises(StateError, match="Give the same axes"):
            Manager(tmp_path, group=exchange, randomness=Randomness(role))

    run_ranks(2, play)


# ---------------------------------------------------------------------------------------------
# Trackers
# ---------------------------------------------------------------------------------------------


def test_runs_of_trackers_are_kept_and_given_back(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "curves"))
    with Manager(tmp_path / "run", group=Alone()) as manager:
        manager.trackers["board"] = writer
        manager.save(1, state_of(1))
    writer.close()
    for step in (2, 3):  # the second resume finds what the first one handed on
        with Manager(tmp_path / "run", group=Alone()) as manager:
            resumed = manager.resume(state_of(0))
            assert resumed is not None
            assert resumed.trackers["board"].run_id == str(tmp_path / "curves")
            manager.save(step, state_of(step))
    record = json.loads((tmp_path / "run" / "step_00000003" / "remesh.json").read_text())
    assert record["record"]["metadata"]["manager"]["trackers"]["board"]["tracker"] == "tensorboard"


def test_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    with Manager(tmp_path / "new", group=Alone()) as manager:
        assert manager.resume(state_of(0)) is None
        assert manager.latest is None
        assert manager.checkpoints == []
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointNotFoundError):
        catalog.pin(tmp_path / "new")


def test_memory_is_ready_before_the_first_save(tmp_path: Path) -> None:
    """So that it is staged at once, and written after the training has gone on."""
    seen: list[str] = []
    state = {"w": np.zeros(1 << 20)}
    listen = lambda event: seen.append(event.point)  # noqa: E731
    with Manager(tmp_path, every=2, on_event=listen) as manager:
        assert not manager.step(1, state)
        for thread in threading.enumerate():
            if thread.name == "remesh-warm":
                thread.join()
        assert manager.step(2, state)
    assert seen.index("save.staged") < seen.index("save.chunk_written")


@pytest.mark.parametrize("background", [True, False])
def test_a_listener_that_fails_after_a_save_keeps_nothing_from_being_removed(
    background: bool, tmp_path: Path
) -> None:
    def listen(event: Event) -> None:
        if event.point == "save.done":
            raise RuntimeError("the tracker is down")

    with Manager(tmp_path, every=1, keep=2, background=background, on_event=listen) as manager:
        for step in range(1, 5):
            manager.step(step, state_of(step))
        manager.wait()
        assert [info.step for info in manager.checkpoints] == [3, 4]


def test_a_state_that_cannot_be_saved_fails_when_it_is_saved(tmp_path: Path) -> None:
    with Manager(tmp_path, every=2) as manager:
        assert not manager.step(1, {"w": object()})
        with pytest.raises(StateError, match="w"):
            manager.step(2, {"w": object()})


def test_ranks_of_one_role_that_draw_differently_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(exchange: ThreadExchange) -> None:
        own = np.random.default_rng(exchange.rank % 3)
        randomness = Randomness({"dp": (exchange.rank % 2, 2)}, {"own": own})
        with Manager(tmp_path, every=1, randomness=randomness, group=exchange) as manager:
            for step in (1, 2):
                manager.step(step, state_of(step, exchange))

    with caplog.at_level(logging.WARNING, logger="remesh"):
        run_ranks(4, train)
    messages = [record.getMessage() for record in caplog.records if "same role" in record.message]
    (message,) = messages
    assert "ranks 0 and 2 have the same role {'dp': 0}" in message
    assert "(generators.own)" in message


def test_a_module_alone_is_saved_and_resumed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Manager(tmp_path, every=2) as manager:
        assert manager.resume(model) is None
        assert not manager.step(1, model)
        assert manager.step(2, model)
    drawn = torch.rand(2)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    resumed, _ = resume(tmp_path, other)
    assert (resumed.step, resumed.same_random) == (2, True)
    assert torch.equal(torch.rand(2), drawn)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    # Without a manager it is the checkpoint of a module.
    assert "0.weight" in remesh.Checkpoint(tmp_path / "step_00000002")
