"""Machines that die, leave and join, with real processes: four agents are four nodes.

What these tests assert are outcomes: every step is made with the loss of an uninterrupted run, the
job ends as it should, and leaves no process. Which node is charged, and what follows after how many
seconds, is asserted in `test_blame.py`, `test_job.py` and `test_rendezvous.py`, with their clocks.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from remesh.elastic.lifecycle import EXIT_DRAINED, EXIT_REPLACE
from tests.campaigns.settings import dice_of, lengths, seed
from tests.elastic import fsdp_job, numpy_job
from tests.elastic.cluster import Cluster, broken_check

pytestmark = pytest.mark.timeout(1200)

slow = pytest.mark.slow


def assert_same_run(cluster: Cluster) -> None:
    """The curve is that of an uninterrupted run; all ranks of a world count the same restarts."""
    restarts = {(entry["world"], entry["restarts"]) for entry in cluster.said("start")}
    assert len(restarts) == len({world for world, _ in restarts})
    job = numpy_job if cluster.job == "numpy" else fsdp_job
    cluster.assert_losses(job.uninterrupted(cluster.step + 1))


def history(cluster: Cluster) -> str:
    return "\n".join(line.text for line in cluster.status().history)


def test_a_killed_process_costs_a_restart_of_its_node_alone(tmp_path: Path) -> None:
    """With FSDP2 under gloo; the others train without torch, which takes long to import."""
    with Cluster(tmp_path, "2:2", job="fsdp") as cluster:
        cluster.start(0, 1)
        cluster.until_step(12)
        cluster.kill_worker(1)
        cluster.until_round(2)
        status = cluster.status()
        assert [node.num_charged for node in status.nodes] == [0, 1]
        first = status.failures[0].failures[0]
        assert (first.node_id, first.rank, first.signal) == (1, 1, "SIGKILL")
        cluster.until_trained(0, 1, round_after=1)
        cluster.stop(0, 1)
        assert cluster.status().phase == "succeeded"
        assert_same_run(cluster)


@slow
def test_sigterm_drains_a_node_after_a_last_checkpoint(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:3") as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        cluster.agents[2].send_signal(signal.SIGTERM)
        assert cluster.exit_code(2) == EXIT_DRAINED
        cluster.until_trained(0, 1, round_after=before)
        assert "node 2 leaves, drained: SIGTERM, saved at step" in history(cluster)
        cluster.stop(0, 1)
        assert_same_run(cluster)
        assert {len(values) for values in cluster.losses().values()} == {1}


@slow
def test_a_hanging_rank_is_found_its_stack_shown_and_the_job_restarted(tmp_path: Path) -> None:
    # A job that only stands still for so long starts again as well.
    many = ("--max-restarts", "100")
    with Cluster(tmp_path, "2:2", master=("--hang-timeout", "5"), agent=many) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        (tmp_path / "hang-1").touch()
        cluster.until(lambda: re.search(r"\bhang\b", cluster.status().stacks.get(1, "")))
        cluster.until(lambda: "train.py" in cluster.status().stacks.get(0, ""))
        assert "the job hangs: no rank has finished a step for" in history(cluster)
        cluster.until_trained(0, 1, round_after=1)
        assert not (tmp_path / "terminated-1").exists()  # it was killed, not waited for
        cluster.stop(0, 1)
        assert_same_run(cluster)


@slow
def test_a_late_node_is_taken_in_after_a_checkpoint(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:2", master=("--save-grace", "300")) as cluster:
        cluster.start(0)
        cluster.until_step(8)
        cluster.until(lambda: cluster.status().saved_step)
        before = cluster.status().saved_step or 0
        cluster.start(1)
        cluster.until_trained(0, 1, round_after=1)
        grown = [entry for entry in cluster.said() if entry["size"] == 2]
        taken_in = next(entry["step"] for entry in grown if entry["kind"] == "step")
        resumed = next(entry["step"] for entry in grown if entry["kind"] == "resume")
        assert resumed == taken_in > before
        # The master hears of a save that the restart overtook with the next heartbeat.
        cluster.until(lambda: (cluster.status().saved_step or 0) >= taken_in)
        cluster.stop(0, 1)
        assert_same_run(cluster)
        # The ranks waited for the restart after the save, so no step was made in vain.
        assert {len(values) for values in cluster.losses().values()} == {1}


@slow
def test_a_node_that_fails_the_check_is_not_used(tmp_path: Path) -> None:
    paths = [broken_check(tmp_path / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Cluster(tmp_path, "1:1", master=("--check",)) as cluster:
        cluster.start(0, environment={"PYTHONPATH": os.pathsep.join(paths)})
        assert cluster.exit_code(0) == EXIT_REPLACE
        (node,) = cluster.status().nodes
        assert node.state == "excluded"
        assert "the test ended with exit code 3" in node.reason
        assert cluster.said() == []


@slow
@pytest.mark.timeout(3600)
@lengths("num_failures", 3, 20)
def test_many_failures_in_a_row(
    tmp_path: Path, num_failures: int, covered: Callable[[str], None]
) -> None:
    rng = dice_of("failures in a row", num_failures)
    # A living node that is taken for dead is one accident more.
    with Cluster(tmp_path, "1:3", silence=3, agent=("--max-restarts", "100")) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        for _ in range(num_failures):
            cluster.until_step(cluster.step + rng.randint(1, 8))
            before = cluster.status().round
            number = rng.randrange(3)
            if rng.random() < 0.6:
                cluster.kill_worker(number)
            else:
                cluster.kill_agent(number)
                cluster.start(number)
            cluster.until_round(before + 1)
        cluster.until_trained(0, 1, 2)
        cluster.stop(0, 1, 2)
        assert_same_run(cluster)
        covered(f"seed {seed()}: {num_failures} failures, {cluster.step} steps")
