"""The stacks of another process, with and without py-spy."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.elastic import stacks
from remesh.elastic.stacks import Stacks

PROGRAM = """
import sys, time
from remesh.training.policies import save_policies, OnSignals
from remesh.training.watch import Watch
import signal

def hangs_here():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(600)

if sys.argv[2] == "wrapper":
    open(sys.argv[1] + ".stacks", "w").close()
    hangs_here()
every = (OnSignals((signal.SIGUSR2,)),) if sys.argv[2] == "taken" else ()
Watch(every, sys.argv[1])
hangs_here()
"""


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_by_py_spy", lambda _pid: ("", "py-spy is not installed"))
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 60.0)  # it answers, at once or later


@contextlib.contextmanager
def hanging(file: Path, how: str = "free") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PROGRAM, str(file), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def take(process: subprocess.Popen[bytes], file: Path) -> str:
    return Stacks({7: (process.pid, str(file))}).take()[7]


@pytest.mark.usefixtures("without_py_spy")
def test_a_training_process_writes_its_own(tmp_path: Path) -> None:
    file = tmp_path / "0.json"
    with hanging(file) as process:
        assert "hangs_here" in take(process, file)
        assert process.poll() is None


@pytest.mark.usefixtures("without_py_spy")
def test_one_without_a_handler_is_not_asked(tmp_path: Path) -> None:
    file = tmp_path / "0.json"
    text = "no stacks: py-spy is not installed; the process does not write them itself"
    with hanging(file, "taken") as process:
        assert take(process, file) == text
    # As of a wrapper script whose child has the handler and has made the file.
    with hanging(file, "wrapper") as process:
        assert take(process, file) == text
        assert process.poll() is None, "the request has ended the process"


def test_all_processes_are_looked_at_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)

    def slow(pid: int) -> tuple[str, str]:
        together.wait(120)
        return f"stacks of {pid}", ""

    monkeypatch.setattr(stacks, "_by_py_spy", slow)
    with contextlib.ExitStack() as stack:
        pids = {
            rank: stack.enter_context(hanging(tmp_path / f"{rank}.json")).pid for rank in range(3)
        }
        wanted = {rank: (pid, str(tmp_path / f"{rank}.json")) for rank, pid in pids.items()}
        assert Stacks(wanted).take() == {rank: f"stacks of {pid}" for rank, pid in pids.items()}


def test_one_that_ends_meanwhile_is_not_confused_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "0.json"
    with hanging(file) as process:

        def end(_pid: int) -> tuple[str, str]:
            process.kill()
            process.wait()  # from now on its id may be that of another process
            return "stacks of another process", ""

        monkeypatch.setattr(stacks, "_by_py_spy", end)
        assert take(process, file) == "no stacks: the process has ended"
