"""The stacks of another process, with and without py-spy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remesh.elastic import stacks

PROGRAM = """
import sys, time
from remesh.training.policies import save_policies, OnSignals
from remesh.training.watch import Watch
import signal

def hangs_here():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(600)

every = (OnSignals((signal.SIGUSR2,)),) if sys.argv[2] == "taken" else ()
Watch(every, sys.argv[1])
hangs_here()
"""


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_by_py_spy", lambda _pid: ("", "py-spy is not installed"))
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 60.0)  # it answers, at once or later


def stacks_of_hanging(file: Path, how: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(file), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            text = stacks.stacks_of(process.pid, file)
            assert process.poll() is None, "the request has ended the process"
            return text
        finally:
            process.kill()


@pytest.mark.usefixtures("without_py_spy")
def test_a_training_process_writes_its_own(tmp_path: Path) -> None:
    assert "hangs_here" in stacks_of_hanging(tmp_path / "0.json", "free")


@pytest.mark.usefixtures("without_py_spy")
def test_one_whose_signal_is_taken_is_not_asked(tmp_path: Path) -> None:
    text = stacks_of_hanging(tmp_path / "0.json", "taken")
    assert text == ("no stacks: py-spy is not installed; the process does not write them itself")
