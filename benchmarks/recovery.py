"""From a kill to the next step that is new: processes that go on, processes that start again.

Four ranks train a small model with DDP and save every 50 steps; after some steps a process is
killed with SIGKILL. Measured is the time until any rank finishes a step that none had finished
before, and how many steps were made a second time. What is killed is a worker of one node, or one
of two agents with its workers; or these are stopped with SIGSTOP, as a machine that loses power
falls silent. The same training runs under `remesh run` as a function that is entered again, under
`remesh run` as an ordinary script, and, where a worker is killed, as the same script under torchrun
with its c10d rendezvous (see `benchmarks.elastic`), in turn. At last a node joins two others, and
the longest time between two steps is measured.

For processes that go on it is shown where the time goes: until the last process that lives has left
the function, until all have entered it, have made their groups, their model and manager, have
resumed, and until the first step. Beside it stands how long `benchmarks.simulation` expects it to
take to form the next world, with the time that processes took to leave.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from benchmarks.elastic import BIN, OWN_STORE, Job, free_port
from benchmarks.report import median, print_table, write_json
from benchmarks.simulation import FailureKind, formation_seconds
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT

NUM_RANKS = 4
KILL_AFTER = 70
NUM_NODES_GROWN = 3
Results: TypeAlias = dict[str, list[dict[str, float] | None]]
"""What `after_kill` or `measure_growth` said each time, by the name of the case."""
STAGES = ("left", "entered", "group", "made", "resumed")
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
import remesh, remesh.elastic

def train(job):
    log = open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a", buffering=1)
    def say(what, step=-1):
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        said = {"time": time.time(), "what": what, "rank": rank, "step": step, "size": size}
        log.write(json.dumps(said | {"parent": os.getppid()}) + "\\n")
    say("entered")
    try:
        dist.init_process_group("gloo")
        say("group")
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": 0}
        with remesh.Manager(sys.argv[1] + "/checkpoints", every=50, job=job) as manager:
            say("made")
            manager.resume(state)
            say("resumed")
            while True:
                model(torch.randn(32, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                manager.step(state["step"], state)
                say("step", state["step"])
                time.sleep(0.05)
    finally:
        say("left")

if sys.argv[2] == "again":
    remesh.elastic.run(train)
else:
    train(None)
"""


def steps_of(job: Job) -> list[dict[str, Any]]:
    """The steps that were made."""
    return [entry for entry in job.steps() if entry["what"] == "step"]


@contextmanager
def running(
    directory: Path,
    commands: Sequence[Sequence[str]],
    how: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Job]:
    """A job that trains, in a directory."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    job = Job(directory)
    try:
        whole = [[*command, str(script), str(directory), how] for command in commands]
        job.start(whole, variables)
        yield job
    finally:
        job.close()


@contextmanager
def master_of(num_processes: int, nodes: str) -> Iterator[list[str]]:
    """A master; the command of its nodes."""
    command = [str(BIN / "remesh"), "master", "--port", "0"]
    master = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert master.stdout is not None
        url = master.stdout.readline().strip()
        node = [str(BIN / "remesh"), "run", "--master", url, "--nnodes", nodes]
        yield [*node, "--nproc-per-node", str(num_processes), "--local-addr", "127.0.0.1"]
    finally:
        master.terminate()
        master.communicate()


def after_kill(job: Job, victim: str, limit: float) -> dict[str, float] | None:
    """Kill a process; seconds to the next new step, and where they go. None if it does not come."""
    if not job.until(lambda: any(one["step"] >= KILL_AFTER for one in steps_of(job)), limit):
        raise SystemExit("the training did not begin")
    workers = {one["pid"]: one for one in steps_of(job)}
    killed_one = max(workers.values(), key=lambda one: one["rank"])
    pids = [killed_one["pid"]]
    if victim != "worker":
        pids = [pid for pid, one in workers.items() if one["parent"] == killed_one["parent"]]
        pids = [killed_one["parent"], *pids]
    before = max(one["step"] for one in steps_of(job))
    killed = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP if victim == "node" else signal.SIGKILL)

    def new() -> list[float]:
        # A step may have been on its way.
        return [one["time"] for one in steps_of(job) if one["step"] > before + 1]

    if not job.until(new, limit):
        return None
    found = {"seconds": min(new()) - killed}
    later = [one for one in job.steps() if killed < one["time"] <= min(new())]
    last = killed
    for stage in STAGES:
        reached = [one["time"] for one in later if one["what"] == stage]
        if reached:
            found[stage], last = max(reached) - last, max(reached)
    found["step"] = min(new()) - last
    own = [one["step"] for one in steps_of(job) if one["rank"] == 0]
    return found | {"again": len(own) - len(set(own))}


TORCHRUN: dict[str, dict[str, str]] = {"torchrun": {}, "torchrun, own store": OWN_STORE}
SIDES = ("go on", "start again", *TORCHRUN)


def measure(side: str, victim: str, limit: float) -> dict[str, float] | None:
    """What `after_kill` says of a job of its own."""
    how = "again" if side == "go on" else "ordinary"
    with tempfile.TemporaryDirectory() as name:
        if side in TORCHRUN:
            endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
            command = [str(BIN / "torchrun"), "--rdzv-backend=c10d", endpoint, "--max-restarts=3"]
            command += [f"--nproc-per-node={NUM_RANKS}"]
            with running(Path(name), [command], how, TORCHRUN[side]) as job:
                return after_kill(job, victim, limit)
        num_nodes = 1 if victim == "worker" else 2
        with (
            master_of(NUM_RANKS // num_nodes, f"1:{num_nodes}") as node,
            running(Path(name), [node] * num_nodes, how) as job,
        ):
            return after_kill(job, victim, limit)


def measure_growth(side: str, limit: float) -> dict[str, float] | None:
    """How long training stands still when a third node joins two, of one rank each."""
    how = "again" if side == "go on" else "ordinary"
    with (
        tempfile.TemporaryDirectory() as name,
        master_of(1, "2:3") as node,
        running(Path(name), [node] * 2, how) as job,
    ):
        script = [str(Path(name) / "train.py"), name, how]
        if not job.until(lambda: any(one["step"] >= KILL_AFTER for one in steps_of(job)), limit):
            raise SystemExit("the training did not begin")
        job.start([[*node, *script]])

        def grown() -> list[float]:
            return [one["time"] for one in steps_of(job) if one["size"] == NUM_NODES_GROWN]

        if not job.until(grown, limit):
            return None
        first = min(grown())
        last = max(one["time"] for one in steps_of(job) if one["time"] < first and one["size"] == 2)
        own = [one["step"] for one in steps_of(job) if one["rank"] == 0]
        return {"seconds": first - last, "again": len(own) - len(set(own))}


WORDS = {
    "worker": "worker killed",
    "agent": "agent killed",
    "node": f"node silent (limit {HEARTBEAT_TIMEOUT:g} s)",
    "join": "a node joins",
}
SIMULATED = {"worker": FailureKind.PROCESS, "node": FailureKind.NODE}
"""A dead agent on a machine that lives is not simulated."""
NUM_NODES = {"worker": 1, "node": 2}


def compare_with_simulation(results: Results) -> dict[str, dict[str, float]]:
    """How long worlds took to form, measured and simulated, by what failed."""
    formed = {
        victim: [one for one in results[name] if one is not None]
        for victim in SIMULATED
        if (name := f"{WORDS[victim]}, go on") in results
    }
    if not formed.get("worker"):
        return {}
    left = median([one["left"] for one in formed["worker"]])
    return {
        WORDS[victim]: {
            "measured": median([one["left"] + one["entered"] for one in found]),
            "simulated": formation_seconds(
                SIMULATED[victim], NUM_NODES[victim], NUM_NODES[victim] - 1, left
            ),
        }
        for victim, found in formed.items()
        if found
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to come back")
    parser.add_argument("--failures", nargs="+", choices=WORDS, default=list(WORDS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    results: Results = {}
    cases = [
        (side, what)
        for what in WORDS
        for side in SIDES
        if what in options.failures
        and side in options.sides
        and (side not in TORCHRUN or what == "worker")
    ]
    for _ in range(options.repeats):
        for side, victim in cases:
            if victim == "join":
                found = measure_growth(side, options.limit)
            else:
                found = measure(side, victim, options.limit)
            name = WORDS[victim]
            results.setdefault(f"{name}, {side}", []).append(found)
            sys.stderr.write(f"{name}, {side}: {found}\n")
    columns = ["seconds", *STAGES, "step", "again"]
    rows = []
    for name, measured in results.items():
        back = [one for one in measured if one is not None]
        cells = []
        for column in columns:
            values = [one[column] for one in back if column in one]
            cells.append(f"{median(values):.2f}" if values else "-")
        rows.append([name, f"{len(back)} of {len(measured)}", *cells])
    head = ["", "came back", "seconds, median", *STAGES, "step", "steps made again"]
    title = "From the kill of a process, or the last step before a join, to the next new step"
    print_table(title, head, rows)
    sys.stdout.write(f"load of the machine before: {load:.1f}\n")
    formed = compare_with_simulation(results)
    print_table(
        "From the failure until all processes have entered the next world",
        ["", "measured, seconds", "simulated"],
        [[name, *(f"{one[key]:.2f}" for key in ("measured", "simulated"))]
         for name, one in formed.items()],
    )  # fmt: skip
    write_json(
        "recovery", {"load": load, "limit": options.limit, "results": results, "formed": formed}
    )


if __name__ == "__main__":
    main()
