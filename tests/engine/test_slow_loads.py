"""Loads that take long: the slowest rank is named, and nobody waits for ever."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import remesh
from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, HostMemory
from remesh.exchange import Alone, Exchange
from remesh.exchange.torch_group import TorchGroup
from remesh.pipeline import Destination, task_pool
from remesh.pipeline.task_pool import TaskPool, Tasks
from remesh.storage import Buffer, LocalStorage, Storage
from tests.engine.scenes import HeldReads, errors_of, saved, share_of
from tests.support import run_processes, run_ranks
from tests.waiting import wait_until

STATE = {"w": np.arange(32.0).reshape(8, 4)}


def load_columns(exchange: Exchange, storage: Storage, **options: Any) -> None:
    state = {"w": share_of("w", np.zeros((8, 4)), exchange.rank, 2, 1)}
    remesh.load(state, storage, group=exchange, **options)


@pytest.mark.parametrize(
    ("share_reads", "hanging", "patience"),
    [(False, 1, 100.0), (True, 0, 100.0), (False, 1, None)],
    ids=["each for itself", "shared", "without a limit"],
)
def test_a_rank_that_hangs_is_named_when_time_is_up(
    share_reads: bool, hanging: int, patience: float | None
) -> None:
    """Where reads are shared, rank 0 is the one that reads the only window."""
    storage = saved(STATE)
    held = HeldReads(storage)
    # Whoever is late first ends it for all; the other rank shall not be late, however slow it is.
    timeouts = [0.5 if rank == hanging else patience for rank in range(2)]

    def load(exchange: Exchange) -> None:
        place = held if exchange.rank == hanging else storage
        load_columns(exchange, place, timeout=timeouts[exchange.rank], share_reads=share_reads)

    try:
        errors = errors_of(2, load)
    finally:
        held.let_go()
    for error, timeout in zip(errors, timeouts, strict=True):
        assert isinstance(error, remesh.errors.ExchangeError)
        seconds = r"\S+" if timeout is None or patience is None else f"{timeout:g}"
        said = rf"rank {hanging} did not finish reading within {seconds} s; see whether the storage"
        assert re.match(said, str(error))
        assert "The state is partly loaded" in error.__notes__[0]


class LetGo(logging.Handler):
    """Lets a reading go on as soon as a certain complaint is made about it."""

    def __init__(self, complaint: str, event: threading.Event) -> None:
        super().__init__()
        self.event = event
        self._complaint = re.compile(complaint)

    def emit(self, record: logging.LogRecord) -> None:
        if self._complaint.fullmatch(record.getMessage()):
            self.event.set()


@contextmanager
def listening(complaint: str, event: threading.Event) -> Iterator[None]:
    handler, logger = LetGo(complaint, event), logging.getLogger("remesh")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def pool_of(
    exchange: Exchange, *tasks: Callable[[], int], num_bytes: int = 1, on_read: Any = None
) -> TaskPool:
    """Some tasks of a rank, performed one after the other; each returns what it has read."""
    turn = np.zeros(len(tasks), np.int64)
    found = Tasks(turn, num_bytes, 1, 0, lambda task, *_: tasks[task]())
    return TaskPool(exchange, found, on_read=on_read or (lambda _size: None))


def nowhere(_want: int) -> Destination:
    raise AssertionError


def test_rank_0_says_which_rank_is_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_pool, "LOG_INTERVAL", 0.02)
    complained = threading.Event()

    def watch(exchange: Exchange) -> None:
        def wait() -> int:
            assert exchange.rank == 1 or complained.wait(240)
            return 0

        pool = pool_of(exchange, lambda: 1_000_000 * (2 + exchange.rank), wait, num_bytes=9_000_000)
        pool.start(nowhere)
        pool.wait_for_all()
        assert pool.error is None

    # Before that it may say other things, for a while in which the ranks have not got so far.
    complaint = (
        r"reading for \d+ s; 2 of 3 ranks have not finished\nThe slowest is rank 0 with 2\.0 of "
        r"9\.0 MB"
    )
    with listening(complaint, complained):
        run_ranks(3, watch)


def test_a_rank_for_which_the_others_wait_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = saved(STATE)
    held = HeldReads(storage)
    monkeypatch.setattr(task_pool, "LOG_INTERVAL", 0.02)

    def load(exchange: Exchange) -> None:
        load_columns(exchange, storage if exchange.rank else held, share_reads=True)

    complaint = r"reading for \d+ s; the others wait for rank 0, round 1 of 1"
    with listening(complaint, held.may_go_on):
        run_ranks(2, load)


class Asking(TorchGroup):
    """Notes in a directory that a call was answered by a rank that was busy, and said so there."""

    directory: Path

    def all_gather(self, data: bytes) -> list[bytes]:
        is_busy = (self.directory / "busy").exists()
        found = super().all_gather(data)
        if is_busy:
            (self.directory / "answered").touch()
        return found

    def be_busy(self) -> None:
        """On rank 1, be busy until others were answered."""
        if self.rank == 1:
            (self.directory / "busy").touch()
            wait_until((self.directory / "answered").exists, "an answer")


def outlast_the_timeout(_exchange: Exchange, root: Path) -> None:
    """Move a state between memories and load it, both slower on rank 1 than a call may wait."""
    group = dist.new_group()
    dist.barrier(group)
    # Not from the beginning, for the ranks may take longer than that to make their connections.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=25), group)
    exchange = Asking(group, warn_after=2.0)
    whole = STATE["w"]

    def part(dim: int, values: Any) -> dict[str, remesh.ShardedTensor]:
        return {"w": share_of("w", values, exchange.rank, 2, dim)}

    def check(target: dict[str, remesh.ShardedTensor]) -> None:
        found = target["w"].parts[0].data
        np.testing.assert_array_equal(found, np.split(whole, 2, 1)[exchange.rank])
        assert (exchange.directory / "answered").exists(), "no rank was busy"

    def copy_out(memory: HostMemory, box: Box, into: CarrierArray) -> None:
        if box.offset[1] > 0:  # what rank 1 has itself; another rank waits for its message
            exchange.be_busy()
        copy_at_once(memory, box, into)

    class Slow(LocalStorage):
        def read_into(self, path: str, start: int, buffer: Buffer) -> int:
            exchange.be_busy()
            return super().read_into(path, start, buffer)

    source, target = part(0, whole), part(1, 0 * whole)
    exchange.directory = root / "live"
    copy_at_once = HostMemory.copy_out
    with mock.patch.object(HostMemory, "copy_out", copy_out):
        remesh.reshard(source, target, group=exchange)
    check(target)

    target = part(1, 0 * whole)
    exchange.directory = root / "load"
    remesh.save(source, root / "saved", group=exchange)
    remesh.load(target, Slow(root / "saved"), group=exchange, share_reads=False)
    check(target)


def test_a_rank_that_is_busy_for_long_answers_those_that_wait(tmp_path: Path) -> None:
    """Before the group's timeout ends their call, which is shorter than the interval of logs."""
    for name in ("live", "load"):
        (tmp_path / name).mkdir()
    run_processes(2, outlast_the_timeout, tmp_path)


def test_a_storage_that_cancels_a_read_has_failed() -> None:
    """Only what was given up here ends without an error."""

    def read() -> int:
        raise CancelledError

    pool = pool_of(Alone(), read)
    pool.start(nowhere)
    pool.wait_for_all()
    assert isinstance(pool.error, CancelledError)


def test_who_has_given_up_reads_no_more() -> None:
    counted: list[int] = []

    def give_up() -> int:
        pool.close()
        return 2

    pool = pool_of(Alone(), lambda: 1, give_up, lambda: 3, on_read=counted.append)
    pool.start(nowhere)
    pool.wait_for_all()
    assert counted == [1]
    assert pool.error is None
