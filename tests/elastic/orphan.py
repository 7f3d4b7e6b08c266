"""What a wrapper script starts: `orphan.py DIRECTORY [late]`, as rank 0 or 1.

Rank 0 knows nothing of remesh and never ends. Rank 1, and any rank that is late, trains with a
manager until it notices that its agent is gone. A late one says that it runs, and makes its manager
when its agent has ended in order. Each leaves its process id in a file, and what ended it.
"""

from __future__ import annotations

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
    if is_late:
        tell_pid(directory, rank)
        print("runs", flush=True)  # noqa: T201 - the wrapper waits for it
        agent = Path(os.environ["REMESH_AGENT_DIR"])
        wait_until(lambda: not agent.exists(), "the end of the agent")
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


def tell_pid(directory: Path, rank: int) -> None:
    (directory / f"pid-{rank}.new").write_text(str(os.getpid()))
    (directory / f"pid-{rank}.new").rename(directory / f"pid-{rank}")


if __name__ == "__main__":
    main()
