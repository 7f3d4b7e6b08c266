"""Training processes end with their agent, also those that a wrapper script has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remesh.elastic import child, guard
from remesh.elastic.directories import BEATS, agent_directory
from remesh.heartbeat import AgentLock
from tests.elastic.cluster import REMESH, kill
from tests.elastic.zygote import Command
from tests.waiting import is_alive, wait_until

ORPHAN = Path(__file__).with_name("orphan.py")


def test_the_lock_of_an_agent_is_free_when_it_has_ended(tmp_path: Path) -> None:
    assert not AgentLock("").is_free()
    assert not AgentLock(str(tmp_path / "none")).is_free()
    with agent_directory(str(tmp_path), BEATS) as directory:
        lock = AgentLock(directory)
        assert not lock.is_free()
        assert not lock.is_free()
    assert lock.is_free()
    lock.close()
    assert not lock.is_free()


def test_a_directory_that_is_gone_from_where_it_was_made_is_of_an_agent_that_has_ended(
    tmp_path: Path,
) -> None:
    other = tmp_path / "another directory under this path, as in a container"
    other.mkdir()
    with agent_directory(str(tmp_path), BEATS) as directory:
        unseen = str(other / Path(directory).name)
        assert not AgentLock(unseen).is_free()
    assert not AgentLock(unseen).is_free()
    assert not AgentLock(str(tmp_path / "none" / Path(directory).name)).is_free()
    lock = AgentLock(directory)
    assert lock.is_free()
    lock.close()
    assert not lock.is_free()


@pytest.mark.parametrize("wrapper", ["sleep 1000 & echo $!; wait", "sleep 1000 & echo $!; exit"])
def test_the_guard_kills_what_has_not_left_its_group(tmp_path: Path, wrapper: str) -> None:
    beats = str(tmp_path)
    own = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), beats, ""]
    script = f"setsid sleep 1000 & echo $!; {wrapper}"
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, beats], stdin=subprocess.PIPE
    )
    training = subprocess.Popen(
        [*own, "bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert training.stdout is not None
    apart, within = (int(training.stdout.readline()) for _ in range(2))
    try:
        wait_until(lambda: os.getpgid(apart) == apart, "a session of its own")
        assert is_alive(within)
        assert watching.poll() is None
        watching.communicate()  # closes the pipe, as the end of the agent does
        assert not is_alive(within)
        assert is_alive(apart)
    finally:
        for pid in (apart, within):
            kill(pid)
        training.kill()
        training.communicate()


def test_a_process_that_still_gives_its_memory_back_has_not_ended(tmp_path: Path) -> None:
    # The kernel takes the environment away first, by which the guard finds processes, then closes
    # files; this one takes long.
    own = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(tmp_path), ""]
    hold = "os.posix_fallocate(os.memfd_create('held'), 0, 512 << 20)"
    script = f"import os; {hold}; print(flush=True); input()"
    training = subprocess.Popen(
        [*own, sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert training.stdout is not None
    try:
        training.stdout.readline()
        assert guard.kill_groups(str(tmp_path), 60) == []
        assert not is_alive(training.pid)
    finally:
        training.kill()
        training.communicate()


def run_wrapper(directory: Path, script: str, processes: int) -> Command:
    """Start an agent whose processes are those of a wrapper script."""
    wrapper = directory / "wrapper.sh"
    wrapper.write_text(f"#!/bin/bash\n{script}\n")
    wrapper.chmod(0o755)
    return Command(
        [*REMESH, "run", "--nproc-per-node", str(processes), "--no-python", str(wrapper)],
        directory / "output",
        environment={"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(directory)},
        directory=directory,
    )


def test_what_wrapper_scripts_started_ends_with_a_killed_agent(tmp_path: Path) -> None:
    # Rank 1 gets a session of its own, so that it has to notice by itself. (Bash could give it a
    # process group, but goes on when that is stopped, as if it had ended.)
    train = f'"{sys.executable}" "{ORPHAN}" "{tmp_path}"'
    apart = '[ "$RANK" = 0 ] || apart="setsid --wait"'
    agent = run_wrapper(tmp_path, f"{apart}\n$apart {train}\necho ended", 2)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    pids: list[int] = []
    try:
        wait_until(lambda: all(file.exists() for file in files), "both processes")
        pids = [int(file.read_text()) for file in files]
        agent.kill()
        agent.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "the end of both processes")
        assert (tmp_path / "noticed").exists()
    finally:
        agent.kill()
        agent.wait()
        for pid in pids:
            kill(pid)


def test_what_makes_its_manager_after_the_end_of_its_agent_ends_too(tmp_path: Path) -> None:
    # The wrapper ends, and its agent with it, when the training runs in a session of its own.
    abandoned = tmp_path / f"{BEATS}abandoned"
    abandoned.mkdir()
    train = f'setsid "{sys.executable}" "{ORPHAN}" "{tmp_path}" late'
    agent = run_wrapper(tmp_path, f"read < <({train})", 1)
    pids: list[int] = []
    try:
        assert agent.wait(120) == 0
        pids = [int((tmp_path / "pid-0").read_text())]
        assert not list(tmp_path.glob(f"{BEATS}*"))  # neither its own nor that of a dead one
        wait_until(lambda: not is_alive(pids[0]), "the end of the training")
        assert (tmp_path / "noticed").exists()
    finally:
        agent.kill()
        agent.wait()
        for pid in pids:
            kill(pid)
