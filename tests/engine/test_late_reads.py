"""After a load has ended, in whatever way, no thread of it writes into the tensors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import remesh
from remesh.exchange import Alone, Exchange
from remesh.pipeline import task_pool
from remesh.pipeline.task_pool import DroppedError, TaskPool, Tasks
from remesh.storage import Buffer, MemoryStorage
from tests.support import Raised, run_ranks_outcomes
from tests.waiting import wait_until

SIZE = 1000


class Late(MemoryStorage):
    """Hands out what it has read only when it is let go."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__()
        self._inner = inner
        self.has_read = threading.Event()
        self._let_go = threading.Event()
        self._readers: list[threading.Thread] = []

    def list(self, prefix: str = "") -> list[str]:
        return self._inner.list(prefix)

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._inner.read(path, start, stop)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        num_read = self._inner.read_into(path, start, buffer)
        self._readers.append(threading.current_thread())
        self.has_read.set()
        assert self._let_go.wait(120), "nobody lets the reading go on"
        return num_read

    def let_go(self) -> None:
        """Let the reading threads go on, and wait until they have ended."""
        self._let_go.set()
        for reader in self._readers:
            reader.join(120)
            assert not reader.is_alive()


def saved(fill: float) -> MemoryStorage:
    storage = MemoryStorage()
    remesh.save({"w": np.full(SIZE, fill)}, storage)
    return storage


def check_that_nothing_comes_late(place: Late, tensor: np.ndarray) -> None:
    """Load other values into the tensor, and then let the first reading go on."""
    remesh.load({"w": tensor}, saved(1.0))
    place.let_go()
    assert set(tensor.tolist()) == {1.0}


@pytest.mark.parametrize("share_reads", [False, True])
def test_after_the_time_limit(share_reads: bool) -> None:
    places = [Late(saved(2.0)) for _ in range(2)]
    tensors = [np.zeros(SIZE) for _ in range(2)]

    def load(exchange: Exchange) -> None:
        rank = exchange.rank
        state = {"w": tensors[rank]}
        remesh.load(state, places[rank], group=exchange, timeout=0.5, share_reads=share_reads)

    for outcome in run_ranks_outcomes(2, load):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.errors.ExchangeError)
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
    place, tensor = Late(saved(2.0)), np.zeros(SIZE)
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
