"""Ends the training processes of a node: when its agent has ended, and before the next world.

`guard.py DIRECTORY`

The kernel kills a process that the agent has started when the agent dies (`child.py`), but not the
processes that this one has started: a wrapper script that does not end with `exec` would leave a
training behind that goes on, beside the one that takes its place. So each agent starts a guard, in
a session of its own. The guard waits until its standard input ends, which happens when the agent
has ended, and kills what is left of the training. An agent that lives does the same itself before
it starts the processes of the next world.

A process belongs to the training if its environment says so, whatever its session, its process
group and its parent: the environment names the agent's socket for its rank, which processes
inherit. For one that was forked the kernel shows the environment of that from which it was forked,
so `fork_server.py` writes the name of the socket there. A process that is meant to outlive the
training, as the one that writes a checkpoint, is started without the variable. A training process
whose environment the kernel does not show is not found here; its manager notices that the agent is
gone (`remesh.elastic.process_socket`).

The file is run by path, in an interpreter without `site`, and must import nothing but the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

AGENT_SOCKET = "REMESH_AGENT_SOCKET"
SECONDS = 60.0
"""How long the guard waits for the end of what it has killed."""


def kill(directory: str, seconds: float, names: Collection[str] | None = None) -> list[int]:
    """Kill processes of the training, and wait until they have ended.

    Meant are those with sockets of these names, by default all. The ids of those that are left are
    returned: they are stuck in the kernel.
    """
    deadline = time.monotonic() + seconds
    killed: dict[int, str] = {}
    while True:
        found = _find(directory, names)
        for pid in found:
            killed.setdefault(pid, _began(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The environment is gone first, then memory, files and devices are given back.
        left = [pid for pid, began in killed.items() if began and _began(pid) == began]
        if not (found or left) or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)


def _began(pid: int) -> str:
    """When a process began, which no other process of its number did; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    state, num_threads, began = status[0], status[17], status[19]
    # A process whose first thread has ended has not, as long as it has others.
    return "" if state in {b"Z", b"X"} and int(num_threads) <= 1 else began.decode()


def _find(directory: str, names: Collection[str] | None) -> list[int]:
    """The processes whose environment names one of the sockets."""
    found = []
    for number in os.listdir("/proc"):
        if not number.isdigit():
            continue
        try:
            with open(f"/proc/{number}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue  # it has ended, or is not ours
        values = dict(item.split(b"=", 1) for item in variables if b"=" in item)
        parent, name = os.path.split(os.fsdecode(values.get(AGENT_SOCKET.encode(), b"")))
        if parent == directory and (names is None or name in names):
            found.append(int(number))
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill(sys.argv[1], SECONDS)
