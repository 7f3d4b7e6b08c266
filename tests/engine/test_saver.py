"""Saving beside the training: what is staged is what is stored, whatever happens meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import remesh
from remesh.background import saver as background
from remesh.background import status_files
from remesh.background.status_files import Participant, StatusFiles
from remesh.checkpoint import unchanged
from remesh.errors import ExchangeError, StorageError
from remesh.events import Event, Timeline
from remesh.exchange import Alone, Exchange, Outcome
from remesh.exchange.threads import ThreadExchange
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import MemoryStorage, Storage
from tests.engine.scenes import part_of, stored_value
from tests.support import (
    FaultInjector,
    FaultyStorage,
    InjectedError,
    run_ranks,
)
from tests.waiting import is_alive, wait_until

WORLD_SIZE = 3
state_of = partial(part_of, WORLD_SIZE)


class Spy(ThreadExchange):
    """An exchange that counts the messages and bytes of its rank."""

    def __init__(self, inner: ThreadExchange) -> None:
        super().__init__(inner._group, inner.rank)
        self.num_messages = 0
        self.num_bytes = 0
        self._meet = self._group.meet
        self._group = self  # type: ignore[assignment]

    def meet(self, rank: int, operation: str, contribution: list[bytes]) -> list[list[bytes]]:
        assert operation != "swap", "a background save swaps nothing"
        self.num_messages += 1
        self.num_bytes += sum(map(len, contribution))
        return self._meet(rank, operation, contribution)


@pytest.mark.parametrize(
    ("writer", "arena_bytes"),
    [
        ("thread", None),
        ("thread", CHUNK_SIZE),
        ("thread", 3 * CHUNK_SIZE),
        ("process", None),
        ("process", CHUNK_SIZE),
    ],
)
def test_what_is_stored_is_the_state_at_the_call(
    writer: Literal["thread", "process"], arena_bytes: int | None, tmp_path: Path
) -> None:
    weights = np.random.default_rng(0).random(5 * CHUNK_SIZE // 8 + 17)
    timeline = Timeline()
    with remesh.Saver(writer=writer, arena_bytes=arena_bytes, on_event=timeline) as saver:
        process_id = saver.writer_process_id
        for number in range(3):
            expected = weights.copy()
            handle = saver.save_async({"w": weights, "n": number}, tmp_path / str(number))
            weights += 1.0
            handle.result(timeout=240)
            assert handle.done()
            assert handle.exception() is None
            checkpoint = remesh.Checkpoint(tmp_path / str(number))
            np.testing.assert_array_equal(checkpoint.read_array("w"), expected)
            assert checkpoint.values["n"] == number
            progress = handle.progress()
            assert progress.phase == "done"
            assert progress.num_bytes == progress.staged_bytes == progress.written_bytes
        assert saver.writer_process_id == process_id
        assert (process_id is None) == (writer == "thread")
        if process_id is not None:
            assert "libtorch" not in Path(f"/proc/{process_id}/maps").read_text()
        if arena_bytes is not None:
            assert saver.num_arena_bytes <= arena_bytes
    assert process_id is None or not is_alive(process_id)
    points = [moment.event.point for moment in timeline.moments]
    assert points.count("save.done") == points.count("save.committed") == 3


def test_a_warmed_arena_is_not_allocated_again(tmp_path: Path) -> None:
    state = {"w": np.ones(3 * CHUNK_SIZE // 8)}
    with remesh.Saver() as saver:
        saver.warm(state)
        saver.save_async(state, tmp_path / "0").result()
        allocated = saver.num_arena_bytes
        assert allocated >= 3 * CHUNK_SIZE
        saver.save_async(state, tmp_path / "1").result()
        assert saver.num_arena_bytes == allocated


def test_only_a_save_without_warm_memory_writes_while_it_stages(tmp_path: Path) -> None:
    weights = np.ones(6 * CHUNK_SIZE // 8)
    seen: list[str] = []
    written = threading.Event()

    def listen(event: Event) -> None:
        seen.append(event.point)
        if event.point == "save.chunk_written":
            written.set()
        if event.point == "save.chunk_staged" and seen.count(event.point) >= 3:
            written.wait(240)

    with remesh.Saver(on_event=listen) as saver:
        saver.save_async({"w": weights}, tmp_path / "0").result()
        assert seen.index("save.chunk_written") < seen.index("save.staged")
        for thread in threading.enumerate():
            if thread.name == "remesh-warm":
                thread.join()
        assert saver.num_arena_bytes >= weights.nbytes
        seen.clear()
        saver.save_async({"w": weights}, tmp_path / "1").result()
        assert seen.index("save.staged") < seen.index("save.chunk_written")


def test_ranks_find_each_other_without_collectives() -> None:
    storage = MemoryStorage()

    def train(exchange: ThreadExchange) -> None:
        spy = Spy(exchange)
        state = state_of(exchange.rank, 1.0)
        with remesh.Saver(group=spy) as saver:
            handle = saver.save_async(state, storage)
            foreground = spy.num_messages
            state["w"].parts[0].data[...] = -1.0
            handle.result(timeout=240)
            assert spy.num_messages == foreground

    run_ranks(WORLD_SIZE, train)
    assert stored_value(storage) == 1.0
    assert not [path for path in storage.list() if "part-" in path or "failed" in path]


def test_an_unchanged_layout_crosses_the_network_as_a_fingerprint() -> None:
    def train(exchange: ThreadExchange) -> tuple[list[int], int]:
        spy = Spy(exchange)
        sizes = []
        with remesh.Saver(group=spy) as saver:
            for number in range(3):
                before = spy.num_bytes
                saver.save(state_of(exchange.rank, float(number)), storages[number])
                sizes.append(spy.num_bytes - before)
            reused = saver.num_plans_reused
            saver.save(state_of(exchange.rank, 3.0, rows=4), storages[3])
            assert saver.num_plans_reused == reused
            saver.save(state_of(exchange.rank, 4.0, rows=4), storages[4])
            assert saver.num_plans_reused == reused + 1
        return sizes, reused

    storages = [MemoryStorage() for _ in range(5)]
    for sizes, reused in run_ranks(WORLD_SIZE, train)[1:]:
        assert reused == 2
        assert sizes[1] == sizes[2]
        # The layout itself is told by rank 0, as the others hold the same kinds of boxes.
        assert sizes[1] < sizes[0] < 700
    for number, storage in enumerate(storages):
        assert stored_value(storage) == number


class Seat:
    """The exchange of a process, whose place in the job may become another one."""

    inner: Exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("how", "seats"),
    [
        *(("save", seats) for seats in [(1, 0, 2), (2, 1), (0, 1, 3), (0, 1, 6), (6, 1, 2)]),
        *(("save_async", seats) for seats in [(0, 2, 1), (2, 0, 1), (0, 1, 3)]),
    ],
    ids=str,
)
def test_a_process_with_another_rank_makes_a_new_plan(
    seats: tuple[int, ...], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have the same tensors, so their layouts do not tell the ranks from each other."""
    monkeypatch.setattr(unchanged, "MIN_BYTES", 1)  # frozen files are kept
    savers = [(remesh.Saver(group=seat), seat) for seat in (Seat() for _ in range(7))]

    def train(exchange: Exchange, seats: Sequence[int], turn: int) -> bool:
        saver, seat = savers[seats[exchange.rank]]
        seat.inner, reused = exchange, saver.num_plans_reused
        parameters = {
            name: torch.nn.Parameter(torch.full((99,), value), requires_grad="frozen" not in name)
            for name, value in values_of(turn).items()
        }
        state = {"model": torch.nn.ParameterDict(parameters)}
        getattr(saver, how)(state, tmp_path / str(turn))
        saver.wait()
        return saver.num_plans_reused > reused

    def values_of(turn: int) -> dict[str, float]:
        frozen = {f"frozen{row}": float(row) for row in range(4)}
        return frozen | {f"w{row}": 100.0 * turn + row for row in range(4)}

    # Two jobs save; then one of them goes on, in part with other processes, or with a new one.
    for turn, processes in enumerate([(4, 5, 3), (0, 1, 2), (0, 1, 2), seats, seats]):
        reused = run_ranks(len(processes), train, processes, turn)
        assert reused == [turn in (2, 4)] * len(processes)
        checkpoint = remesh.Checkpoint(tmp_path / str(turn))
        for name, value in values_of(turn).items():
            assert (checkpoint.read_array(f"model.{name}") == value).all(), name


def status_of(storage: Storage, rank: int, file_format: str = "remesh") -> StatusFiles:
    me = Participant(
        format=file_format,
        save_id="0" * 12,
        rank=rank,
        num_ranks=2,
        deadline=240.0,
    )
    return StatusFiles(storage, me)


def test_a_rank_whose_part_is_gone_does_not_wait_for_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when another save has replaced the checkpoint before this rank saw the commit, or rank 0
    could not put why it gave the save up."""

    class Forgetful(MemoryStorage):
        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            if "part-" not in path:
                super().put(path, data, overwrite=overwrite)

    monkeypatch.setattr(status_files, "HIDDEN_SECONDS", 0.1)
    monkeypatch.setattr(status_files, "LOOKS_PER_PART", 2)
    remesh.save({"w": np.ones(3)}, storage := Forgetful())
    status = status_of(storage, 1)
    with pytest.raises(ExchangeError, match="rank 0 ended this save, and rank 1 did not see how"):
        status.join_outcomes(Outcome(), lambda _: None, lambda: None)


def test_a_record_that_another_node_sees_late_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a network file system, which may hide a new file longer than it shows a removed one."""
    looks: list[bool] = []

    def shows() -> bool:
        looks.append(True)
        return len(looks) > 5

    monkeypatch.setattr(status_files, "LOOKS_PER_PART", 1)
    monkeypatch.setattr(status_files, "LONGEST_SECONDS", 0.01)
    storage = MemoryStorage()
    status = status_of(storage, 1)
    monkeypatch.setattr(status, "is_committed", shows)
    status.join_outcomes(Outcome(), lambda _: None, lambda: None)
    assert len(looks) == 6


def test_metadata_of_a_class_of_the_script_goes_to_a_writer_process(tmp_path: Path) -> None:
    class Mode(StrEnum):  # no other process can import it
        TRAIN = "train"

    with remesh.Saver(writer="process") as saver:
        saver.save_async({"w": np.ones(3)}, tmp_path, metadata={"mode": Mode.TRAIN}).result()
    assert remesh.Checkpoint(tmp_path).metadata == {"mode": "train"}


def test_ranks_are_told_that_the_commit_of_another_system_is_not_said() -> None:
    class Full(MemoryStorage):
        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            if "/committed" in path:
                raise StorageError("the disk is full")
            super().put(path, data, overwrite=overwrite)

    full = Full()
    status = status_of(full, 0, "huggingface")
    status_of(full, 1, "huggingface")._put("part", b"")
    with pytest.raises(StorageError, match="the disk is full"):
        status.join_outcomes(Outcome(), lambda _: None, lambda: None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_small_tensors_take_as_few_calls_as_one(asynchronous: bool) -> None:
    generator = np.random.default_rng(0)
    state = {
        f"layers.{number}.{kind}": generator.random(number % 7 + 1).astype(dtype)
        for number in range(1000)
        for kind, dtype in (("a", np.float64), ("b", np.int16), ("c", np.float32))
    }
    state["strided"] = generator.random((9, 11)).T
    storage = FaultyStorage(MemoryStorage(), [])
    with remesh.Saver() as saver:
        if asynchronous:
            saver.save_async(state, storage)
        else:
            saver.save(state, storage)
    checkpoint = remesh.Checkpoint(storage)
    assert checkpoint.verify().ok
    loaded = {name: np.zeros_like(array) for name, array in state.items()}
    remesh.load(loaded, storage)
    assert all((loaded[name] == array).all() for name, array in state.items())
    operations = [name for name, _ in storage.calls]
    assert operations.count("write") == operations.count("create") == 1
    assert operations.count("put") <= 4


SCRIPT = """
import sys, threading
import numpy as np
import remesh

def hold(event):
    if event.point == "save.file_created":
        threading.main_thread().join()  # until the interpreter ends
        if sys.argv[1] == "abort":
            threading.Event().wait()

saver = remesh.Saver(at_exit=sys.argv[1], on_event=hold)
saver.save_async({"w": np.ones(10)}, sys.argv[2])
"""


@pytest.mark.parametrize("at_exit", ["wait", "abort"])
def test_the_end_of_the_interpreter(at_exit: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", SCRIPT, at_exit, str(tmp_path / "c")], check=True, timeout=120
    )
    if at_exit == "wait":
        assert remesh.Checkpoint(tmp_path / "c").read_array("w").tolist() == [1.0] * 10
    else:
        with pytest.raises(remesh.CheckpointNotFoundError):
            remesh.Checkpoint(tmp_path / "c")


def test_save_async_gives_its_memory_back_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.01)
    group, storage = Alone(), MemoryStorage()
    for number in range(2):
        state = {"w": np.full(10, float(number))}
        remesh.save_async(state, storage, group=group, overwrite=True).result(240)
        saver = background._SAVERS[group]
        wait_until(lambda saver=saver: saver.num_arena_bytes == 0, "memory given back")  # type: ignore[misc]
    assert (remesh.Checkpoint(storage).read_array("w") == 1).all()
    assert saver.num_plans_reused == 1


def test_a_save_that_has_ended_keeps_nothing_of_the_state() -> None:
    array = np.ones(10)
    kept = weakref.ref(array)
    handle = remesh.save_async({"w": array}, MemoryStorage(), group=(group := Alone()))
    handle.result(240)
    del array
    wait_until(lambda: gc.collect() >= 0 and kept() is None, "end of the array")
    assert handle.progress().phase == "done"
    assert background._SAVERS[group].num_plans_reused == 0  # the saver lives on


def test_the_saver_of_a_group_ends_with_it() -> None:
    group = Alone()
    remesh.save_async({"w": np.ones(10)}, MemoryStorage(), group=group).result(240)
    kept = weakref.ref(background._SAVERS[group])
    del group
    wait_until(lambda: gc.collect() >= 0 and kept() is None, "end of the saver")


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_failure_while_several_files_are_staged_is_the_cause(
    writer: Literal["thread", "process"], tmp_path: Path
) -> None:
    """Frozen parameters have a file of their own, which is staged only in part."""
    frozen = torch.nn.Linear(2048, 2048, bias=False).requires_grad_(False)
    state = {"frozen": frozen, "w": torch.ones(600_000)}
    faults = FaultInjector().fail_at(0, "save.chunk_staged")
    with remesh.Saver(writer=writer, on_event=faults) as saver:
        handle = saver.save_async(state, tmp_path / "c")
        with pytest.raises(InjectedError):
            handle.result(240)
        with pytest.raises(InjectedError):
            saver.wait()
    assert not [path for path in (tmp_path / "c").rglob("*") if path.suffix == ".safetensors"]
