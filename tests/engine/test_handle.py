"""The handle of a background save is a future, whoever writes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, as_completed, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import remesh
from remesh.checkpoint.unchanged import History
from remesh.errors import DivergedReplicaError
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.support import FaultInjector, InjectedError, run_ranks

LIMIT = 120.0
STATE: dict[str, Any] = {"w": np.arange(10.0)}

Writer = Literal["thread", "process"]
both = pytest.mark.parametrize("writer", ["thread", "process"])


@both
def test_futures_are_waited_for_as_others(writer: Writer, tmp_path: Path) -> None:
    ended: list[object] = []
    with remesh.Saver(writer=writer) as saver:
        handles = [saver.save_async(STATE, tmp_path / str(number)) for number in range(2)]
        handles[0].add_done_callback(ended.append)
        assert set(as_completed(handles, LIMIT)) == set(handles)
        assert wait(handles, LIMIT).not_done == set()
    for handle in handles:
        assert handle.result(0).bytes_written == handle.progress().written_bytes > 0
        assert handle.exception(0) is None
        assert handle.done()
        assert not handle.running()
        assert not handle.cancelled()
        assert not handle.cancel()
    assert ended == handles[:1]


@both
def test_a_saver_that_fails_after_the_commit_ends_the_save(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> History:
        raise InjectedError("cannot remember")

    monkeypatch.setattr(History, "after", fail)
    saver = remesh.Saver(writer=writer)
    for number in range(2):  # the writer process goes on
        handle = saver.save_async(STATE, tmp_path / str(number))
        with pytest.raises(InjectedError, match="cannot remember"):
            handle.result(LIMIT)
        with pytest.raises(InjectedError):
            saver.wait()
        assert remesh.Checkpoint(tmp_path / str(number)).verify().ok
    saver.close()


def test_a_save_that_cannot_even_be_given_up_ends() -> None:
    class Broken(MemoryStorage):
        def list(self, prefix: str = "") -> list[str]:
            if prefix.startswith("data-"):
                raise RuntimeError("a bug of the storage")
            return super().list(prefix)

    faults = FaultInjector().fail_at(0, "save.chunk_written")
    handle = remesh.Saver(on_event=faults).save_async(STATE, Broken())
    with pytest.raises(RuntimeError, match="a bug of the storage"):
        handle.result(LIMIT)


def test_a_save_under_way_is_a_running_future(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hold(event: Event) -> None:
        if event.point == "save.file_created":
            assert go_on.wait(LIMIT)

    saver = remesh.Saver(on_event=hold)
    handle = saver.save_async(STATE, tmp_path / "c")
    assert handle.staged
    assert handle.running()
    assert not handle.done()
    assert wait([handle], 0, return_when=FIRST_COMPLETED).done == set()
    with pytest.raises(TimeoutError, match="has not ended"):
        handle.result(0)
    with pytest.raises(TimeoutError):
        handle.exception(0)
    go_on.set()
    handle.result(LIMIT)
    saver.close()


@both
def test_a_failed_save_is_a_failed_future(writer: Writer, tmp_path: Path) -> None:
    seen: list[BaseException | None] = []
    saver = remesh.Saver(writer=writer, on_event=FaultInjector().fail_at(0, "save.staged"))
    handle = saver.save_async(STATE, tmp_path / "c")
    handle.add_done_callback(lambda future: seen.append(future.exception()))
    assert isinstance(handle.exception(LIMIT), InjectedError)
    with pytest.raises(InjectedError) as caught:
        saver.close()
    assert caught.value is handle.exception()
    assert seen == [handle.exception()]
    assert not handle.cancelled()


@both
def test_a_cancelled_save_is_a_cancelled_future(writer: Writer, tmp_path: Path) -> None:
    def cancel(event: Event) -> None:
        if event.point == "save.chunk_staged":
            assert saver._in_flight is not None
            assert saver._in_flight.cancel()

    saver = remesh.Saver(writer=writer, on_event=cancel)
    handle = saver.save_async(STATE, tmp_path / "c")
    assert wait([handle], LIMIT).done == {handle}
    assert handle.cancelled()
    assert handle.cancel()
    with pytest.raises(CancelledError):
        handle.result()
    with pytest.raises(CancelledError):
        handle.exception()
    with pytest.raises(CancelledError, match="was cancelled"):
        saver.close()
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.Checkpoint(tmp_path / "c")


def test_a_save_is_awaited(tmp_path: Path) -> None:
    with remesh.Saver() as saver:

        async def train() -> None:
            await asyncio.wrap_future(saver.save_async(STATE, tmp_path / "c"))

        asyncio.run(train())
        assert remesh.Checkpoint(tmp_path / "c").verify().ok


def test_save_async_takes_what_save_takes() -> None:
    storage = MemoryStorage()
    points: list[tuple[int, str]] = []

    def train(exchange: Exchange) -> None:
        same = {"w": remesh.ShardedTensor.whole("w", np.ones(3), replica_id=exchange.rank)}
        handle = remesh.save_async(
            same,
            storage,
            metadata={"a": 1},
            verify_replicas=True,
            group=exchange,
            on_event=lambda event: points.append((event.rank, event.point)),
        )
        handle.result(LIMIT)
        other = np.full(3, float(exchange.rank))
        differs = {"w": remesh.ShardedTensor.whole("w", other, replica_id=exchange.rank)}
        remesh.save_async(differs, storage, overwrite=True, group=exchange).result(LIMIT)
        with pytest.raises(DivergedReplicaError):
            remesh.save_async(
                differs, storage, overwrite=True, group=exchange, verify_replicas=True
            )

    run_ranks(2, train)
    assert {(0, "save.done"), (1, "save.done")} <= set(points)
    assert remesh.Checkpoint(storage).metadata == {}
