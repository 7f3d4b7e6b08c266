"""From a kill to the next step that is new: processes that go on, processes that start again.

Four ranks of one node train a small model with DDP and save every 50 steps; after some steps one of
them is killed with SIGKILL. Measured is the time until any rank finishes a step that none had
finished before, and how many steps were made a second time. The same training runs under
`remesh run` as a function that is entered again, under `remesh run` as an ordinary script, and as
the same script under torchrun with its c10d rendezvous, in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic import BIN, Job, free_port
from benchmarks.report import median, print_table, write_json

NUM_RANKS = 4
KILL_AFTER = 70
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
import remesh, remesh.elastic

def train(job):
    dist.init_process_group("gloo")
    log = open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a", buffering=1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with remesh.Manager(sys.argv[1] + "/checkpoints", every=50, job=job) as manager:
        manager.resume(state)
        while True:
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            manager.step(state["step"], state)
            log.write(json.dumps({"time": time.time(), "rank": dist.get_rank(),
                                  "step": state["step"]}) + "\\n")
            time.sleep(0.05)

if sys.argv[2] == "again":
    remesh.elastic.run(train)
else:
    train(None)
"""


def measure(command: Sequence[str], how: str, limit: float) -> tuple[float, int] | None:
    """Seconds to the next new step, and steps that rank 0 made again; None if it does not come."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script = directory / "train.py"
        script.write_text(SCRIPT)
        job = Job(directory)
        try:
            job.start([[*command, str(script), name, how]])

            def victims() -> list[int]:
                reached = [one for one in job.steps() if one["step"] >= KILL_AFTER]
                return [one["pid"] for one in reached if one["rank"] == NUM_RANKS - 1]

            if not job.until(victims, limit):
                raise SystemExit("the training did not begin")
            before = max(one["step"] for one in job.steps())
            killed = time.time()
            os.kill(victims()[0], signal.SIGKILL)

            def new() -> list[float]:
                # A step may have been on its way.
                return [one["time"] for one in job.steps() if one["step"] > before + 1]

            if not job.until(new, limit):
                return None
            own = [one["step"] for one in job.steps() if one["rank"] == 0]
            return min(new()) - killed, len(own) - len(set(own))
        finally:
            job.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to come back")
    options = parser.parse_args(arguments)
    ranks = f"--nproc-per-node={NUM_RANKS}"
    results: dict[str, list[tuple[float, int] | None]] = {}
    for _ in range(options.repeats):
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        torchrun = [str(BIN / "torchrun"), "--rdzv-backend=c10d", endpoint, "--max-restarts=3"]
        sides = {
            "remesh run, processes go on": ([str(BIN / "remesh"), "run"], "again"),
            "remesh run, all start again": ([str(BIN / "remesh"), "run"], "ordinary"),
            "torchrun, all start again": (torchrun, "ordinary"),
        }
        for side, (command, how) in sides.items():
            found = measure([*command, ranks], how, options.limit)
            results.setdefault(side, []).append(found)
            sys.stderr.write(f"{side}: {found}\n")
    rows = []
    for side, measured in results.items():
        back = [one for one in measured if one is not None]
        seconds = f"{median([one[0] for one in back]):.2f}" if back else "-"
        again = f"{median([float(one[1]) for one in back]):.0f}" if back else "-"
        rows.append([side, f"{len(back)} of {len(measured)}", seconds, again])
    head = ["", "came back", "median, s", "steps made again"]
    print_table("From the kill of a process to the next new step", head, rows)
    write_json("recovery", results)


if __name__ == "__main__":
    main()
