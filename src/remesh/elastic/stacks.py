"""The stacks of all threads of the processes of a node.

py-spy reads them from outside, if it is installed and the kernel permits it. Otherwise a process
writes them on a signal, if it has a handler (`remesh.elastic.heartbeat.answer_stack_requests`,
which `remesh.Manager` calls).

All processes are looked at at once, in threads, within one limit. Meanwhile a process may end, and
its id become that of another: each is known by an open directory of `/proc`, which stays its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from remesh.elastic.heartbeat import STACK_SIGNAL, catches, stacks_file

PY_SPY_SECONDS = 3.0
ANSWER_SECONDS = 2.0
MAX_STACKS = 64 << 10
"""Characters that are kept of each process."""


class Stacks:
    """Takes the stacks of processes.

    The thread that reaps the processes makes it, while none of them is reaped.
    """

    def __init__(self, processes: Mapping[int, tuple[int, str]]) -> None:
        self._processes = dict(processes)
        self._places: dict[int, int] = {}
        self._found: dict[int, str] = {}
        for rank, (pid, _) in processes.items():
            try:
                self._places[rank] = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                self._found[rank] = f"no stacks: {error}"

    def take(self) -> dict[int, str]:
        """The stacks by rank, or why there are none; once."""
        threads = [
            threading.Thread(target=self._take_one, args=(rank,), daemon=True)
            for rank in self._places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._found

    def _take_one(self, rank: int) -> None:
        pid, heartbeat_file = self._processes[rank]
        place = self._places[rank]
        try:
            text = _stacks_of(pid, place, heartbeat_file)
        except OSError as error:  # its files are removed when it ends
            text = f"no stacks: {error}"
        finally:
            os.close(place)
        self._found[rank] = text[:MAX_STACKS]


def _stacks_of(pid: int, place: int, heartbeat_file: str) -> str:
    text, why = _by_py_spy(pid)
    if not _status(place):
        return "no stacks: the process has ended"
    if not text:
        text = _by_signal(pid, place, heartbeat_file)
    return text or f"no stacks: {why}; the process does not write them itself"


def _status(place: int) -> bytes:
    """The kernel's status of a process; empty if it has ended."""
    try:
        descriptor = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        status = os.read(descriptor, 1 << 16)
    except ProcessLookupError:
        return b""
    finally:
        os.close(descriptor)
    return b"" if b"\nState:\tZ" in status else status


def _by_py_spy(pid: int) -> tuple[str, str]:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program and a number
            [program, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=PY_SPY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy took more than {PY_SPY_SECONDS:g} s"
    complaint = done.stderr.strip().splitlines()[-1:] or ["py-spy failed"]
    return done.stdout if done.returncode == 0 else "", complaint[0]


def _by_signal(pid: int, place: int, heartbeat_file: str) -> str:
    """Ask the process, if it has a handler: the signal would kill any other.

    The file alone does not tell: it may be that of a child of this process.
    """
    file = stacks_file(heartbeat_file)
    if not file.exists():
        return ""
    before = file.stat().st_size
    if not catches(_status(place), STACK_SIGNAL):
        return ""
    os.kill(pid, STACK_SIGNAL)  # which is still this process: it was there just now
    deadline = time.monotonic() + ANSWER_SECONDS
    written = b""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        earlier, written = written, file.read_bytes()[before:]
        # It writes word by word, and may be interrupted: whole lines, a frame, and now no more.
        if b"\n  File " in written and written.endswith(b"\n") and written == earlier:
            break
    return written.decode(errors="replace")
