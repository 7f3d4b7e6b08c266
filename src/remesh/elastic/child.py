"""Started in place of a training process, which it becomes.

`child.py AGENT BEATS SNAPSHOTS COMMAND...`

Before that it asks the kernel to kill the process when its agent dies, so that no orphan goes on
training (`guard.py` does the same for what the process starts), and says in the environment where
heartbeats, snapshots and the note that the work is done (see `remesh.elastic.script`) go. It is run
by path, in an interpreter without `site`, and must import nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(agent: int, beats: str, snapshots: str, command: list[str]) -> None:
    """Turn into the training process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not tie a process to its parent")
    if os.getppid() != agent:
        sys.exit("the agent died before its process began")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    os.environ["REMESH_HEARTBEAT_FILE"] = os.path.join(beats, f"{local_rank}.json")
    os.environ["REMESH_AGENT_DIR"] = beats
    os.environ["REMESH_SNAPSHOT_DIR"] = snapshots
    os.execvp(command[0], command)  # noqa: S606 - the user's own command


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
