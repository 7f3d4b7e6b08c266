"""Processes as torchrun starts them: what they are told, what they write, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from remesh.elastic.process_socket import ProcessSockets
from remesh.elastic.processes import Process, Processes, message_of, tail_of
from remesh.elastic.warm import Warm
from tests.support.torch_versions import needs
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts two processes of a shell command."""
    made: list[Processes] = []
    sockets = ProcessSockets(str(tmp_path), 2)

    def start(script: str, **options: Any) -> Processes:
        logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL, tee=Std.ALL)
        config = LaunchConfig(1, 1, 2, logs_specs=logs)
        for name, value in {"shutdown_timeout": 60, **options}.items():
            setattr(config, name, value)  # older versions of torch have no such options
        command = ["sh", "-c", script]
        warm = Warm((), str(tmp_path), command)
        made.append(Processes(config, command, sockets=sockets, warm=warm))
        made[0].start((0, 1), {rank: {"RANK": str(rank + 4)} for rank in (0, 1)})
        return made[0]

    with contextlib.closing(sockets):
        yield start
        for processes in made:
            processes.end_all(signal.SIGKILL)


def ended(processes: Processes) -> list[str]:
    """What the processes have written, when they have ended."""
    wait_until(lambda: not processes.living, "the end of the processes")
    return [tail_of(processes.logs(rank)) for rank in (0, 1)]


def test_a_process_that_sees_one_gpu_has_a_socket_of_its_own(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    tells = 'echo "$LOCAL_RANK $CUDA_VISIBLE_DEVICES $REMESH_AGENT_SOCKET ${local_rank}"'
    texts = ended(started(tells, virtual_local_rank=True))
    assert texts == [f"0 3 {tmp_path}/0.socket 0", f"0 5 {tmp_path}/1.socket 1"]


def test_what_the_agent_ends_has_not_failed(started: Any) -> None:
    processes = started('[ "$RANK" = 4 ] && exit 3; sleep 1000')
    wait_until(lambda: processes.living.keys() == {1}, "the end of the first")
    processes.end([1], signal.SIGTERM)
    ended(processes)
    assert {rank: one.exitcode for rank, one in processes.failed.items()} == {0: 3}


def test_what_handles_a_signal_of_the_agent_has_not_failed(started: Any) -> None:
    processes = started("trap 'exit 143' TERM; echo up; while :; do sleep 0.01; done")
    wait_until(lambda: all(tail_of(processes.logs(rank)) for rank in (0, 1)), "their traps")
    processes.end([0, 1], signal.SIGTERM)
    ended(processes)
    assert processes.failed == {}


def test_a_death_just_before_the_signal_is_a_failure() -> None:
    ended = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
    process = Process(ended)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    process.send(signal.SIGTERM)
    assert process.poll() == 3
    assert process.failure is not None


def test_what_is_left_of_a_process_is_killed_without_its_variables(started: Any) -> None:
    processes = started("env -i sleep 1000 & echo $!; exit 1")
    helpers = [int(text) for text in ended(processes)]
    assert all(is_alive(pid) for pid in helpers)
    processes.end_started([0, 1])
    wait_until(lambda: not any(is_alive(pid) for pid in helpers), "their end")


@needs("filtered output")
def test_what_processes_write_is_shown_and_parts_of_it_are_copied(
    started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = started(
        "echo found; echo lost; echo bad >&2",
        duplicate_stdout_filters=["found"],
        log_line_prefix_template="<${rank}>",
    )
    ended(processes)
    processes.end_all(signal.SIGTERM)
    shown = capsys.readouterr()
    assert sorted(shown.out.split()) == ["<4>found", "<4>lost", "<5>found", "<5>lost"]
    assert sorted(shown.err.split()) == ["<4>bad", "<5>bad"]
    (copy,) = tmp_path.rglob("filtered_stdout.log")
    assert sorted(copy.read_text().split()) == ["<4>found", "<5>found"]


def test_no_log_is_shown_any_longer_if_the_next_process_cannot_start(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = threading.active_count()
    processes = started("true")
    ended(processes)

    def fail(*_arguments: object, **_options: object) -> None:
        raise BlockingIOError("there are too many processes")

    monkeypatch.setattr("remesh.elastic.processes.subprocess.Popen", fail)
    with pytest.raises(BlockingIOError):
        processes.start((0, 1), {rank: {"RANK": str(rank)} for rank in (0, 1)})
    assert threading.active_count() == num_threads  # each would keep the agent from ending


def test_a_message_with_half_of_a_character_can_be_sent(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text('{"message": "it is \\ud83d"}')
    failure = ProcessFailure(0, 1, 1, str(file))
    assert message_of(failure) == "it is ?"
