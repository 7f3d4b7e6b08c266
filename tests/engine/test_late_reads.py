"""After a load has ended, in whatever way, no thread of it writes into the tensors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import remesh
from remesh.exchange import Alone, Exchange
from remesh.pipeline import task_pool
from remesh.pipeline.task_pool import DroppedError, TaskPool, Tasks
from remesh.storage import MemoryStorage
from tests.engine.scenes import HeldReads, all_are, errors_of, saved
from tests.waiting import wait_until

SIZE = 1000


def saved_with(fill: float) -> MemoryStorage:
    return saved({"w": np.full(SIZE, fill)})


def check_that_nothing_comes_late(place: HeldReads, tensor: np.ndarray) -> None:
    """Load other values into the tensor, and then let the first reading go on."""
    remesh.load({"w": tensor}, saved_with(1.0))
    place.let_go()
    assert set(tensor.tolist()) == {1.0}


@pytest.mark.parametrize("share_reads", [False, True])
def test_after_the_time_limit(share_reads: bool) -> None:
    places = [HeldReads(saved_with(2.0)) for _ in range(2)]
    tensors = [np.zeros(SIZE) for _ in range(2)]

    def load(exchange: Exchange) -> None:
        rank = exchange.rank
        state = {"w": tensors[rank]}
        remesh.load(state, places[rank], group=exchange, timeout=0.5, share_reads=share_reads)

    all_are(errors_of(2, load), remesh.errors.ExchangeError)
    for place, tensor in zip(places, tensors, strict=True):
        check_that_nothing_comes_late(place, tensor)


class Interrupted(Alone):
    """Its next collective call after a certain moment ends otherwise than well."""

    def __init__(self, moment: threading.Event, error: BaseException) -> None:
        super().__init__()
        self._moment = moment
        self._error = error

    def all_gather(self, data: bytes) -> list[bytes]:
        if self._moment.is_set():
            raise self._error
        return super().all_gather(data)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), remesh.errors.ExchangeError("rank 1 has died")], ids=repr
)
def test_after_ctrl_c_and_after_the_death_of_another_rank(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, tensor = HeldReads(saved_with(2.0)), np.zeros(SIZE)
    # Ask the others again and again, so that the reading has begun when it ends.
    monkeypatch.setattr(task_pool, "LOG_INTERVAL", 0.02)
    with pytest.raises(type(error)):
        remesh.load({"w": tensor}, place, group=Interrupted(place.has_read, error))
    check_that_nothing_comes_late(place, tensor)


def test_writing_ends_when_all_have_left_and_begins_no_more() -> None:
    tasks = Tasks(np.zeros(0, np.int64), 0, 1, 0, lambda *_: 0)
    pool = TaskPool(Alone(), tasks, on_read=lambda _size: None)
    is_inside = True
    found: list[bool] = []

    def close() -> None:
        pool.close()
        found.append(is_inside)

    def is_refused() -> bool:
        try:
            with pool.writing():
                return False
        except DroppedError:
            return True

    closing = threading.Thread(target=close, daemon=True)
    with pool.writing(), pool.writing():
        closing.start()
        wait_until(is_refused, "writing ends")
        is_inside = False
    closing.join(120)
    assert found == [False]
    assert is_refused()
