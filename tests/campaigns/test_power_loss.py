"""Power that fails at any moment of saves, replayed from what they asked of the system.

A recorded run makes thousands of outcomes, because any of what is not yet durable may be lost. Each
is laid out as a directory, and whatever a save had announced by then must load from it. Some
hundred outcomes are looked at, and 30,000 where the tests marked nightly run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.checkpoint import unchanged
from remesh.exchange import Exchange
from remesh.pipeline import Compress
from remesh.storage import LocalStorage
from tests.campaigns.settings import dice_of, lengths, seed
from tests.engine.scenes import share_of
from tests.support import run_ranks
from tests.support.power_loss import PowerLoss, write_state
from tests.support.system_calls import Call, SystemCalls

NUM_RANKS = 2
NUM_ROWS = 400
PLACE = "runs/new/checkpoint"
CHANGES = {
    *("open", "mkdir", "pwrite", "ftruncate", "fallocate", "fsync"),
    *("link", "rename", "replace", "unlink", "rmdir"),
}


class Killed(BaseException):
    """Raised by every call after the one at which the process was killed."""


@dataclass(slots=True)
class Recording:
    """Calls, and how many of them had been made when each save was announced."""

    calls: list[Call] = field(default_factory=list)
    announced: list[tuple[int, int]] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)

    def note(self, call: Call) -> None:
        if call.name in CHANGES:
            self.calls.append(call)

    def save(self, root: Path, number: int, kill_after: int | None = None) -> None:
        """Record a save; killed after some of its calls if asked for."""
        self.begun.append((len(self.calls), number))
        last = None if kill_after is None else len(self.calls) + kill_after

        def before(call: Call) -> int | None:
            if last is not None and len(self.calls) >= last and call.name in CHANGES:
                raise Killed
            return None

        with SystemCalls(root, before=before, after=self.note):
            try:
                run_ranks(NUM_RANKS, save_part, root / PLACE, number)
            except BaseException:
                # Which error a rank ends with that meets its end does not matter.
                if last is None:
                    raise
                return
        self.announced.append((len(self.calls), number))


def part_of(exchange: Exchange, number: int) -> dict[str, Any]:
    whole = np.full((NUM_ROWS, 2), number, np.int64)
    return {"table": share_of("table", whole, exchange.rank, exchange.world_size), "number": number}


def save_part(exchange: Exchange, path: Path, number: int) -> None:
    state = part_of(exchange, number)
    compress: Compress | None = None if number % 2 else "zstd"
    remesh.save(state, path, overwrite=True, group=exchange, compress=compress)


def number_at(path: Path, group: Exchange | None = None) -> int | None:
    """Which save is at a path, bit for bit; None if there is no checkpoint."""
    state: dict[str, Any] = {"table": np.zeros((NUM_ROWS, 2), np.int64), "number": -1}
    try:
        remesh.load(state, path, group=group)
    except remesh.CheckpointNotFoundError:
        return None
    assert (state["table"] == state["number"]).all()
    return int(state["number"])


def states_of(
    recording: Recording, work: Path, num_states: int, chance: random.Random
) -> Iterator[tuple[int, Path]]:
    """Let the power fail at random moments of what was recorded; the moment, and what is left."""
    moments = sorted(chance.randrange(len(recording.calls) + 1) for _ in range(num_states))
    disk, done = PowerLoss(), 0
    for moment in moments:
        for call in recording.calls[done:moment]:
            disk.apply(call)
        done, root = moment, work / "state"
        write_state(disk.state(chance, kept=chance.choice([0.0, 0.5, 0.9, 1.0])), root)
        yield moment, root
        shutil.rmtree(root)


def check_states(recording: Recording, work: Path, num_states: int, *, drawn_from: int) -> None:
    """What was announced is there, or a later save, whenever the power fails."""
    states = states_of(recording, work, num_states, random.Random(drawn_from))
    for turn, (moment, root) in enumerate(states):
        found = number_at(root / PLACE)
        announced = [number for at, number in recording.announced if at <= moment]
        begun = [number for at, number in recording.begun if at <= moment]
        oldest = announced[-1] if announced else None
        allowed = {oldest, *(number for number in begun if oldest is None or number > oldest)}
        last = recording.calls[max(0, moment - 3) : moment]
        assert found in allowed, (drawn_from, turn, moment, last)
        if turn % 10 == 0:  # and the next save works
            run_ranks(NUM_RANKS, save_part, root / PLACE, 99)
            assert number_at(root / PLACE) == 99


def two_saves(root: Path) -> Recording:
    recording = Recording()
    recording.save(root, 1)
    recording.save(root, 2)
    return recording


@pytest.mark.timeout(7200)
@lengths("num_states", 120, 15_000)
def test_nothing_announced_is_lost(
    tmp_path: Path, num_states: int, covered: Callable[[str], None]
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    check_states(two_saves(root), tmp_path, num_states, drawn_from=seed())
    covered(f"seed {seed()}: {num_states} losses of power")


@pytest.mark.timeout(7200)
@lengths("num_states", 20, 2_500)
@pytest.mark.parametrize("part", range(6))
def test_a_save_after_a_killed_one_is_durable(
    tmp_path: Path, part: int, num_states: int, covered: Callable[[str], None]
) -> None:
    """What the killed one had made, directories above all, need not be durable yet."""
    chance = dice_of("power", part)
    root = tmp_path / "disk"
    root.mkdir()
    recording = Recording()
    recording.save(root, 1, kill_after=part * 3 + chance.randrange(3))
    recording.save(root, 2)
    check_states(recording, tmp_path, num_states, drawn_from=part)
    covered(f"seed {seed()}: {num_states} losses of power")


def test_the_replay_finds_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot fail would show nothing: without syncs it must."""
    monkeypatch.setattr("remesh.storage.LocalStorage.sync", lambda _self: None)
    root = tmp_path / "disk"
    root.mkdir()
    recording = two_saves(root)
    with pytest.raises((AssertionError, remesh.RemeshError)):
        check_states(recording, tmp_path, 240, drawn_from=1)


# ---------------------------------------------------------------------------------------------
# Files that several checkpoints share
# ---------------------------------------------------------------------------------------------


def frozen_module(value: float) -> torch.nn.Module:
    module = torch.nn.Linear(50, 20, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return module.requires_grad_(requires_grad=False)


def save_thrice(exchange: Exchange, root: Path, recording: Recording) -> None:
    """Save to three places, and remove the first two when there is a later one."""
    frozen = frozen_module(7.0)
    with remesh.Saver(group=exchange) as saver:
        for number in (1, 2, 3):
            if exchange.rank == 0:
                recording.begun.append((len(recording.calls), number))
            state = part_of(exchange, number) | {"frozen": frozen}
            saver.save_async(state, root / str(number)).result()
            exchange.all_gather(b"")
            if exchange.rank == 0:
                recording.announced.append((len(recording.calls), number))
                if number > 1:
                    before = LocalStorage(root / str(number - 1))
                    for path in before.list():
                        before.delete(path)


@pytest.mark.timeout(7200)
@lengths("num_states", 40, 5_000)
def test_files_that_are_kept_are_durable(
    tmp_path: Path,
    num_states: int,
    covered: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unchanged, "MIN_BYTES", 1)
    disk, recording = tmp_path / "disk", Recording()
    disk.mkdir()
    with SystemCalls(disk, after=recording.note):
        run_ranks(NUM_RANKS, save_thrice, disk, recording)
    links = [call for call in recording.calls if call.name == "link" and "-1." in call.target]
    assert len(links) == 2
    for moment, root in states_of(recording, tmp_path, num_states, random.Random(seed())):
        newest = max((number for at, number in recording.announced if at <= moment), default=0)
        for number in (1, 2, 3):
            state: dict[str, Any] = {
                "table": np.zeros((NUM_ROWS, 2), np.int64),
                "number": -1,
                "frozen": frozen_module(0.0),
            }
            try:
                remesh.load(state, root / str(number))
            except remesh.CheckpointNotFoundError:
                assert number != newest, moment
            except remesh.CorruptCheckpointError:
                assert number < newest, moment  # it is being removed
            else:
                assert (state["table"] == state["number"]).all()
                assert (state["frozen"].weight == 7.0).all()
    covered(f"seed {seed()}: {num_states} losses of power")
