"""Storage that fails, ranks that stall, clocks that jump: a clear error, nothing announced lost."""

from __future__ import annotations

import datetime as dt
import errno
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Literal

import pytest

import remesh
from remesh.background import status_files
from remesh.errors import ExchangeError
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.formats import native_writer
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.campaigns.killed_saving import arrays_of, compress_of, part_of_state, whole_state
from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.support import (
    Fail,
    FaultInjector,
    FaultyStorage,
    Raised,
    Returned,
    run_ranks,
    run_ranks_outcomes,
)
from tests.waiting import wait_until

NUM_RANKS = 3
Way = Literal["save", "async", "load"]

WRITING = ("put", "create", "write", "finish", "sync", "delete", "list", "size", "read", "space")
READING = ("read", "read_into", "size")
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


def save(exchange: Exchange, places: Sequence[Storage], step: int, way: Way) -> None:
    """Save a step; each rank has its own view of the storage."""
    state = part_of_state(step, exchange.rank, exchange.world_size)
    if way == "save":
        compress = compress_of(step)
        remesh.save(state, places[exchange.rank], overwrite=True, compress=compress, group=exchange)
        return
    saver = remesh.Saver(group=exchange, deadline=60, compress=compress_of(step))
    saver.save_async(state, places[exchange.rank], overwrite=True)
    saver.close()


def load(exchange: Exchange, places: Sequence[Storage], step: int) -> None:
    wanted = part_of_state(step, exchange.rank, exchange.world_size)
    state = part_of_state(step, exchange.rank, exchange.world_size)
    for array in arrays_of(state).values():
        array[...] = 0
    remesh.load(state, places[exchange.rank], group=exchange)
    for name, array in arrays_of(wanted).items():
        assert arrays_of(state)[name].tobytes() == array.tobytes(), name


def stored_step(storage: Storage) -> int:
    """The step that is there; fails if it is not all of it."""
    checkpoint = remesh.Checkpoint(storage)
    step = checkpoint.values["step"]
    assert isinstance(step, int)
    for name, array in whole_state(step).items():
        if name != "step":
            assert checkpoint.read_array(name).tobytes() == array.tobytes()
    assert checkpoint.verify().ok
    return step


def draw(dice: random.Random) -> tuple[Way, set[int], Fail]:
    """What is done, whose storage fails, and how."""
    way: Way = dice.choice(("save", "async", "load"))
    ranks = {dice.randrange(NUM_RANKS)} if dice.random() < 0.7 else set(range(NUM_RANKS))
    operation = dice.choice(READING if way == "load" else WRITING)
    number = errno.EIO if way == "load" else dice.choice(NUMBERS)
    times = dice.choice((1, 2, None))
    return (
        way,
        ranks,
        Fail(operation, number=number, skip=dice.choice((0, 0, 1, 2, 5)), times=times),
    )


def meet(inner: MemoryStorage, step: int, way: Way, ranks: set[int], fault: Fail) -> str:
    """Save or load with a fault, over a checkpoint that is announced; how it ended."""
    places = [FaultyStorage(inner, [fault] if rank in ranks else []) for rank in range(NUM_RANKS)]
    before = stored_step(inner)
    if way == "load":
        outcomes = run_ranks_outcomes(NUM_RANKS, load, places, before)
    else:
        outcomes = run_ranks_outcomes(NUM_RANKS, save, places, step, way)
    if all(isinstance(outcome, Returned) for outcome in outcomes):
        assert stored_step(inner) == (before if way == "load" else step)
        return "went well"
    after = stored_step(inner)
    # A put of the record that fails may have made it visible all the same; here it has not.
    assert after in {before, step}
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]
    assert any("injected" in str(error) for error in errors), outcomes
    # In the background ranks speak through the storage: one that can put neither its part nor its
    # failure is only missed.
    is_mute = way == "async" and fault.operation == "put" and fault.times != 1
    for outcome in outcomes:
        if isinstance(outcome, Raised) and is_mute and isinstance(outcome.error, ExchangeError):
            named = rf"ranks? \[?({'|'.join(map(str, ranks))})\b"
            assert re.search(named, str(outcome.error)), outcome
        elif isinstance(outcome, Raised):
            assert isinstance(outcome.error, remesh.StorageError), outcome
            assert "injected" in str(outcome.error)
        else:
            assert isinstance(outcome, Returned)
            assert after == step, "it was announced"
    return "raised"


@pytest.mark.timeout(7200)
@lengths("num_faults", 40, 1000)
def test_storage_that_fails_at_random(num_faults: int, covered: Callable[[str], None]) -> None:
    inner = MemoryStorage()
    run_ranks(NUM_RANKS, save, [inner] * NUM_RANKS, 1, "save")
    ends: Counter[str] = Counter()
    for number in range(num_faults):
        way, ranks, fault = draw(dice_of("faults", number))
        with noted(f"run {number}: {way}, ranks {ranks}, {fault}"):
            ends[f"{way} {meet(inner, 20 * number + 2, way, ranks, fault)}"] += 1
    covered(f"seed {seed()}: {dict(ends)}")
    for way in ("save", "async", "load"):
        assert ends[f"{way} raised"] > 0


# ---------------------------------------------------------------------------------------------
# Ranks that stall
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_stalls_is_named_and_does_not_hold_the_others(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_files, "REPORT_SECONDS", 0.0)
    dice = dice_of("stall", number)
    rank = dice.randrange(NUM_RANKS)
    mine = ("save.file_created", "save.chunk_written", "save.file_finished")
    point = dice.choice(mine if rank else [*mine, "save.parts_gathered", "save.index_written"])
    released = threading.Event()

    def stall() -> None:
        assert released.wait(100)

    faults = FaultInjector().call_at(rank, point, stall)
    others = {f"part-{one:05d}.msgpack" for one in range(1, NUM_RANKS) if one != rank}

    def on_event(event: Event) -> None:
        faults(event)
        if rank and event.rank == 0 and event.point == "save.file_finished":
            # Only then does rank 0 look for the others, and begin to count the seconds.
            wait_until(
                lambda: {path.name for path in tmp_path.glob("data-*/part-*")} == others,
                "the other ranks finish their files",
            )

    def train(exchange: Exchange) -> BaseException | None:
        # Rank 0 gives up on the one that stalls, or the others on rank 0; else nobody is late.
        deadline = 0.3 if (rank == 0) != (exchange.rank == 0) else 100.0
        saver = remesh.Saver(group=exchange, deadline=deadline, on_event=on_event)
        state = part_of_state(2, exchange.rank, exchange.world_size)
        handle = saver.save_async(state, tmp_path, overwrite=True)
        if exchange.rank != rank:
            wait([handle], timeout=100)
        exchange.all_gather(b"")  # a collective of the training
        released.set()
        return handle.exception(timeout=100)

    run_ranks(NUM_RANKS, lambda one: save(one, [LocalStorage(tmp_path)] * NUM_RANKS, 1, "save"))
    errors = run_ranks(NUM_RANKS, train)
    for other, error in enumerate(errors):
        if other != rank:
            assert isinstance(error, remesh.errors.ExchangeError)
            assert ("for rank 0 to commit" if rank == 0 else f"for ranks [{rank}]") in str(error)
    assert not rank or f"for 1 of {NUM_RANKS} ranks: [{rank}]" in caplog.text
    # Rank 0 may go on and commit after others have given up on it; nobody else does.
    assert stored_step(LocalStorage(tmp_path)) in ({1} if rank else {1, 2})


# ---------------------------------------------------------------------------------------------
# Clocks that jump, and calls that do less than they were asked to
# ---------------------------------------------------------------------------------------------


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is newest is a matter of steps: time may go back and forth by years."""
    dice = dice_of("clock", 0)
    a_decade = 10 * 365 * 86400.0
    real = time.time

    def jumping() -> float:
        return real() + dice.uniform(-a_decade, a_decade)

    class JumpingDates:
        UTC = dt.UTC

        class datetime:  # noqa: N801 - stands in for the class of that name
            @staticmethod
            def now(zone: dt.tzinfo) -> dt.datetime:
                return dt.datetime.fromtimestamp(jumping(), zone)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(native_writer, "dt", JumpingDates)
    for step in range(1, 13):
        state = {"state": part_of_state(step, 0, 1)}
        with remesh.Manager(tmp_path, every=1, keep=2) as manager:
            resumed = manager.resume({"state": part_of_state(step - 1, 0, 1)})
            assert (0 if resumed is None else resumed.step) == step - 1
            manager.step(step, state)
    kept = sorted(path.name for path in tmp_path.iterdir() if (path / "remesh.json").exists())
    assert len(kept) >= 2
    assert kept[-1].endswith("12")
