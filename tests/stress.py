"""Run tests many times on a machine that is too busy; pytest prints which of them fail.

`python -m tests.stress [--rounds N] [--pauses SECONDS] [PYTEST'S WORDS]...`

What a test asserts must hold under every schedule. So the tests run in more workers than there are
processors, and any process that a test or pytest has started may stand still for as long as
`--pauses` says, at any time.

Two failures are this program's fault and not the test's: a test that stops a process by itself may
see it go on early; and a process that stands still while the last parent of its process group dies
gets SIGHUP from the kernel, which ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKERS = 4 * len(os.sched_getaffinity(0))


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have, if they are not stopped."""
    parents: dict[int, int] = {}
    stopped = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            if fields[0] in "TZ":
                stopped.add(int(file.parent.name))
    found, new = set[int](), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return sorted(found - stopped)


def main() -> int:
    """Run all rounds; the number of those in which a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often all tests run")
    parser.add_argument("--pauses", type=float, default=2.0, help="longest pause of a process")
    options, words = parser.parse_known_args()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", f"{WORKERS}"]
    num_failed = 0
    for _ in range(options.rounds):
        with subprocess.Popen([*command, *words]) as process:
            while process.poll() is None:
                time.sleep(random.uniform(0.0, 0.2))
                with contextlib.suppress(ProcessLookupError, IndexError):
                    chosen = random.choice(descendants(process.pid))
                    os.kill(chosen, signal.SIGSTOP)
                    time.sleep(random.uniform(0.0, options.pauses))
                    os.kill(chosen, signal.SIGCONT)
        num_failed += process.returncode not in {0, 5}
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
