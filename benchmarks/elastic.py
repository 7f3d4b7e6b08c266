"""From a kill to the first new step: `remesh run` beside torchrun with its c10d rendezvous.

Three nodes on this machine train a tiny model that steps twenty times a second. Once the training
runs, one process is killed with SIGKILL: a worker, or an agent together with its worker (torchrun
does not tie them to each other). Measured is the time until any rank finishes a step in a new
world. Where a job does not come back, the table says so.

All sides run in turn in one run of this script, with the same training script, three restarts, and
otherwise the defaults of their options. By default torchrun's restarted workers meet in a store
that still has the addresses of those before, so whether they come back is a race. "own store" is
torchrun with `OWN_STORE`: then rank 0 opens a new store after each restart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.report import median, print_table, write_json

NUM_NODES = 3
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
log = open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a", buffering=1)
for step in range(1_000_000):
    value = torch.ones(1)
    dist.all_reduce(value)
    log.write(json.dumps({"time": time.time(), "size": int(value.item()), "rank": dist.get_rank(),
                          "parent": os.getppid(), "step": step}) + "\\n")
    time.sleep(0.05)
"""
BIN = Path(sys.executable).parent
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of torchrun without a store that outlives restarts."""


class Job:
    """The processes of one job.

    Args:
        directory: Where its processes write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(
        self, commands: Sequence[Sequence[str]], variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start nodes, with further environment variables."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
        with (self._directory / "log").open("ab") as log:
            for command in commands:
                agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                self.agents.append(agent)

    def steps(self) -> list[dict[str, Any]]:
        """Every step that was made, with the process that made it."""
        found: list[dict[str, Any]] = []
        for file in self._directory.glob("*.jsonl"):
            whole = [line for line in file.read_text().splitlines(True) if line.endswith("\n")]
            found += [json.loads(line) | {"pid": int(file.stem)} for line in whole]
        return found

    def until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Whether something becomes so while any agent lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = all(agent.poll() is not None for agent in self.agents)
            if ended or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Kill what is left."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for file in self._directory.glob("*.jsonl"):
            command = Path(f"/proc/{file.stem}/cmdline")
            if command.exists() and str(self._directory) in command.read_text():
                os.kill(int(file.stem), signal.SIGKILL)


def whole_world(job: Job) -> list[dict[str, Any]]:
    """The twentieth step in a world of all nodes, once each of them has made it."""
    steps = [step for step in job.steps() if (step["size"], step["step"]) == (NUM_NODES, 20)]
    return steps if len({step["rank"] for step in steps}) == NUM_NODES else []


def seconds_to_recover(job: Job, victim: str, limit: float) -> float | None:
    """The time from a kill to the next step in a new world; None if the job does not come back."""
    if not job.until(lambda: whole_world(job), limit):
        raise SystemExit("the training did not begin with all nodes")
    former = {step["pid"] for step in job.steps()}
    worker = next(step for step in whole_world(job) if step["parent"] == job.agents[-1].pid)
    killed = time.time()
    if victim == "agent":
        os.kill(worker["parent"], signal.SIGKILL)
    os.kill(worker["pid"], signal.SIGKILL)

    def new_steps() -> list[float]:
        return [step["time"] for step in job.steps() if step["pid"] not in former]

    return min(new_steps()) - killed if job.until(new_steps, limit) else None


def measure_remesh(victim: str, limit: float) -> float | None:
    """With a master and `remesh run`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script = directory / "train.py"
        script.write_text(SCRIPT)
        command = [str(BIN / "remesh"), "master", "--port", "0"]
        with (directory / "master.log").open("ab") as log:
            master = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert master.stdout is not None
            url = master.stdout.readline().strip()
            node = [str(BIN / "remesh"), "run", "--master", url, "--nnodes", f"1:{NUM_NODES}"]
            node += ["--local-addr", "127.0.0.1"]
            commands = [
                [*node, "--node-id", str(number), str(script), name] for number in range(NUM_NODES)
            ]
            job = Job(directory)
            try:
                job.start(commands)
                return seconds_to_recover(job, victim, limit)
            finally:
                job.close()
        finally:
            master.terminate()
            master.communicate()


def measure_torchrun(
    victim: str, limit: float, variables: Mapping[str, str] = MappingProxyType({})
) -> float | None:
    """With torchrun's c10d rendezvous, whose store lies with a node that is not killed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script = directory / "train.py"
        script.write_text(SCRIPT)
        port = free_port()
        node = [str(BIN / "torchrun"), "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        node += [f"--nnodes=1:{NUM_NODES}", "--max-restarts=3", "--local-addr=127.0.0.1"]
        node += ["--rdzv-id=bench", str(script), name]
        job = Job(directory)
        try:
            job.start([node], variables)  # the first one has the store
            job.until(lambda: is_open(port), limit)
            job.start([node] * (NUM_NODES - 1), variables)
            return seconds_to_recover(job, victim, limit)
        finally:
            job.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_open(port: int) -> bool:
    """Whether a process listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


SIDES: dict[str, Callable[[str, float], float | None]] = {
    "remesh run": measure_remesh,
    "torchrun": measure_torchrun,
    "torchrun, own store": partial(measure_torchrun, variables=OWN_STORE),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to come back")
    options = parser.parse_args(arguments)
    results: dict[str, list[float | None]] = {}
    for _ in range(options.repeats):
        for victim in ("worker", "agent"):
            for side, measure in SIDES.items():
                seconds = measure(victim, options.limit)
                results.setdefault(f"{side}, {victim} killed", []).append(seconds)
                sys.stderr.write(f"{side}, {victim} killed: {seconds} s\n")
    rows = []
    for name, times in results.items():
        back = [seconds for seconds in times if seconds is not None]
        shown = f"{median(back):.1f}" if back else "-"
        rows.append([name, f"{len(back)} of {len(times)}", shown])
    print_table("From a kill to the first new step", ["", "came back", "median, s"], rows)
    write_json("elastic", {"limit": options.limit, "results": results})


if __name__ == "__main__":
    main()
