"""torchrun, whose ranks are forked from a process that has imported torch.

Its options, agent, rendezvous and results are torch's own. As torchrun starts them, the ranks are
new interpreters, each of which imports torch and what an optimizer imports, for four seconds of a
processor. `tests/first_hour` and the conversion of checkpoints do so.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from typing import Any

from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def _run_script(_unbuffered: str, script: str, *words: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # those that the agent has set
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _launch(config: LaunchConfig, entrypoint: Any) -> elastic_launch:
    config.start_method = "fork"
    return elastic_launch(config, _run_script)


if __name__ == "__main__":
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # it may have children
    vars(run)["elastic_launch"] = _launch
    run.main()
