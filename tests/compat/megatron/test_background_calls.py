"""The process that runs calls of `AsyncCallsQueue(persistent=True)`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import is_alive, wait_until

SCRIPT = """
import multiprocessing
import os
import signal

from remesh.compat.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest

if __name__ == "__main__":
    calls = AsyncCallsQueue(persistent=True)
    calls.schedule_async_request(AsyncRequest(print, ("called",), []))
    calls.maybe_finalize_async_calls(blocking=True)
    [process] = multiprocessing.active_children()
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_when_the_trainer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], check=False, stdout=subprocess.PIPE, text=True, timeout=240
    )
    *_, process = done.stdout.split()
    wait_until(lambda: not is_alive(int(process)), "the end of the process")
