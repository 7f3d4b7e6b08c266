"""What a process and its agent say to each other through the socket of the process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.elastic import process_socket
from remesh.elastic.directories import SOCKETS, agent_directory
from remesh.elastic.process_socket import (
    MAX_WAITING,
    AgentConnection,
    Instruction,
    Observation,
    Order,
    ProcessSockets,
    Report,
    connect,
)
from remesh.elastic.progress import RankProgress

OWN = os.getpid()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[ProcessSockets]:
    directory = tmp_path / ("with a long path, as directories for temporary files may have" * 2)
    directory.mkdir()
    with contextlib.closing(ProcessSockets(str(directory), 2)) as made:
        yield made


@contextlib.contextmanager
def connected(sockets: ProcessSockets, rank: int = 0) -> Iterator[AgentConnection]:
    with contextlib.closing(AgentConnection(sockets.path_of(rank))) as process:
        sockets.take()
        yield process


def progress(step: int) -> Observation:
    return Observation(progress=RankProgress(step=step, time=1.5e9))


def test_the_newest_of_what_each_process_says_counts(sockets: ProcessSockets) -> None:
    with connected(sockets, 1) as one, connected(sockets, 1) as other:
        for step in (7, 8):
            one.say(progress(step))
        other.say(Observation(report=Report(number=3, is_out=True)))
        sockets.take()
        assert {rank: said.step for rank, said in sockets.progress().items()} == {1: 8}
        assert sockets.report(1, OWN) == Report(number=3, is_out=True)
        assert sockets.report(1, OWN + 1) is None
        other.close()
        sockets.take()
        assert sockets.report(1, OWN) is None  # it is not entered again
    assert sockets.progress()[1].step == 8


def test_every_connection_begins_with_the_newest_instruction(sockets: ProcessSockets) -> None:
    with connected(sockets) as early:
        assert early.look() == Instruction()
        sockets.request("hold")
        sockets.order([0], Order(1))
        assert early.look() == Instruction(Order(1), "hold")
        enter = Order(2, {"RANK": "3"})
        early.say(progress(7))
        sockets.take()
        sockets.order([0], enter)
        assert sockets.progress() == {}  # it has made no step in the new world
        with connected(sockets) as late, connected(sockets, 1) as other:
            assert early.look() == late.look() == Instruction(enter)
            assert other.look() == Instruction(request="hold")
            sockets.request(None)
            assert other.look() == Instruction()


def test_no_side_waits_for_one_that_reads_nothing(sockets: ProcessSockets) -> None:
    with connected(sockets) as process:
        for number in range(1, 2000):
            process.say(progress(number))
            sockets.order([0], Order(number))
        sockets.take()
        assert 0 < sockets.progress()[0].step < 1999
        process.say(progress(2000))
        assert process.look() is not None
        sockets.take()  # there is room for what was not sent
        assert process.look() == Instruction(Order(1999))
        assert sockets.progress()[0].step == 2000


def test_a_process_that_waits_wakes_up(sockets: ProcessSockets) -> None:
    with connected(sockets) as process:
        process.look()
        later = threading.Timer(0.05, sockets.order, [[0], Order(1)])
        later.start()
        assert process.look(60.0) == Instruction(Order(1))
        later.join()
        ends = threading.Timer(0.05, process.end)
        ends.start()
        process.look(60.0)
        ends.join()


def test_what_is_said_last_is_heard_of_a_process_that_has_read_nothing(
    sockets: ProcessSockets,
) -> None:
    with connect(sockets.path_of(0)) as process:
        sockets.take()  # sends it an instruction
        process.send(b'{"progress":{"step":3,"time":1.0}}')
    sockets.take()
    assert sockets.progress()[0].step == 3


def test_what_is_no_observation_ends_the_connection(sockets: ProcessSockets) -> None:
    with connect(sockets.path_of(0)) as stranger:
        sockets.take()
        stranger.send(b'{"progress": 1}')
        sockets.take()
        stranger.recv(100)
        assert stranger.recv(100) == b""


def test_a_process_in_whose_place_another_starts_learns_that_its_agent_is_lost(
    sockets: ProcessSockets,
) -> None:
    with connected(sockets) as process, connected(sockets, 1) as other:
        process.say(progress(7))
        sockets.begin([0], Instruction(Order(1)))
        process.look()
        other.look()
        assert (process.is_lost, other.is_lost) == (True, False)
        assert sockets.progress() == {}


def test_the_end_of_an_agent_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "another directory under this path, as in a container"
    other.mkdir()
    assert not AgentConnection("").is_lost
    with agent_directory(str(tmp_path), SOCKETS) as directory:
        unseen = str(other / Path(directory).name / "0.socket")
        assert not AgentConnection(unseen).is_lost
        assert "the agent cannot be reached" in caplog.text
        sockets = ProcessSockets(directory, 1)
        path = sockets.path_of(0)
        with connected(sockets) as process:

            def seen() -> tuple[bool, bool]:
                process.look()
                return process.is_open, process.is_lost

            assert seen() == (True, False)
            sockets.close()
            assert seen() == (True, True)
        assert AgentConnection(path).is_lost  # it has died, and its directory is there
        os.unlink(path)
        assert not AgentConnection(path).is_lost  # the file alone says nothing
    assert AgentConnection(path).is_lost
    assert not AgentConnection(unseen).is_lost


@pytest.mark.parametrize("ends_in_fork", [False, True])
def test_a_fork_that_has_the_connection_neither_hides_its_end_nor_makes_it(
    sockets: ProcessSockets, monkeypatch: pytest.MonkeyPatch, ends_in_fork: bool
) -> None:
    with connected(sockets) as process:
        process.say(Observation(report=Report()))
        sockets.take()
        copy = os.dup(process._socket.fileno())  # type: ignore[union-attr] # as a fork has it
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: OWN + ends_in_fork)
                process.close()
            sockets.take()
            assert (sockets.report(0, OWN) is not None) == ends_in_fork
        finally:
            os.close(copy)


def test_an_agent_without_descriptors_accepts_later(
    sockets: ProcessSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_listener: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with contextlib.closing(AgentConnection(sockets.path_of(0))) as process:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", fail)
            sockets.take()
        assert process.look() is None
        sockets.take()
        assert process.look() == Instruction()


def test_a_process_waits_also_if_it_can_open_no_more_files(sockets: ProcessSockets) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(sockets) as process:
        process.look()
        later = threading.Timer(0.05, sockets.order, [[0], Order(1)])
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            later.start()
            assert process.look(60.0) == Instruction(Order(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        later.join()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_connection_waits_until_the_agent_has_taken_others(
    sockets: ProcessSockets, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    monkeypatch.setattr(process_socket, "CONNECT_SECONDS", 60 if is_taken else 1)
    with contextlib.ExitStack() as others:
        for _ in range(MAX_WAITING + 1):
            others.enter_context(connect(sockets.path_of(0)))
        if is_taken:
            former = signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
            interrupts = threading.Timer(
                0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1]
            )
            takes = threading.Timer(0.3, sockets.take)
            for timer in (interrupts, takes):
                timer.start()
            with connect(sockets.path_of(0)) as one:
                assert one.getpeername()
            for timer in (interrupts, takes):
                timer.join()
            signal.signal(signal.SIGUSR1, former)
        else:
            with pytest.raises(BlockingIOError):
                connect(sockets.path_of(0))
