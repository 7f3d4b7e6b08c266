"""No process of a run survives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from remesh.demo import launch
from remesh.demo.config import Kind, Layout, RunSpec, TrainConfig
from remesh.demo.messages import Message, SaveBegun, StepDone


def speaks_and_ends(connection: Connection, code: int) -> None:
    connection.send(StepDone(1, 2.5))
    connection.send(SaveBegun(1))
    connection.close()
    os._exit(code)


def hangs(connection: Connection) -> None:
    connection.send(SaveBegun(7))
    time.sleep(600)


def ignores_requests_to_end(connection: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send(SaveBegun(7))
    time.sleep(600)


def waits(*_arguments: object) -> None:
    time.sleep(600)


def start(target: object, *args: object) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    with sender:
        process = context.Process(target=target, args=(sender, *args))  # type: ignore[arg-type]
        process.start()
    return process, receiver


def watch(*started: tuple[ForkServerProcess, Connection]) -> list[tuple[int, Message]]:
    heard: list[tuple[int, Message]] = []
    launch._watch(
        [process for process, _ in started],
        [connection for _, connection in started],
        lambda rank, message: heard.append((rank, message)),
    )
    return heard


def test_all_messages_are_heard_before_the_end() -> None:
    heard = watch(start(speaks_and_ends, 0), start(speaks_and_ends, 0))
    for rank in range(2):
        assert [m for r, m in heard if r == rank] == [StepDone(1, 2.5), SaveBegun(1)]


def test_those_that_hang_after_a_failure_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LEAVE_LIMIT", 0.2)
    failing, hanging = start(speaks_and_ends, 3), start(hangs)
    heard = watch(failing, hanging)
    assert (0, StepDone(1, 2.5)) in heard
    stopped = launch._stop([failing[0], hanging[0]])
    assert stopped == {hanging[0]}
    assert failing[0].exitcode == 3
    assert hanging[0].exitcode == -signal.SIGTERM


def test_a_silent_run_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    process, connection = start(hangs)
    # By this clock the run begins, waits for a word, hears it, and waits in vain for another.
    clock = iter([0.0, 0.0, 0.0, launch.SILENCE_LIMIT])
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=clock.__next__))
    assert watch((process, connection)) == [(0, SaveBegun(7))]
    assert launch._stop([process]) == {process}


def test_what_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_LIMIT", 0.2)
    process, connection = start(ignores_requests_to_end)
    assert connection.recv() == SaveBegun(7)
    assert launch._stop([process]) == {process}
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("ctrl_c")
def test_a_process_that_ctrl_c_meets_while_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, started = ForkServerProcess.start, []

    def start_and_be_interrupted(process: ForkServerProcess) -> None:
        begin(process)
        started.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "_enter", waits)
    monkeypatch.setattr(ForkServerProcess, "start", start_and_be_interrupted)
    context = launch.prepare()
    spec = RunSpec(name="B", purpose="", layout=Layout(Kind.FSDP2, 3), train=TrainConfig())
    with pytest.raises(KeyboardInterrupt):
        launch.run(context, spec, tmp_path, lambda _rank, _message: None)
    assert [process.exitcode for process in started] == [-signal.SIGTERM]
