"""The stacks of all threads of the processes of a node, which they write themselves.

When a job hangs, an agent asks its processes where they are, and ends them. A process that called
`answer_stack_requests` (`remesh.Manager` does) writes the stacks of its threads to a file beside
the socket of its agent whenever it gets `STACK_SIGNAL`: faulthandler does that in C, also when the
interpreter is stuck in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from remesh.errors import StorageError

STACK_SIGNAL = signal.SIGUSR2
"""Asks a process for the stacks of its threads."""
ANSWER_SECONDS = 2.0
MAX_STACKS = 64 << 10
"""Characters that are kept of each process."""


def stacks_file(socket_path: str) -> Path:
    """Where the process that has a socket of an agent writes its stacks when it is asked."""
    return Path(f"{socket_path}.stacks")


def answer_stack_requests(socket_path: str) -> Callable[[], None] | None:
    """Let this process write the stacks of its threads whenever it gets `STACK_SIGNAL`.

    Returns a function that ends this; None if the signal has a handler already, which is left
    alone.
    """
    # Handlers that were not set by the signal module are seen by the kernel alone.
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL or _catches("self"):
        return None
    file = stacks_file(socket_path)
    try:
        stream = file.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(
            f"cannot write {file}: {error.strerror}; check the directory and its permissions"
        ) from error
    faulthandler.register(STACK_SIGNAL, stream, all_threads=True)

    def end() -> None:
        # A handler that was set since stays; faulthandler would put the first one back.
        if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
            faulthandler.unregister(STACK_SIGNAL)
            stream.close()
        file.unlink(missing_ok=True)

    return end


def _catches(process: int | str) -> bool:
    """True if a process has a handler for the signal."""
    status = Path(f"/proc/{process}/status").read_bytes().splitlines()
    caught = [line.split()[1] for line in status if line.startswith(b"SigCgt:")]
    return bool(caught) and bool(int(caught[0], 16) >> (STACK_SIGNAL - 1) & 1)


def take_stacks(processes: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """The stacks of processes, or why there are none, by rank; from their ids and files.

    Only the thread that reaps the processes may call it: as long as none is reaped, its id does not
    become that of another.
    """
    found: dict[int, str] = {}
    asked: dict[int, BinaryIO] = {}  # the files, from where the answers begin
    for rank, (pid, file) in processes.items():
        try:
            # Of any other the signal would be the end. The file alone does not tell: it may be that
            # of a child of the process.
            if file.exists() and _catches(pid):
                # A process that ends meanwhile, as others are ended, removes its file.
                asked[rank] = file.open("rb")
                asked[rank].seek(0, os.SEEK_END)
                os.kill(pid, STACK_SIGNAL)
            else:
                found[rank] = "no stacks: the process does not write them"
        except OSError as error:
            found[rank] = f"no stacks: {error}"
    if asked:
        time.sleep(ANSWER_SECONDS)
    for rank, stream in asked.items():
        with stream:
            text = stream.read().decode(errors="replace")[:MAX_STACKS]
        found[rank] = text or "no stacks: the process does not answer"
    return found
