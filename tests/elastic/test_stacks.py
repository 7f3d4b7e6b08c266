"""The stacks of processes, which they write themselves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.elastic import stacks
from remesh.elastic.process_socket import ProcessSockets
from remesh.elastic.stacks import stacks_file, take_stacks
from remesh.errors import StorageError

PROGRAM = """
import sys, threading, time
from remesh.training.policies import OnSignals
from remesh.training.watch import Watch
import signal

def waits_here():
    time.sleep(600)

def hangs_here():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(600)

if sys.argv[2] == "wrapper":
    open(sys.argv[1] + ".stacks", "w").close()
    hangs_here()
every = (OnSignals((signal.SIGUSR2,)),) if sys.argv[2] == "taken" else ()
watch = Watch(every, sys.argv[1])
threading.Thread(target=waits_here, daemon=True).start()
hangs_here()
"""


@contextlib.contextmanager
def hanging(path: str, how: str = "free") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PROGRAM, path, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[ProcessSockets]:
    with contextlib.closing(ProcessSockets(str(tmp_path), 3)) as made:
        yield made


def test_processes_are_asked_and_write_what_they_do(
    sockets: ProcessSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 5.0)
    paths = [sockets.path_of(rank) for rank in range(3)]
    # The last is as a wrapper script whose child has the handler and has made the file.
    with (
        hanging(paths[0]) as free,
        hanging(paths[1], "taken") as taken,
        hanging(paths[2], "wrapper") as wrapper,
    ):
        processes = (free, taken, wrapper)
        asked = {
            7 + rank: (process.pid, stacks_file(paths[rank]))
            for rank, process in enumerate(processes)
        }
        found = take_stacks(asked)
        of_all_threads = found.pop(7)
        assert "hangs_here" in of_all_threads
        assert "waits_here" in of_all_threads
        assert found == dict.fromkeys((8, 9), "no stacks: the process does not write them")
        assert [process.poll() for process in processes] == [None] * 3
        free.kill()
        free.wait()
        monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.0)
        assert "no stacks" in take_stacks({7: asked[7]})[7]


def run_python(program: str, path: Path) -> str:
    """What a program prints in an interpreter of its own, where signals may be set at will."""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "take",
    [
        "signal.signal(signal.SIGUSR2, lambda *_: print('mine'))",
        "faulthandler.register(signal.SIGUSR2, sys.stdout)",
    ],
)
def test_a_handler_that_is_there_is_left_alone(tmp_path: Path, take: str) -> None:
    program = f"""
import faulthandler, os, signal, sys
from remesh.elastic.stacks import answer_stack_requests, stacks_file
{take}
assert answer_stack_requests(sys.argv[1]) is None
assert not stacks_file(sys.argv[1]).exists()
os.kill(os.getpid(), signal.SIGUSR2)
"""
    said = run_python(program, tmp_path / "0.socket")
    assert "mine" in said or "<module>" in said


def test_a_handler_that_comes_later_is_kept(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from remesh.elastic.stacks import answer_stack_requests, stacks_file
end = answer_stack_requests(sys.argv[1])
assert stacks_file(sys.argv[1]).exists()
signal.signal(signal.SIGUSR2, lambda *_: print('mine'))
end()
assert not stacks_file(sys.argv[1]).exists()
os.kill(os.getpid(), signal.SIGUSR2)
"""
    assert run_python(program, tmp_path / "0.socket") == "mine\n"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*0\.socket\.stacks"):
        stacks.answer_stack_requests(str(tmp_path / "none" / "0.socket"))
