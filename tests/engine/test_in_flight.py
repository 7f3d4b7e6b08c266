"""A save that is in flight when another one begins, and what is said of slow ones."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.background.status_files import StatusFiles
from remesh.errors import RankFailedError
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import MemoryStorage
from tests.engine.scenes import share_of
from tests.support import InjectedError, run_ranks

WORLD_SIZE = 2


def state_of(rank: int, value: float) -> dict[str, Any]:
    whole = np.full((CHUNK_SIZE // 4 * WORLD_SIZE, 2), value, dtype=np.float32)
    return {"w": share_of("w", whole, rank, WORLD_SIZE)}


class Gate:
    """A listener that holds a save up before its first byte is written, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, event: Event) -> None:
        if event.point == "save.file_created":
            assert self.opened.wait(240)


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    gate = Gate()
    saver = remesh.Saver(on_event=gate)
    weights = np.ones(CHUNK_SIZE // 8 + 5)
    handles = [saver.save_async({"w": weights}, tmp_path / "0")]
    second = threading.Thread(
        target=lambda: handles.append(saver.save_async({"w": weights * 2}, tmp_path / "1"))
    )
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.opened.set()
    second.join(240)
    saver.close()
    assert [handle.exception() for handle in handles] == [None] * 2
    for number in range(2):
        assert (remesh.Checkpoint(tmp_path / str(number)).read_array("w") == number + 1).all()


def test_a_close_that_is_interrupted_takes_no_memory_from_the_save_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, place = Gate(), MemoryStorage()
    saver = remesh.Saver(on_event=gate)
    weights = np.ones(CHUNK_SIZE // 8 + 5)
    first = saver.save_async({"w": weights}, place)

    def interrupt(_saver: remesh.Saver) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remesh.Saver, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.close()
    weights[:] = 2
    gate.opened.set()
    wait([first], 240)
    saver.save_async({"w": 3 * weights}, MemoryStorage()).result(240)
    assert (remesh.Checkpoint(place).read_array("w") == 1).all()
    saver.close()


def test_a_failure_that_one_rank_knows_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 commits; rank 1 cannot look for that, so only rank 1's handle has the failure."""
    storages = [MemoryStorage() for _ in range(3)]
    faults = [InjectedError("rank 1 cannot look")]
    look = StatusFiles.is_committed

    def fail_once(status: StatusFiles) -> bool:
        if faults:
            raise faults.pop()
        return look(status)

    monkeypatch.setattr(StatusFiles, "is_committed", fail_once)

    def train(exchange: Exchange) -> list[BaseException | None]:
        saver = remesh.Saver(group=exchange)
        first = saver.save_async(state_of(exchange.rank, 1.0), storages[0])
        wait([first], 60)
        with pytest.raises((InjectedError, RankFailedError)) as caught:
            saver.save_async(state_of(exchange.rank, 2.0), storages[1])
        saver.save_async(state_of(exchange.rank, 3.0), storages[2])
        saver.close()
        return [first.exception(), caught.value]

    (first_0, raised_0), (first_1, raised_1) = run_ranks(WORLD_SIZE, train)
    assert first_0 is None
    assert isinstance(raised_0, RankFailedError)
    assert raised_0.rank == 1
    assert isinstance(first_1, InjectedError)
    assert raised_1 is first_1
    assert storages[1].list() == []
    assert remesh.Checkpoint(storages[2]).verify().ok
