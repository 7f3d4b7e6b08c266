"""What a wrapper script starts: `orphan.py DIRECTORY`, as rank 0 or 1.

Rank 0 knows nothing of remesh and never ends. Rank 1 trains with a manager until it notices that
its agent is gone. Each leaves its process id in a file, and rank 1 what ended it.
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


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if rank == 1:
        manager = Manager(directory / "checkpoints", group=Alone())
        manager.step(0, {"w": np.zeros(3)})
    (directory / f"pid-{rank}.new").write_text(str(os.getpid()))
    (directory / f"pid-{rank}.new").rename(directory / f"pid-{rank}")
    if rank == 0:
        while True:
            signal.pause()
    try:
        for step in itertools.count(1):
            manager.step(step, {"w": np.zeros(3)})
    except AgentLostError:
        (directory / "noticed").touch()


if __name__ == "__main__":
    main()
