"""The stacks of all threads of a process.

py-spy reads them from outside, if it is installed and the kernel permits it. Otherwise the process
writes them on a signal, if it has a handler (`remesh.heartbeat.answer_stack_requests`, which
`remesh.Manager` calls).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from remesh.heartbeat import STACK_SIGNAL, stacks_file

PY_SPY_SECONDS = 10.0
ANSWER_SECONDS = 2.0
MAX_STACKS = 64 << 10
"""Characters that are kept of each process."""


def stacks_of(pid: int, heartbeat_file: str | os.PathLike[str]) -> str:
    """The stacks of a process, or why there are none."""
    text, why = _by_py_spy(pid)
    if not text:
        text = _by_signal(pid, heartbeat_file)
    return (text or f"no stacks: {why}; the process does not write them itself")[:MAX_STACKS]


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


def _by_signal(pid: int, heartbeat_file: str | os.PathLike[str]) -> str:
    """Ask the process; only one that said by its file that it answers, for others it would kill."""
    file = stacks_file(heartbeat_file)
    if not file.exists():
        return ""
    before = file.stat().st_size
    os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + ANSWER_SECONDS
    written = b""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        earlier, written = written, file.read_bytes()[before:]
        # It writes word by word, and may be interrupted: whole lines, a frame, and now no more.
        if b"\n  File " in written and written.endswith(b"\n") and written == earlier:
            break
    return written.decode(errors="replace")
