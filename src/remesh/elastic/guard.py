"""Ends the training processes of a node when its agent has ended, however it ended.

`guard.py DIRECTORY`

The kernel kills a process that the agent has started when the agent dies (`child.py`), but not the
processes that this one has started: a wrapper script that does not end with `exec` would leave a
training behind that goes on, beside the one that takes its place. So each agent starts a guard, in
a session of its own. The guard waits until its standard input ends, which happens when the agent
has ended, and kills what is left of the process groups of the training.

A process belongs to the training if its environment says so and it has not left the process group
in which it was started. For one that was forked from another the kernel shows the environment of
that one; `fork_server.py` therefore leaves a file for each group that it begins. A process with a
group of its own was meant to outlive the training, as the one that writes a checkpoint. A training
process that has left its group is not found here; its manager notices that the agent is gone
(`remesh.heartbeat.AgentLock`).

The file is run by path, in an interpreter without `site`, and must import nothing but the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

HEARTBEAT = "REMESH_HEARTBEAT_FILE"
GROUP = "REMESH_PROCESS_GROUP"
FORKED = b"forked"
"""What the group is in the environment of a fork server (`fork_server.py`)."""
SECONDS = 60.0
"""How long the guard waits for the end of what it has killed."""


def kill_groups(directory: str, seconds: float) -> list[int]:
    """Kill all processes of the training, and wait until they have ended.

    Args:
        directory: The agent's directory for heartbeats, which their environment names.
        seconds: How long to wait.

    Returns:
        The ids of the processes that are left: they are stuck in the kernel.
    """
    deadline = time.monotonic() + seconds
    killed: dict[int, str] = {}
    while True:
        found = _find(directory)
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


def _find(directory: str) -> list[int]:
    """The processes whose environment names the directory, in the groups where they began."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            values = dict(item.split(b"=", 1) for item in variables if b"=" in item)
            file_of_process = os.fsdecode(values.get(HEARTBEAT.encode(), b""))
            if os.path.dirname(file_of_process) != directory:
                continue
            group = values.get(GROUP.encode(), b"0")
            own = os.getpgid(int(name))
            if group == FORKED:
                is_inside = os.path.exists(os.path.join(directory, f"group-{own}"))
            else:
                is_inside = own == int(group)
            if is_inside:
                found.append(int(name))
        except (OSError, ValueError):
            continue  # it has ended, or is not ours
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_groups(sys.argv[1], SECONDS)
