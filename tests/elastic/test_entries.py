"""`remesh.elastic.run` in one process: its agent is the test."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from remesh.elastic import TrainingJob, entries, run
from remesh.elastic.process_socket import (
    Instruction,
    Order,
    ProcessSockets,
    Report,
)
from remesh.errors import WorldChangedError
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

TIMEOUT = 10.0
"""How many seconds an agent waits for a process to leave (`--reentry-timeout`)."""


class Agent:
    """The agent of this process, which takes what the process says until it is closed."""

    def __init__(self, sockets: ProcessSockets) -> None:
        self._sockets = sockets
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._playing = threading.Thread(target=self._play)
        self._playing.start()

    def _play(self) -> None:
        while not self._is_over.wait(0.005):
            self.report()

    def close(self) -> None:
        """End when all that goes on beside the process has ended well."""
        for thread in self._threads:
            thread.join(60)
        self._is_over.set()
        self._playing.join()
        assert not any(thread.is_alive() for thread in self._threads)

    def beside(self, function: Callable[..., None], *args: object) -> None:
        """Call a function while the process goes on."""
        self._threads.append(threading.Thread(target=function, args=args))
        self._threads[-1].start()

    def report(self) -> Report | None:
        with self._lock:
            self._sockets.take()
            return self._sockets.report(0, os.getpid())

    def begin(self, order: Order) -> None:
        with self._lock:
            self._sockets.begin([0], Instruction(order))

    def send(self, order: Order) -> None:
        with self._lock:
            self._sockets.order([0], order)

    def wait_out(self, number: int) -> Report:
        """Wait until the process has left by an order."""
        found: list[Report] = []

        def is_out() -> bool:
            report = self.report()
            found[:] = [report] if report is not None else []
            return report is not None and report.is_out and report.number == number

        wait_until(is_out, "the process is out")
        return found[0]

    def change_world(self, number: int = 1, rank: str = "0") -> None:
        self.send(Order(number))
        self.wait_out(number)
        self.send(Order(number + 1, {"RANK": rank}))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for name in ("RANK", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with contextlib.closing(ProcessSockets(str(tmp_path), 1)) as sockets:
        monkeypatch.setenv("REMESH_AGENT_SOCKET", sockets.path_of(0))
        with contextlib.closing(Agent(sockets)) as made:
            yield made


def test_without_an_agent_the_function_is_called_once() -> None:
    calls = []

    def train(job: TrainingJob) -> str:
        calls.append(job.is_reentrant)
        return "done"

    assert run(train) == "done"
    assert calls == [False]


def test_the_function_is_entered_again_from_a_hang_in_python(agent: Agent) -> None:
    ranks, made = [], []

    def train(job: TrainingJob) -> int:
        job.keep("data", lambda: made.append(1))
        ranks.append(os.environ["RANK"])
        if job.entries == 0:
            agent.beside(agent.change_world, 1, "5")
            time.sleep(3600)
        return job.entries

    assert run(train) == 1
    assert ranks == ["0", "5"]
    assert made == [1]
    assert agent.report() is None  # nothing of it is left that an agent would go by


def test_a_process_that_missed_the_order_to_leave_leaves_before_it_enters(agent: Agent) -> None:
    ranks = []

    def train(job: TrainingJob) -> None:
        ranks.append(os.environ["RANK"])
        if job.entries == 0:
            agent.send(Order(2, {"RANK": "5"}))
            time.sleep(3600)

    run(train)
    assert ranks == ["0", "5"]


def test_a_process_may_call_run_again_after_a_change_of_the_world(agent: Agent) -> None:
    reports = []

    def train(_job: TrainingJob) -> str:
        reports.append(agent.report())
        if len(reports) in (1, 3):
            agent.beside(agent.change_world, len(reports), str(len(reports)))
            time.sleep(3600)
        return os.environ["RANK"]

    assert [run(train), run(train)] == ["1", "3"]
    assert reports[2] == Report(number=2)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a store, which refuses connections until it listens."""
    monkeypatch.setattr(entries, "STORE_SECONDS", 3600.0)
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def world_of_rank_1(store: socket.socket) -> dict[str, str]:
    address, port = store.getsockname()
    return {"RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def test_the_function_is_entered_when_rank_0_has_made_the_store(
    agent: Agent, store: socket.socket
) -> None:
    steps = []

    def may_enter() -> bool:
        report = agent.report()
        return report is not None and not report.is_out

    def play() -> None:
        assert agent.wait_out(0).error.startswith("RuntimeError: ")
        agent.send(Order(1, world_of_rank_1(store)))
        wait_until(may_enter, "it may enter")
        time.sleep(0.05)  # without waiting, it would be inside by now
        steps.append("listens")
        store.listen()

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            agent.beside(play)
            raise RuntimeError("[gloo] Connection closed by peer")
        steps.append("entered")

    run(train)
    assert steps == ["listens", "entered"]


def test_what_waits_for_the_store_of_a_rank_0_that_has_died_leaves_when_ordered(
    agent: Agent, store: socket.socket
) -> None:
    ranks = []

    def play() -> None:
        agent.wait_out(0)
        agent.send(Order(1, world_of_rank_1(store)))
        agent.change_world(2)

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            agent.beside(play)
            raise RuntimeError("[gloo] Connection closed by peer")
        ranks.append(os.environ["RANK"])

    run(train)
    assert ranks == ["0"]


def test_a_function_that_is_called_when_the_world_changes_waits_for_the_next(
    agent: Agent,
) -> None:
    ranks: list[str] = []

    def play() -> None:
        agent.wait_out(7)
        assert ranks == []
        agent.send(Order(8, {"RANK": "3"}))

    agent.begin(Order(7))
    agent.beside(play)
    run(lambda _job: ranks.append(os.environ["RANK"]))
    assert ranks == ["3"]


@pytest.mark.parametrize(
    ("error", "world_size"),
    [
        pytest.param(LookupError("no such sample"), "2", id="the user's"),
        # The only process has no peer that it could lose.
        pytest.param(ConnectionRefusedError("Connection refused"), "1", id="of one process"),
    ],
)
def test_an_error_of_the_user_ends_the_process(
    error: Exception, world_size: str, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_job: TrainingJob) -> None:
        raise error

    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(type(error), match=str(error)):
        run(train)
    assert agent.report() is None


def test_an_error_after_an_order_that_was_not_noticed_ends_no_process(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries._ReentrantRunner, "_listen", lambda _self: None)

    def play() -> None:
        agent.wait_out(1)
        agent.send(Order(2, {"RANK": "0"}))

    def train(job: TrainingJob) -> int:
        if job.entries == 0:
            agent.send(Order(1))
            agent.beside(play)
            raise LookupError("what a peer would have sent")
        return job.entries

    assert run(train) == 1


def test_a_change_ends_at_the_boundary_before_the_function_is_left(agent: Agent) -> None:
    reached = []

    def train(job: TrainingJob) -> None:
        if job.entries:
            return
        job.is_changing = True
        agent.beside(agent.change_world)
        wait_until(lambda: job.must_leave, "an order")
        reached.append("changed")
        job.end_change()
        reached.append("not left")

    run(train)
    assert reached == ["changed"]


def test_a_change_that_does_not_end_is_interrupted(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "CHANGE_SECONDS", 0.1)

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            job.is_changing = True
            agent.beside(agent.change_world)
            time.sleep(3600)

    run(train)


def test_the_job_knows_of_aborted_collectives_before_a_device_goes_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = []

    def train(job: TrainingJob) -> None:
        assert not job.is_aborted
        if job.entries:
            return
        monkeypatch.setattr(entries, "break_collectives", lambda _: known.append(job.is_aborted))
        agent.beside(agent.change_world)
        time.sleep(3600)

    run(train)
    assert all(known)
    assert known


def test_an_error_while_the_function_is_left_is_not_the_last_attempt(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def break_at_last(_port: int) -> int:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError(24, "Too many open files")
        return 0

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            agent.beside(agent.change_world)
            time.sleep(3600)

    monkeypatch.setattr(entries, "break_collectives", break_at_last)
    run(train)


def test_what_hangs_while_the_function_is_left_is_interrupted_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "RAISE_AGAIN_SECONDS", 0.2)

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            agent.beside(agent.change_world)
            try:
                time.sleep(3600)
            except WorldChangedError:
                time.sleep(3600)

    run(train)


class Slow(torch.utils.data.Dataset[int]):
    """Its first samples come at once, no other one ever does."""

    def __getitem__(self, place: int) -> int:
        if place > 1:
            time.sleep(3600)
        return place

    def __len__(self) -> int:
        return 100


def test_workers_in_the_midst_of_a_batch_do_not_keep_the_function_from_being_left(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    join = BaseProcess.join

    def noted(process: BaseProcess, timeout: float | None = None) -> None:
        waits.append(TIMEOUT if timeout is None else timeout)
        join(process, timeout)

    monkeypatch.setattr(BaseProcess, "join", noted)

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            samples = iter(torch.utils.data.DataLoader(Slow(), batch_size=None, num_workers=2))
            next(samples)
            next(samples)
            agent.beside(agent.change_world)
            next(samples)

    run(train)
    assert waits
    assert sum(waits) < TIMEOUT


def test_what_frees_an_object_is_not_interrupted(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    ended = []

    class Freed:
        def __init__(self, job: TrainingJob) -> None:
            self.job = job

        def __del__(self) -> None:
            wait_until(lambda: self.job.is_aborted, "the function is to be left")
            time.sleep(5 * entries.RETRY_SECONDS)  # an interruption comes meanwhile
            ended.append(self.job.entries)

    def train(job: TrainingJob) -> None:
        if job.entries == 0:
            freed = Freed(job)
            agent.beside(agent.change_world)
            del freed
            time.sleep(3600)

    run(train)
    assert ended == [0]
    assert not lost


def test_what_makes_the_function_be_left_does_not_meet_the_next_entry(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function ends by an error of its own while the other thread breaks its collectives."""
    breaks, left = threading.Event(), threading.Event()

    def break_slowly(_port: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            breaks.set()
            left.wait(1.0)  # longer than it takes to leave and to enter again
        return 0

    monkeypatch.setattr(entries, "break_collectives", break_slowly)

    def train(job: TrainingJob) -> int:
        if job.entries == 0:
            agent.beside(agent.change_world)
            breaks.wait(60)
            raise WorldChangedError("noticed")
        time.sleep(1.5)  # a signal that comes late would end this
        assert not job.must_leave
        return job.entries

    assert run(train) == 1


@pytest.mark.parametrize(
    ("given", "kept"), [(None, "0"), ("1", "0"), ("2", "0"), ("0", "0"), ("3", "3")]
)
def test_a_value_of_the_user_for_nccl_is_kept(
    given: str | None,
    kept: str,
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    assert run(lambda _job: os.environ[name]) == kept
    said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert bool(said) is (kept == "3")
    assert agent.report() is None


def test_only_the_main_thread_can_be_interrupted(agent: Agent) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            run(lambda _job: None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert agent.report() is None
