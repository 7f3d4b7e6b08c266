"""Run tests many times on a machine that is too busy, and count which of them fail.

`python -m tests.stress [--rounds N] [--pauses SECONDS] [PYTEST'S WORDS]...`

What a test asserts must hold under every schedule. So the tests run in more workers than there are
processors, beside processes that burn them, and any process that a test or pytest has started may
stand still for as long as `--pauses` says, at any time.

Two failures are this program's fault and not the test's: a test that stops a process by itself may
see it go on early; and a process that stands still while the last parent of its process group dies
gets SIGHUP from the kernel, which ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

NUM_PROCESSORS = len(os.sched_getaffinity(0))


def burn() -> None:
    """Keep a processor busy."""
    while True:
        pass


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


def pause(pid: int, longest: float, is_over: threading.Event) -> None:
    """Let random descendants of a process stand still, one at a time."""
    dice = random.Random()
    while not is_over.wait(dice.uniform(0.0, 0.2)):
        living = descendants(pid)
        if not living:
            continue
        chosen = dice.choice(living)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGSTOP)
            is_over.wait(dice.uniform(0.0, longest))
            os.kill(chosen, signal.SIGCONT)


def run_once(words: Sequence[str], longest: float) -> tuple[list[str], str]:
    """Run the tests once; those that failed, and what pytest wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(3 * NUM_PROCESSORS), *words]
    is_over = threading.Event()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        thread = threading.Thread(target=pause, args=(process.pid, longest, is_over))
        if longest > 0:
            thread.start()
        output, _ = process.communicate()
        is_over.set()
        if longest > 0:
            thread.join()
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed or ["pytest itself"] * (process.returncode not in {0, 5}), output


def main() -> None:
    """Run, count, and print which tests failed how often; exit code 1 if any did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often all tests run")
    parser.add_argument("--pauses", type=float, default=2.0, help="longest pause of a process")
    options, words = parser.parse_known_args()
    counts: Counter[str] = Counter()
    for _ in range(NUM_PROCESSORS):
        multiprocessing.Process(target=burn, daemon=True).start()
    for number in range(1, options.rounds + 1):
        failed, output = run_once(words, options.pauses)
        counts.update(failed)
        summary = output.strip().rpartition("\n")[2]
        print(f"round {number} of {options.rounds}: {summary}", flush=True)  # noqa: T201
        if failed:
            print(output, flush=True)  # noqa: T201
    for name, count in counts.most_common():
        print(f"{count:4} of {options.rounds}  {name}")  # noqa: T201
    if not counts:
        print(f"no test failed in {options.rounds} rounds")  # noqa: T201
    sys.exit(1 if counts else 0)


if __name__ == "__main__":
    main()
