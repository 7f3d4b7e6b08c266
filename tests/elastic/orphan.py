"""What a wrapper script starts: `orphan.py DIRECTORY [late]`, as rank 0 or 1.

Rank 0 knows nothing of remesh and never ends. Rank 1, and any rank that is late, trains with a
manager until it notices that its agent is gone: the kernel does not show its environment, as after
`setproctitle`. A late one says that it runs, and makes its manager when its agent has ended in
order. Each leaves its process id in a file, and what ended it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from pathlib import Path

import numpy as np

from remesh.errors import AgentLostError
from remesh.exchange import Alone
from remesh.training.manager import Manager
from tests.waiting import wait_until


def main() -> None:
    directory, rank, is_late = Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2:] == ["late"]
    if rank == 1 or is_late:
        hide("REMESH_AGENT_SOCKET")
    if is_late:
        tell_pid(directory, rank)
        print("runs", flush=True)  # noqa: T201 - the wrapper waits for it
        agent = Path(os.environ["REMESH_AGENT_SOCKET"])
        wait_until(lambda: not agent.parent.exists(), "the end of the agent")
    elif rank == 0:
        tell_pid(directory, rank)
        while True:
            signal.pause()
    manager = Manager(directory / "checkpoints", group=Alone())
    try:
        for step in itertools.count():
            manager.step(step, {"w": np.zeros(3)})
            if step == 0 and not is_late:
                tell_pid(directory, rank)
    except AgentLostError:
        (directory / "noticed").touch()


def hide(name: str) -> None:
    """Overwrite a variable where the kernel looks for it; Python has a copy."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memset(getenv(name.encode()), 0, len(os.environ[name]))


def tell_pid(directory: Path, rank: int) -> None:
    (directory / f"pid-{rank}.new").write_text(str(os.getpid()))
    (directory / f"pid-{rank}.new").rename(directory / f"pid-{rank}")


if __name__ == "__main__":
    main()
