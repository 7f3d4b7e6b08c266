"""The files in examples/slurm on a real Slurm: a job shrinks when a node dies, and grows again.

Runs where Slurm can be reached and its nodes may be set down (by root, on a test bed of at least
four nodes).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remesh.elastic.client import Client
from remesh.elastic.status import Status
from tests.elastic.cluster import TRAIN
from tests.elastic.train import uninterrupted

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ,
        reason="no Slurm: set SLURM_CONF",
    ),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What the jobs of a test find in their environment."""
    tools = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RUN": str(tmp_path / "run"),
        "NNODES": "2:4",
        "NPROC": "1",
        "MASTER_HOST": "127.0.0.1",
        "MASTER_PORT": "0",
        "REMESH_OPTIONS": "--last-call 2 --beat-seconds 0.3 --local-addr 127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


class Slurm:
    """Jobs and nodes of a test."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self.jobs: list[str] = []
        self.down: list[str] = []

    def ask(self, *command: str) -> str:
        """Run a command of Slurm's; what it said."""
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit one of the examples; the job's id."""
        log = str(self._directory / f"{script}-%j.log")
        job = self.ask(
            *("sbatch", "--parsable", "--output", log, *options, str(EXAMPLES / script)),
            *(str(TRAIN), str(self._directory), "0.05"),
        )
        self.jobs.append(job)
        return job

    def state(self, job: str) -> str:
        """The state of a job; empty if it has left the queue."""
        return self.ask("squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T")

    def nodes(self, job: str) -> list[str]:
        """The nodes of a job, the one with the batch script first."""
        names = self.ask("squeue", "--noheader", "--jobs", job, "--format", "%N")
        return self.ask("scontrol", "show", "hostnames", names).split()

    def set_down(self, node: str) -> None:
        """Make a node be lost to its jobs, as one that does not answer any more."""
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        self.down.append(node)

    def tidy_up(self) -> None:
        """Leave Slurm as it was."""
        self.ask("scancel", *self.jobs)
        for node in self.down:  # one that answers may be back by itself
            if self.ask("sinfo", "--noheader", "--nodes", node, "--format", "%T").startswith(
                "down"
            ):
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        deadline = time.monotonic() + 60
        while self.ask("squeue", "--noheader", "--jobs", ",".join(self.jobs), "--format", "%T"):
            assert time.monotonic() < deadline, "the jobs do not end"
            time.sleep(0.5)


@pytest.fixture
def slurm(tmp_path: Path, environment: dict[str, str]) -> Iterator[Slurm]:
    found = Slurm(tmp_path, environment)
    yield found
    found.tidy_up()
    for file in sorted(tmp_path.glob("*.log")):  # seen if the test has failed
        print(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")  # noqa: T201


def until(
    condition: Callable[[], object], status: Callable[[], object], seconds: float = 150
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s: {status()}"
        time.sleep(0.3)


def names_of(status: Status) -> list[str]:
    """The names that Slurm has for the nodes that train, sorted."""
    return sorted(node.name.partition(".")[0] for node in status.nodes if node.rank is not None)


def losses_in(directory: Path) -> dict[int, list[float]]:
    """The losses of each step, once for each time that rank 0 made it."""
    losses: dict[int, list[float]] = {}
    for file in directory.glob("*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            entry = json.loads(line) if line.endswith("\n") else {}
            if entry.get("kind") == "step" and entry["rank"] == 0:
                losses.setdefault(entry["step"], []).append(entry["loss"])
    return losses


def test_a_job_shrinks_when_a_node_is_lost_and_grows_when_one_joins(
    tmp_path: Path, slurm: Slurm
) -> None:
    job = slurm.submit("train.sbatch", "--nodes", "3")
    run = tmp_path / "run"
    until(lambda: (run / "url").is_file() and (run / "url").read_text(), lambda: slurm.state(job))
    token = (run / "token").read_text()
    client = Client((run / "url").read_text().strip(), token=token, patience=30)
    nodes = slurm.nodes(job)
    assert len(nodes) == 3

    def trains_on(names: list[str], round_after: int) -> bool:
        status = client.status()
        return status.round > round_after and names_of(status) == sorted(names)

    def step() -> int:
        return client.status().step or 0

    until(lambda: trains_on(nodes, 0) and step() >= 8, client.status)
    slurm.set_down(nodes[2])
    until(lambda: trains_on(nodes[:2], 1), client.status)
    assert slurm.nodes(job) == nodes[:2]
    before = step()
    until(lambda: step() > before + 5, client.status)

    number = client.status().round
    joined = slurm.submit("join.sbatch", "--array", "1-1")
    until(lambda: trains_on([*nodes[:2], *slurm.nodes(joined)], number), client.status)
    before = step()
    until(lambda: step() > before + 5, client.status)
    assert {slurm.state(job), slurm.state(joined)} == {"RUNNING"}
    assert [node.num_charged for node in client.status().nodes if node.num_charged] == []

    (tmp_path / "stop").touch()
    until(lambda: "RUNNING" not in {slurm.state(job), slurm.state(joined)}, lambda: "they run on")
    losses = losses_in(tmp_path)
    assert sorted(losses) == list(range(len(losses)))
    expected = uninterrupted(len(losses))
    for number, values in losses.items():
        assert values == pytest.approx([expected[number]] * len(values), rel=1e-4)
