"""The example in examples/slurm on a real Slurm: nodes die, join, and run out of time.

Runs where Slurm can be reached and its nodes may be set down (by root, on a test bed of at least
four nodes). Where `REMESH_TEST_KILL_NODE` and `REMESH_TEST_RESTORE_NODE` name commands that take a
node, nodes die by them without a word to Slurm.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remesh.elastic.client import Client
from tests.elastic.agents import patient_status
from tests.elastic.cluster import TRAIN
from tests.elastic.fsdp_job import uninterrupted
from tests.elastic.training_log import TrainingLog

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "slurm" / "train.sbatch"
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()

pytestmark = [
    pytest.mark.timeout(1800),
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
        "REQUEUE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


class Slurm:
    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self.environment = environment
        self.jobs: list[str] = []
        self.dead: list[str] = []
        self.drained: list[str] = []

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, tasks: str, **environment: str) -> str:
        """Submit tasks of the example; the id of their array."""
        self.environment |= environment
        log = str(self._directory / "task-%a.log")
        job = self.ask(
            *("sbatch", "--parsable", "--output", log, "--array", tasks),
            *(str(EXAMPLE), str(TRAIN), str(self._directory), "fsdp", "0.05"),
        )
        self.jobs.append(job)
        return job

    def states(self, *arrays: str) -> set[str]:
        jobs = ",".join(arrays or self.jobs)
        form = ("--array", "--noheader", "--states", "all", "--format", "%T")
        return set(self.ask("squeue", "--jobs", jobs, *form).split())

    def node_of(self, task: int, array: int = 0) -> str:
        name = f"{self.jobs[array]}_{task}"
        return self.ask("squeue", "--noheader", "--jobs", name, "--format", "%N")

    def excluded_by(self, task: int) -> str:
        """The nodes that a task of the first array must not get."""
        shown = self.ask("scontrol", "show", "job", f"{self.jobs[0]}_{task}")
        (found,) = [word for word in shown.split() if word.startswith("ExcNodeList=")]
        return found.removeprefix("ExcNodeList=")

    def kill(self, node: str) -> None:
        self.dead.append(node)
        if "REMESH_TEST_KILL_NODE" in os.environ:
            self.ask(os.environ["REMESH_TEST_KILL_NODE"], node)
        else:
            self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def start_requeued(self, task: int, array: int = 0) -> None:
        """Wait until a task is requeued, and do without the two minutes that Slurm lets it wait."""
        name = f"{self.jobs[array]}_{task}"
        form = ("--noheader", "--format", "%T")
        until(lambda: self.ask("squeue", "--jobs", name, *form) == "PENDING", self.states)
        self.ask("scontrol", "update", f"jobid={name}", "starttime=now")

    def restore(self) -> None:
        """Let Slurm use the dead nodes again."""
        while self.dead:
            node = self.dead.pop()
            if "REMESH_TEST_RESTORE_NODE" in os.environ:
                self.ask(os.environ["REMESH_TEST_RESTORE_NODE"], node)
            # One that answers may be back by itself.
            form = ("--noheader", "--nodes", node, "--format", "%T")
            if self.ask("sinfo", *form).startswith("down"):
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")

    def tidy_up(self) -> None:
        """Leave Slurm as it was."""
        self.ask("scancel", *self.jobs)
        self.restore()
        for node in self.drained:
            self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        left = ("squeue", "--noheader", "--jobs", ",".join(self.jobs), "--format", "%T")
        until(lambda: not self.ask(*left), self.states)


@pytest.fixture
def slurm(tmp_path: Path, environment: dict[str, str]) -> Iterator[Slurm]:
    # One test at a time: each needs all nodes.
    with Path(tempfile.gettempdir(), "remesh-test-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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


class Job:
    """A training, as its master sees it."""

    def __init__(self, slurm: Slurm, directory: Path) -> None:
        self._slurm, self._directory = slurm, directory
        run = Path(slurm.environment["RUN"])
        until(lambda: (run / "url").exists() and (run / "url").read_text(), slurm.states)
        token = (run / "token").read_text()
        self.client = Client(str(run / "url"), token=token, patience=150)

    def until_trained(self, *nodes: int, round_after: int = 0) -> int:
        """Wait until nodes, and no others, have made steps in a round; the round."""

        def formed() -> bool:
            status = patient_status(self.client)
            trains = [node.id for node in status.nodes if node.node_rank is not None]
            return status.round > round_after and sorted(trains) == sorted(nodes)

        until(formed, lambda: patient_status(self.client))
        status = patient_status(self.client)
        until(
            lambda: (patient_status(self.client).step or 0) > (status.step or 0) + 5,
            lambda: patient_status(self.client),
        )
        return status.round

    def stop(self) -> None:
        """Let the training end; check that all tasks end well and each step had its loss."""
        (self._directory / "stop").touch()
        until(lambda: self._slurm.states() == {"COMPLETED"}, self._slurm.states)
        log = TrainingLog(self._directory)
        log.assert_losses(uninterrupted(log.step + 1))


@pytest.mark.nightly
def test_nodes_die_and_join(tmp_path: Path, slurm: Slurm) -> None:
    slurm.submit("0-2")
    job = Job(slurm, tmp_path)
    number = job.until_trained(0, 1, 2)
    slurm.kill(slurm.node_of(2))
    number = job.until_trained(0, 1, round_after=number)
    slurm.submit("3")
    number = job.until_trained(0, 1, 3, round_after=number)
    slurm.restore()  # the other nodes are taken
    slurm.start_requeued(2)
    job.until_trained(0, 1, 2, 3, round_after=number)
    assert [node.num_charged for node in job.client.status().nodes if node.num_charged] == []
    job.stop()


@pytest.mark.nightly
def test_a_broken_node_is_excluded_and_another_has_more_processes(
    tmp_path: Path, slurm: Slurm
) -> None:
    patterns = tmp_path / "patterns.json"
    patterns.write_text('{"node": ["an error of the user\'s"]}')
    (line,) = re.findall(r"^\$ export (ON_EXCLUDED=.*)$", PAGE, re.MULTILINE)
    variable, _, command = shlex.split(line)[0].partition("=")
    slurm.submit("0-1", MASTER_OPTIONS=f"--failure-patterns {patterns}", **{variable: command})
    job = Job(slurm, tmp_path)
    number = job.until_trained(0, 1)
    broken = slurm.node_of(1)
    slurm.drained.append(broken)
    (tmp_path / "fail-1").touch()
    until(lambda: slurm.excluded_by(1) == broken, slurm.states)
    assert slurm.ask("sinfo", "--noheader", "--nodes", broken, "--format", "%T").startswith("drain")
    run = Path(slurm.environment["RUN"])
    until((run / "excluded").exists, slurm.states)
    assert (run / "excluded").read_text() == f"{broken}\n"
    slurm.start_requeued(1)
    number = job.until_trained(0, 1, round_after=number)
    assert slurm.node_of(1) != broken
    slurm.submit("2", NPROC="2")
    job.until_trained(0, 1, 2, round_after=number)
    assert sum(node.num_processes for node in job.client.status().nodes) == 4
    job.stop()


@pytest.mark.nightly
def test_a_heterogeneous_job_ends_as_one(tmp_path: Path, slurm: Slurm) -> None:
    script = tmp_path / "job.sbatch"
    part = "#SBATCH --nodes=1 --exclusive --no-requeue\n"
    step = f"srun --het-group=0,1 sh -c 'touch {tmp_path}/$SLURMD_NODENAME; exec sleep 900'\n"
    script.write_text(f"#!/bin/bash\n{part}#SBATCH hetjob\n{part}{step}")
    log = str(tmp_path / "job.log")
    job = slurm.ask("sbatch", "--parsable", "--output", log, str(script))
    slurm.jobs.append(job)

    def nodes() -> list[str]:
        form = ("--noheader", "--states", "R", "--format", "%i %N")
        lines = slurm.ask("squeue", "--jobs", job, *form).splitlines()
        return [line.split()[1] for line in sorted(lines)]

    until(lambda: len(nodes()) == 2 and all((tmp_path / each).exists() for each in nodes()), nodes)
    slurm.kill(nodes()[1])  # not the one with the script
    until(lambda: nodes() == [], slurm.states)


@pytest.mark.slow
def test_the_node_of_the_master_dies(tmp_path: Path, slurm: Slurm) -> None:
    slurm.submit("0-1")
    job = Job(slurm, tmp_path)
    number = job.until_trained(0, 1)
    slurm.kill(slurm.node_of(0))
    slurm.start_requeued(0)
    job.until_trained(0, 1, round_after=number)
    job.stop()


@pytest.mark.slow
def test_a_task_that_is_requeued_after_the_end_ends_too(tmp_path: Path, slurm: Slurm) -> None:
    array = slurm.submit("0-1")
    job = Job(slurm, tmp_path)
    number = job.until_trained(0, 1)
    slurm.submit("2")  # of an array without a master
    number = job.until_trained(0, 1, 2, round_after=number)
    slurm.kill(slurm.node_of(2, array=1))
    job.until_trained(0, 1, round_after=number)
    (tmp_path / "stop").touch()
    until(lambda: slurm.states(array) == {"COMPLETED"}, slurm.states)
    slurm.restore()
    slurm.start_requeued(2, array=1)
    job.stop()


@pytest.mark.slow
def test_at_the_time_limit_the_state_is_saved_and_the_job_goes_on_later(
    tmp_path: Path, slurm: Slurm
) -> None:
    slurm.environment["REQUEUE"] = "1"
    array = slurm.submit("0-1")
    job = Job(slurm, tmp_path)
    number = job.until_trained(0, 1)
    # What Slurm does some time before the limit (--signal): to the steps, not to the script.
    slurm.ask("scancel", "--signal", "TERM", f"{array}_1")
    slurm.start_requeued(1)
    job.until_trained(0, 1, round_after=number)
    assert " Restarts=0 " in slurm.ask("scontrol", "show", "job", f"{array}_0")
    losses = TrainingLog(tmp_path).losses()
    assert max(map(len, losses.values())) == 1, "a step was lost"
    job.stop()
