"""Training processes end with their agent, also those that a wrapper script has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.elastic import child, guard
from remesh.elastic.directories import SOCKETS
from tests.elastic.cluster import REMESH, kill
from tests.elastic.zygote import Command
from tests.waiting import is_alive, wait_until

ORPHAN = Path(__file__).with_name("orphan.py")


@pytest.mark.parametrize("wrapper", ["sleep 1000 & echo $!; wait", "sleep 1000 & echo $!; exit"])
@pytest.mark.parametrize("apart", ["", "setsid", "set -m;"])
def test_the_guard_kills_all_but_what_is_to_outlive_the_training(
    tmp_path: Path, wrapper: str, apart: str
) -> None:
    beats = str(tmp_path)
    own = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), "", ""]
    script = f"env -u REMESH_AGENT_SOCKET sleep 1000 & echo $!; {apart} {wrapper}"
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, beats], stdin=subprocess.PIPE
    )
    training = subprocess.Popen(
        [*own, "bash", "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"REMESH_AGENT_SOCKET": f"{beats}/0.socket"},
        start_new_session=True,
        text=True,
    )
    assert training.stdout is not None
    outlives, within = (int(training.stdout.readline()) for _ in range(2))
    try:
        for pid in (outlives, within):
            words = Path(f"/proc/{pid}/cmdline")
            wait_until(lambda file=words: file.read_bytes().startswith(b"sleep"), "it sleeps")  # type: ignore[misc]
        assert watching.poll() is None
        watching.communicate()  # closes the pipe, as the end of the agent does
        assert not is_alive(within)
        assert is_alive(outlives)
    finally:
        for pid in (outlives, within):
            kill(pid)
        training.kill()
        training.communicate()


def test_the_process_that_writes_a_checkpoint_outlives_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMESH_AGENT_SOCKET", str(tmp_path / "agent" / "0.socket"))
    with remesh.Saver(writer="process") as saver:
        handle = saver.save_async({"w": np.zeros(3)}, tmp_path / "saved")
        assert saver.writer_process_id is not None
        within = subprocess.Popen(["sleep", "1000"])
        shown = Path(f"/proc/{within.pid}/environ")
        wait_until(lambda: b"REMESH_AGENT_SOCKET" in shown.read_bytes(), "its environment")
        assert guard.kill(str(tmp_path / "agent"), 60) == []
        assert within.wait(60) == -signal.SIGKILL
        assert is_alive(saver.writer_process_id)
        handle.result(timeout=120)


def test_a_process_that_still_gives_its_memory_back_has_not_ended(tmp_path: Path) -> None:
    # The kernel takes the environment away first, by which the guard finds processes, then closes
    # files; this one takes long.
    own = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), "", ""]
    hold = "os.posix_fallocate(os.memfd_create('held'), 0, 512 << 20)"
    script = f"import os; {hold}; print(flush=True); input()"
    training = subprocess.Popen(
        [*own, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"REMESH_AGENT_SOCKET": str(tmp_path / "0.socket")},
        start_new_session=True,
    )
    assert training.stdout is not None
    try:
        training.stdout.readline()
        assert guard.kill(str(tmp_path), 60) == []
        assert not is_alive(training.pid)
    finally:
        training.kill()
        training.communicate()


@contextlib.contextmanager
def run_wrapper(directory: Path, script: str, processes: int) -> Iterator[Command]:
    """An agent whose processes are those of a wrapper script; at the end, none of them lives."""
    wrapper = directory / "wrapper.sh"
    wrapper.write_text(f"#!/bin/bash\n{script}\n")
    wrapper.chmod(0o755)
    agent = Command(
        [*REMESH, "run", "--nproc-per-node", str(processes), "--no-python", str(wrapper)],
        directory / "output",
        environment={"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(directory)},
        directory=directory,
    )
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()
        for file in directory.glob("pid-?"):
            kill(int(file.read_text()))


def test_what_wrapper_scripts_started_ends_with_a_killed_agent(tmp_path: Path) -> None:
    # The environment of rank 1 is hidden, so it has to notice by itself.
    train = f'"{sys.executable}" "{ORPHAN}" "{tmp_path}"'
    script = f'[ "$RANK" = 0 ] || apart="setsid --wait"\n$apart {train}\necho ended'
    with run_wrapper(tmp_path, script, 2) as agent:
        files = [tmp_path / "pid-0", tmp_path / "pid-1"]
        wait_until(lambda: all(file.exists() for file in files), "both processes")
        pids = [int(file.read_text()) for file in files]
        agent.kill()
        agent.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "the end of both processes")
        assert (tmp_path / "noticed").exists()


TWICE = """
import os, signal, sys
from pathlib import Path
from tests.waiting import is_alive, wait_until

directory, world = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first = directory / "pid-0"
if os.environ["RANK"] == "1":
    wait_until(Path(directory, f"pid-{world}").exists, "the training of rank 0")
    sys.exit(1 - world)
if world:
    (directory / "outlived").write_text(str(is_alive(int(first.read_text()))))
new = directory / "new"
new.write_text(str(os.getpid()))
new.rename(directory / f"pid-{world}")
while world == 0:
    signal.pause()
"""
"""Rank 1 fails once, while rank 0 trains; rank 0 says whether that of the world before it lives."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("apart", ["setsid --wait {}", "set -m; {} & wait $!"])
def test_a_training_in_a_session_of_its_own_ends_before_the_next_begins(
    tmp_path: Path, apart: str
) -> None:
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    train = apart.format(f'"{sys.executable}" "{script}" "{tmp_path}"')
    with run_wrapper(tmp_path, train, 2) as agent:
        assert agent.wait(500) == 0, (tmp_path / "output").read_text()
        assert (tmp_path / "outlived").read_text() == "False"


def test_what_makes_its_manager_after_the_end_of_its_agent_ends_too(tmp_path: Path) -> None:
    # The wrapper ends, and its agent with it, when the training runs, in a session of its own and
    # with an environment that is hidden.
    (tmp_path / f"{SOCKETS}abandoned").mkdir()
    train = f'setsid "{sys.executable}" "{ORPHAN}" "{tmp_path}" late'
    with run_wrapper(tmp_path, f"read < <({train})", 1) as agent:
        assert agent.wait(120) == 0
        pid = int((tmp_path / "pid-0").read_text())
        assert not list(tmp_path.glob(f"{SOCKETS}*"))  # neither its own nor that of a dead one
        wait_until(lambda: not is_alive(pid), "the end of the training")
        assert (tmp_path / "noticed").exists()
