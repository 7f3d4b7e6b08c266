"""Loads that take long: the slowest rank is named, and nobody waits for ever."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

import remesh
from remesh.exchange import Alone, Exchange
from remesh.pipeline import share
from remesh.pipeline.watch import Patience, Reading
from remesh.storage import Buffer, MemoryStorage
from remesh.testing import Raised, run_ranks, run_ranks_outcomes


class Hanging(MemoryStorage):
    """Reads of tensors hang until they are let go."""

    def __init__(self, inner: MemoryStorage, let_go: threading.Event) -> None:
        super().__init__()
        self._inner = inner
        self._let_go = let_go

    def list(self, prefix: str = "") -> list[str]:
        return self._inner.list(prefix)

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._inner.read(path, start, stop)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        if path.endswith("00000.safetensors"):
            self._let_go.wait()
        return self._inner.read_into(path, start, buffer)


def saved() -> MemoryStorage:
    storage = MemoryStorage()
    remesh.save({"w": np.arange(32.0).reshape(8, 4)}, storage)
    return storage


def load_columns(exchange: Exchange, storage: MemoryStorage, **options: object) -> None:
    part = np.zeros((8, 2))
    tensor = remesh.ShardedTensor.at_offset("w", part, (8, 4), (0, 2 * exchange.rank))
    remesh.load({"w": tensor}, storage, group=exchange, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share_reads", "hanging"), [(False, 1), (True, 0)])
def test_a_rank_that_hangs_is_named_when_time_is_up(share_reads: bool, hanging: int) -> None:
    """Where reads are shared, rank 0 is the one that reads the only window."""
    storage, let_go = saved(), threading.Event()

    def load(exchange: Exchange) -> None:
        place = Hanging(storage, let_go) if exchange.rank == hanging else storage
        load_columns(exchange, place, timeout=0.5, share_reads=share_reads)

    try:
        outcomes = run_ranks_outcomes(2, load)
    finally:
        let_go.set()
    for outcome in outcomes:
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.ExchangeError)
        assert str(outcome.error).startswith(
            f"rank {hanging} did not finish reading within 0.5 s; see whether the storage answers"
        )
        assert "The state is partly loaded" in outcome.error.__notes__[0]


class LetGo(logging.Handler):
    """Lets a reading go on as soon as it is complained about."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.event.set()


@pytest.fixture
def complaints() -> LetGo:
    return LetGo()


def test_rank_0_says_which_rank_is_the_slowest(complaints: LetGo) -> None:
    def watch(exchange: Exchange) -> None:
        def read(count: object) -> None:
            assert callable(count)
            count(30 + exchange.rank)
            if exchange.rank != 1:
                complaints.event.wait()

        patience = Patience(interval=0.02)
        reading = Reading(read, lambda _size: None, num_bytes=100, patience=patience)
        reading.start()
        reading.wait_for_all(exchange)
        assert reading.error is None

    logger = logging.getLogger("remesh")
    logger.addHandler(complaints)
    try:
        run_ranks(3, watch)
    finally:
        logger.removeHandler(complaints)
    # Rank 1 may not have said yet that it has ended when the others are asked for the first time.
    assert "ranks have not finished, the slowest is rank" in complaints.lines[-1]
    assert complaints.lines[-1].startswith("reading for 0 s; ")


def test_a_rank_for_which_the_others_wait_says_so(
    complaints: LetGo, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = saved()
    monkeypatch.setattr(share, "Reading", _impatient)
    logger = logging.getLogger("remesh")
    logger.addHandler(complaints)

    def load(exchange: Exchange) -> None:
        place = Hanging(storage, complaints.event) if exchange.rank == 0 else storage
        load_columns(exchange, place, share_reads=True)

    try:
        run_ranks(2, load)
    finally:
        logger.removeHandler(complaints)
    assert any(
        line.endswith("the others wait for rank 0, which reads for round 1 of 1")
        for line in complaints.lines
    )


def _impatient(*args: object, **options: object) -> Reading:
    return Reading(*args, **{**options, "patience": Patience(interval=0.02)})  # type: ignore[arg-type]


def test_an_error_in_the_thread_is_raised_where_it_happened() -> None:
    error = remesh.StorageError("the disk is gone")

    def watch(exchange: Exchange) -> BaseException | None:
        def read(_count: object) -> None:
            if exchange.rank == 1:
                raise error

        reading = Reading(read, lambda _size: None, num_bytes=1, patience=Patience())
        reading.start()
        reading.wait_for_all(exchange)
        return reading.error

    assert run_ranks(2, watch) == [None, error]


def test_who_has_given_up_reads_no_more() -> None:
    counted: list[int] = []

    def read(count: object) -> None:
        assert callable(count)
        count(1)
        reading.give_up()
        count(2)

    reading = Reading(read, counted.append, num_bytes=3, patience=Patience())
    reading.start()
    reading.wait_for_all(Alone())
    assert counted == [1]
    assert reading.error is None
