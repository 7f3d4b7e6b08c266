"""Run E: a job under `remesh run`, from which a rank is killed while the others go on.

The run has processes of its own, since it is an agent that starts and watches them. What they do
they write to files (`recovery_worker`), which are read while the run lasts and at its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remesh.demo.config import Kill
from remesh.demo.launch import SILENCE_LIMIT, loopback
from remesh.demo.result import DemoError, RecoveryResult

KILL = Kill(rank=2, step=20)
PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "remesh.training.live",
    "remesh.demo.train",
    "remesh.elastic",
)
LOOK_SECONDS = 0.1
"""Time between two looks at what the processes have done."""

Entry = Mapping[str, Any]
"""What a process did, as `recovery_worker` writes it, with its process id."""


def is_possible() -> bool:
    """Whether what `remesh run` needs is installed."""
    return all(importlib.util.find_spec(name) for name in ("aiohttp", "prometheus_client"))


def play(num_ranks: int, log: Path, on_step: Callable[[int, float], None]) -> list[Entry]:
    """Run it; what its processes did, in the order of time.

    Args:
        num_ranks: How many processes train.
        log: The file that takes what they print.
        on_step: Called with the number and the loss of each step that rank 0 has done.

    Raises:
        DemoError: If it fails.
    """
    with tempfile.TemporaryDirectory(prefix="remesh-demo-") as name, log.open("wb") as output:
        victim = (str(KILL.rank), str(KILL.step))
        command = (
            *(sys.executable, "-m", "remesh", "run", "--nproc-per-node", str(num_ranks)),
            *("--preload", ",".join(PRELOAD), "--snapshot-dir", ""),
            *("-m", "remesh.demo.recovery_worker", name, *victim),
        )
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
        # A session of its own: Ctrl-C is for this process, which ends the others.
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            _follow(process, Path(name), on_step)
        finally:
            process.kill()  # its processes end with it
            process.wait()
        entries = read_entries(Path(name))
    if process.returncode != 0:
        raise DemoError(f"run E ended with code {process.returncode} (its output: {log})")
    return entries


def _follow(
    process: subprocess.Popen[bytes], directory: Path, on_step: Callable[[int, float], None]
) -> None:
    """Wait for the end of the run, or until it does nothing any more."""
    num_read, deadline = 0, time.monotonic() + SILENCE_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        entries = read_entries(directory)
        for entry in entries[num_read:]:
            deadline = time.monotonic() + SILENCE_LIMIT
            if entry["rank"] == 0 and "step" in entry:
                on_step(entry["step"], entry["loss"])
        num_read = len(entries)


def read_entries(directory: Path) -> list[Entry]:
    """What the processes have written so far, in the order of time."""
    entries: list[Entry] = []
    for file in directory.glob("*.jsonl"):
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines()
        entries += [{**json.loads(line), "pid": int(file.stem)} for line in whole]
    return sorted(entries, key=lambda entry: float(entry["time"]))


def losses_of(entries: Sequence[Entry]) -> dict[int, float]:
    """Loss of each step; all ranks have the same."""
    return {entry["step"]: entry["loss"] for entry in entries if "step" in entry}


def summarise(entries: Sequence[Entry]) -> RecoveryResult:
    """How the others went on.

    Raises:
        DemoError: If no rank was killed, or no step came after that.
    """
    steps = [entry for entry in entries if "step" in entry]
    death = next((entry for entry in entries if "dies" in entry), None)
    if death is None:
        raise DemoError(f"run E: rank {KILL.rank} was not killed")
    new = [entry for entry in steps if entry["step"] > death["dies"]]
    if not new:
        raise DemoError("run E: no step came after the kill")
    before = {entry["pid"] for entry in steps if entry["step"] <= death["dies"]} - {death["pid"]}
    made = {(entry["pid"], entry["step"]) for entry in steps}
    return RecoveryResult(
        rank=death["rank"],
        step=death["dies"],
        seconds=min(entry["time"] for entry in new) - death["time"],
        num_went_on=len(before & {entry["pid"] for entry in new}),
        num_repeated=len(steps) - len(made),
    )
