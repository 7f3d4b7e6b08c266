"""A rank fails anywhere in a save: every rank raises at once, and what was there is left alone.

Nothing is listed by hand that could be forgotten. The points are those that a save without faults
tells of, and the functions are those that it calls, in the order of their first calls.

No rank ends before all have an outcome, for the end of one would wake the others. Deadlines are an
hour, so a rank that is not told of a failure is still waiting when the test gives up.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
from obstore.store import MemoryStore

import remesh
from remesh.background.process import WriterProcess
from remesh.background.save import BackgroundSave
from remesh.background.writer import SaveWriter
from remesh.checkpoint import commit
from remesh.errors import RankFailedError
from remesh.events import Event
from remesh.exchange import Exchange, protocol
from remesh.storage import MemoryStorage, open_storage
from remesh.storage.object_store import ObjectStorage
from tests.engine.scenes import share_of, stored_value
from tests.support import (
    FaultInjector,
    InjectedError,
    Outcome,
    returned_values,
    run_ranks,
    run_ranks_outcomes,
)

WORLD_SIZE = 3
HOUR = 3600.0
LIMIT = 120.0


def state_of(rank: int, without: int, value: float) -> dict[str, Any]:
    """Some rows of a tensor, on all ranks but one, and a plain value."""
    holders = [each for each in range(WORLD_SIZE) if each != without]
    state: dict[str, Any] = {"step": value}
    if rank != without:
        whole = np.full((2 * len(holders), 5), value, dtype=np.float32)
        state["w"] = share_of("w", whole, holders.index(rank), len(holders))
    return state


def files_of(place: Any) -> list[str]:
    return open_storage(place).list()


def in_objects() -> ObjectStorage:
    """An object store, into which the files of ranks are uploaded in several parts."""
    return ObjectStorage("memory://x", MemoryStore(), part_bytes=100)


class Job:
    """Ranks that save again and again, with a fault that is chosen anew for each save.

    The kind is `sync`, or what writes in the background; one rank is without a tensor.
    """

    def __init__(self, place: Any, kind: Literal["sync", "thread", "process"], without: int):
        self.place = place
        self.kind = kind
        self.without = without
        self.faults = FaultInjector()
        self.value = 0.0
        self._start = threading.Barrier(WORLD_SIZE + 1)
        self._end = threading.Barrier(WORLD_SIZE + 1)
        self._errors: list[BaseException | None] = []
        self._is_over = False
        self._fault = ""

    def _rank(self, exchange: Exchange) -> None:
        saver = remesh.Saver(
            group=exchange,
            writer="process" if self.kind == "process" else "thread",
            deadline=HOUR,
            at_exit="abort",
            on_event=self._tell,
        )
        while True:
            self._start.wait(HOUR)
            if self._is_over:
                break
            self._errors[exchange.rank] = self._outcome(saver, exchange.rank)
            self._end.wait(LIMIT)
        with suppress(Exception):
            saver.close()

    def _tell(self, event: Event) -> None:
        self.faults(event)  # which it is changes from save to save

    def _outcome(self, saver: remesh.Saver, rank: int) -> BaseException | None:
        state = state_of(rank, self.without, self.value)
        try:
            if self.kind == "sync":
                saver.save(state, self.place, overwrite=True)
            else:
                handle = saver.save_async(state, self.place, overwrite=True)
                handle.result(LIMIT)
        except BaseException as error:  # noqa: BLE001 - it is the outcome
            with suppress(BaseException):
                saver.wait()
            return error
        saver.wait()
        return None

    def save(self) -> list[BaseException | None]:
        """One save; what each rank raised."""
        self.value += 1.0
        self._errors = [None] * WORLD_SIZE
        self._start.wait(LIMIT)
        try:
            self._end.wait(LIMIT)
        except threading.BrokenBarrierError:
            pytest.fail(f"a rank waits; fault {self._fault}, raised {self._errors}")
        return self._errors

    @contextmanager
    def running(self) -> Iterator[None]:
        """The ranks run; after a failure, too, they have ended when this has.

        Threads that go on would write their tracebacks while pytest writes its report. Both parse
        source code, and CPython cannot do that in two threads: one of them gets a `SystemError`,
        "AST constructor recursion depth mismatch", which ends pytest.
        """
        outcomes: list[Outcome[None]] = []
        ranks = threading.Thread(
            target=lambda: outcomes.extend(
                run_ranks_outcomes(WORLD_SIZE, self._rank, timeout=HOUR)
            ),
            daemon=True,
        )
        ranks.start()
        try:
            yield
            self._is_over = True
            self._start.wait(LIMIT)
            ranks.join(LIMIT)
            assert not ranks.is_alive()
            returned_values(outcomes)
        finally:
            self._start.abort()
            self._end.abort()
            ranks.join(LIMIT)

    def fails_everywhere(self, victim: int, what: str, *, may_commit: bool) -> None:
        """Save with a fault, and check what becomes of it; then save without."""
        before, files = self.value, files_of(self.place)
        self._fault = f"{what} on rank {victim}"
        errors = self.save()
        found = stored_value(self.place)
        if found == before:
            assert all(error is not None for error in errors), (what, victim, errors)
            # In the background ranks are told before the files are removed.
            assert self.kind != "sync" or files_of(self.place) == files, (what, victim)
        else:
            assert may_commit, (what, victim, errors)
            assert found == self.value
        assert errors[victim] is not None, (what, errors)
        if not may_commit:
            for rank, error in enumerate(errors):
                assert isinstance(error, InjectedError if rank == victim else RankFailedError)
                assert f"injected at {what} on rank {victim}" in str(error), (victim, error)
        for error in errors:
            assert not isinstance(error, TimeoutError), (what, victim, errors)
            assert "not come" not in str(error), (what, victim, errors)
        self.faults = FaultInjector()
        assert self.save() == [None] * WORLD_SIZE, (what, victim)
        assert stored_value(self.place) == self.value


@pytest.mark.parametrize(
    ("kind", "without", "make"),
    [
        ("sync", 0, None),
        ("sync", 2, None),
        ("sync", 2, in_objects),
        ("thread", 0, None),
        ("thread", 2, None),
        ("process", 2, None),
        pytest.param("process", 0, None, marks=pytest.mark.slow),
    ],
)
def test_a_failure_at_every_point_of_every_rank(
    kind: Literal["sync", "thread", "process"],
    without: int,
    make: Callable[[], Any] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(tmp_path / "c" if make is None else make(), kind, without)
    with job.running():
        assert job.save() == [None] * WORLD_SIZE
        points = sorted(set(job.faults.seen))
        assert {point for _, point in points} >= {"save.described", "save.committed", "save.done"}
        for victim, point in points:
            job.faults = FaultInjector().fail_at(victim, point)
            if point in {"save.committed", "save.done"}:
                caplog.clear()
                assert job.save() == [None] * WORLD_SIZE, (point, victim)
                assert stored_value(job.place) == job.value
                assert (
                    f"rank {victim}: the listener failed at {point}, after the commit"
                    in caplog.text
                )
                assert f"injected at {point} on rank {victim}" in caplog.text
            else:
                # What a listener raises reaches a writer process later than the moment.
                job.fails_everywhere(victim, point, may_commit=kind == "process")


@pytest.mark.parametrize("name", ["mkdir", "open"])
def test_a_rank_that_fails_removes_the_folder_in_which_another_makes_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has seen the folder, but has nothing in it yet; rank 0 removes its own file."""
    job = Job(tmp_path / "c", "sync", without=2)
    written, seen, removed = (threading.Event() for _ in range(3))
    call, rmdir = getattr(os, name), os.rmdir

    class Late(FaultInjector):
        def __call__(self, event: Event) -> None:
            if (event.rank, event.point) == (0, "save.chunk_written"):
                written.set()
                assert seen.wait(LIMIT)
            super().__call__(event)

    def meet_removal(path: Any, *args: Any, **options: Any) -> Any:
        is_late = is_rank(1) and "data-" in str(path) and not removed.is_set()
        assert not is_late or written.wait(LIMIT)
        try:
            if name == "mkdir":
                return call(path, *args, **options)  # fails if it is late: the folder is there
        finally:
            if is_late:
                seen.set()
                assert removed.wait(LIMIT)
        return call(path, *args, **options)

    def remove(path: Any) -> None:
        rmdir(path)
        removed.set()

    with job.running():
        assert job.save() == [None] * WORLD_SIZE
        monkeypatch.setattr(os, name, meet_removal)
        monkeypatch.setattr(os, "rmdir", remove)
        job.faults = Late().fail_at(0, "save.chunk_written")
        job.fails_everywhere(0, "save.chunk_written", may_commit=False)
        assert removed.is_set()


# ---------------------------------------------------------------------------------------------
# What the system refuses
# ---------------------------------------------------------------------------------------------


def is_rank(rank: int) -> bool:
    return threading.current_thread().name == f"rank {rank}"


Refusal = tuple[Any, str, Callable[..., bool], BaseException]
REFUSALS: dict[str, Refusal] = {
    "thread": (
        threading.Thread, "start", lambda thread: thread.name == "remesh-save",
        RuntimeError("can't start new thread")),
    "process": (subprocess, "Popen", lambda *_: True, OSError(errno.EAGAIN, "unavailable")),
    "descriptor": (socket, "socketpair", lambda *_: True, OSError(errno.EMFILE, "too many")),
    "interrupt": (
        BackgroundSave, "see", lambda _save, point, *_: point == "save.staged",
        KeyboardInterrupt()),
}  # fmt: skip
"""Of what: which function raises, for which arguments, and what."""


def refuse(patch: pytest.MonkeyPatch, what: str, victim: int) -> None:
    owner, name, is_meant, error = REFUSALS[what]
    call = getattr(owner, name)

    def refuse_or_call(*args: Any, **options: Any) -> Any:
        if is_rank(victim) and is_meant(*args):
            raise error
        return call(*args, **options)

    patch.setattr(owner, name, refuse_or_call)


@pytest.mark.parametrize("what", ["thread", "interrupt"])
@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_system_refuses(
    what: str, kind: Literal["thread", "process"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "c", kind, without=2)
    with job.running():
        assert job.save() == [None] * WORLD_SIZE
        for victim in range(WORLD_SIZE):
            with monkeypatch.context() as patch:
                refuse(patch, what, victim)
                before = job.value
                errors = job.save()
            assert all(error is not None for error in errors), (victim, errors)
            assert stored_value(job.place) == before
            assert len(list((tmp_path / "c").glob("data-*/*.safetensors"))) == 3
            assert job.save() == [None] * WORLD_SIZE


@pytest.mark.parametrize("victim", [0, 2])
def test_a_late_rank_leaves_nothing_of_a_save_that_was_given_up(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has removed all files when rank 1 creates its own."""
    job = Job(tmp_path / "c", "thread", without=2)
    given_up = threading.Event()
    write, give_up = SaveWriter._write, commit.give_up
    with job.running():
        assert job.save() == [None] * WORLD_SIZE

        def write_late(writer: SaveWriter) -> Any:
            if writer.task.rank == 1:
                assert given_up.wait(LIMIT)
            return write(writer)

        def note(*args: Any, **options: Any) -> None:
            give_up(*args, **options)
            given_up.set()

        with monkeypatch.context() as patch:
            patch.setattr(SaveWriter, "_write", write_late)
            patch.setattr(commit, "give_up", note)
            refuse(patch, "interrupt", victim)
            assert all(error is not None for error in job.save())
        assert len(list((tmp_path / "c").glob("data-*/*.safetensors"))) == 3
        assert job.save() == [None] * WORLD_SIZE


@pytest.mark.parametrize("what", ["process", pytest.param("descriptor", marks=pytest.mark.slow)])
def test_a_writer_process_that_cannot_be_replaced(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, victim = Job(tmp_path / "c", "process", without=2), 2
    with job.running():
        assert job.save() == [None] * WORLD_SIZE
        # All ranks look for another process then; only the victim gets none.
        with monkeypatch.context() as patch:
            refuse(patch, what, victim)
            is_lost = property(lambda _: True, lambda own, value: vars(own).update(is_lost=value))
            patch.setattr(WriterProcess, "is_lost", is_lost, raising=False)
            errors = job.save()
        assert all(error is not None for error in errors), errors
        assert isinstance(errors[victim], OSError)
        assert job.save() == [None] * WORLD_SIZE


@pytest.mark.parametrize("canceller", [1, 2], ids=["with a file", "without a file"])
def test_a_cancelled_rank_cancels_the_save(canceller: int, tmp_path: Path) -> None:
    written = threading.Event()

    def hold(event: Event) -> None:
        if event.point == "save.file_finished":
            assert written.wait(LIMIT)

    def train(exchange: Exchange) -> BaseException:
        saver = remesh.Saver(group=exchange, deadline=HOUR, at_exit="abort", on_event=hold)
        handle = saver.save_async(state_of(exchange.rank, 2, 1.0), tmp_path / "c")
        if exchange.rank == canceller:
            assert handle.cancel()
            written.set()
        with pytest.raises((CancelledError, RankFailedError)) as caught:
            handle.result(LIMIT)
        assert handle.cancel() is handle.cancelled() is (exchange.rank == canceller)
        exchange.all_gather(b"")
        return caught.value

    others = run_ranks(WORLD_SIZE, train)
    assert isinstance(others.pop(canceller), CancelledError)
    for error in others:
        assert "CancelledError" in str(error)
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.Checkpoint(tmp_path / "c")


# ---------------------------------------------------------------------------------------------
# Every function
# ---------------------------------------------------------------------------------------------

STEPS = {BackgroundSave.stage.__code__, SaveWriter.save.__code__}
"""What a failure cannot leave unnoticed, beside the blocks of outcomes; everything that may fail is
called in one of them."""

BLOCKS = threading.local()
"""How many blocks of outcomes (`depth`) a thread is in."""

TOLD_BY = ("remesh.exchange.", "remesh.events", "tests.support.")
"""Modules whose functions are what failures are made and told with."""

TELLS = ("StagedChunks.end", "SaveWriter.end_staging")
"""How the names of the functions end that tell the background thread of a failure."""


class Calls:
    """Sees the functions of remesh that a rank calls, and raises at one of them, if any."""

    def __init__(self, victim: int, at: str | None) -> None:
        self.seen: dict[str, None] = {}
        self._victim = victim
        self._at = at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("remesh."):
            return
        name = f"{module}:{frame.f_code.co_qualname}"
        if name in self.seen or module.startswith(TOLD_BY) or name.endswith(TELLS):
            return
        if not self._is_in_a_step(frame):
            return
        self.seen[name] = None
        if name == self._at:
            raise MemoryError(name)

    def _is_in_a_step(self, frame: FrameType) -> bool:
        """Whether a step of the rank calls this."""
        if getattr(BLOCKS, "depth", 0) and is_rank(self._victim):
            return True
        above = frame.f_back
        while above is not None:
            if above.f_code in STEPS:
                if above.f_code is SaveWriter.save.__code__:
                    return bool(above.f_locals["self"].task.rank == self._victim)
                return is_rank(self._victim)
            above = above.f_back
        return False


class _OneAtATime:
    """`sys` for the module `threading`, where one thread at a time may call `settrace`.

    Where an audit hook is written in Python, as those of other tests are, CPython may switch
    threads within the call, and it refuses a second one meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def settrace(self, function: Calls | None) -> None:
        with self._lock:
            sys.settrace(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@contextmanager
def watched_blocks() -> Iterator[None]:
    """Keep `BLOCKS` while this is entered."""
    leave = protocol.Outcome.__exit__

    def enter_watched(outcome: protocol.Outcome) -> protocol.Outcome:
        BLOCKS.depth = getattr(BLOCKS, "depth", 0) + 1
        return outcome

    def leave_watched(*arguments: Any) -> bool:
        BLOCKS.depth -= 1
        return leave(*arguments)

    with (
        patch.object(protocol.Outcome, "__enter__", enter_watched),
        patch.object(protocol.Outcome, "__exit__", leave_watched),
    ):
        yield


def save_traced(
    kind: Literal["sync", "thread"], calls: Calls, storage: MemoryStorage, value: float
) -> list[BaseException | None]:
    """A save of new ranks under the eyes of `calls`; what each raised."""
    job = Job(storage, kind, without=1)
    job.value = value - 1.0
    threading.settrace(calls)
    try:
        with patch.object(threading, "_sys", _OneAtATime()), watched_blocks(), job.running():
            return job.save()
    finally:
        threading.settrace(None)


def fail_in_functions(kind: Literal["sync", "thread"], victim: int, every: int) -> int:
    """Let a rank fail in the first, the `every`-th, ... function of a save; how many failed."""
    storage = MemoryStorage()
    look = Calls(victim, None)
    assert save_traced(kind, look, storage, 0.0) == [None] * WORLD_SIZE
    num_failed = 0
    for number, name in enumerate(list(look.seen)[::every], start=1):
        before = stored_value(storage)
        calls = Calls(victim, name)
        errors = save_traced(kind, calls, storage, float(number))
        # What is called only while a rank waits is not called each time.
        num_failed += name in calls.seen
        if name in calls.seen and stored_value(storage) == before:
            assert all(error is not None for error in errors), (name, errors)
        for error in errors:
            assert not isinstance(error, TimeoutError), (name, errors)
            assert "not come" not in str(error), (name, errors)
    return num_failed


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["sync", "thread"])
def test_a_failure_in_some_functions(kind: Literal["sync", "thread"], victim: int) -> None:
    assert fail_in_functions(kind, victim, every=10) > 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["sync", "thread"])
def test_a_failure_in_every_function(kind: Literal["sync", "thread"], victim: int) -> None:
    assert fail_in_functions(kind, victim, every=1) > 50
