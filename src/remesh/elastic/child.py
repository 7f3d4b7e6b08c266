"""Started in place of a training process, which it becomes.

`child.py AGENT STDOUT STDERR COMMAND...`

Before that it asks the kernel to kill the process when its agent dies, so that no orphan goes on
training (`guard.py` does the same for what the process starts), and lets it write into its log
files; an empty name leaves an output as it is. It is run by path, in an interpreter without `site`,
and must import nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with(agent: int) -> None:
    """Have the kernel kill this process when its agent dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not tie a process to its parent")
    if os.getppid() != agent:
        sys.exit("the agent died before its process began")


def show_name(script: str) -> None:
    """Have `ps` and `top` show a script's name for this process, and not that of Python."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(os.path.basename(script)))


def redirect(outputs: Sequence[str]) -> None:
    """Write standard output and standard error into files."""
    for descriptor, path in enumerate(outputs, start=1):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    redirect(sys.argv[2:4])
    os.execvp(sys.argv[4], sys.argv[4:])  # noqa: S606 - the user's own command
