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
from tests.elastic.cluster import SILENCE_OF_THE_DEAD, Cluster, broken_check

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
def test_four_nodes_shrink_to_two_when_one_dies_and_grow_back(tmp_path: Path) -> None:
    unit = ("--node-unit", "2")
    with Cluster(tmp_path, "2:4", silence=SILENCE_OF_THE_DEAD, agent=unit) as cluster:
        cluster.start(3, 1, 2, 0)
        before = cluster.until_trained(0, 1, 2, 3)
        cluster.kill_agent(0)  # the one with rank 0, whose agent has the store
        before = cluster.until_trained(1, 2, round_after=before)
        waiting = [node.id for node in cluster.status().nodes if node.state == "ready"]
        assert waiting == [3]
        cluster.start(0)
        cluster.until_trained(0, 1, 2, 3, round_after=before)
        cluster.stop(0, 1, 2, 3)
        sizes = [entry["size"] for entry in cluster.said("start")]
        assert sorted(set(sizes)) == [2, 4]
        assert_same_run(cluster)


@slow
def test_the_master_dies_while_nodes_join_and_while_they_train(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2") as cluster:
        cluster.start(0)
        cluster.until(lambda: [node.id for node in cluster.status().nodes] == [0])
        cluster.master.kill()
        cluster.start(1)
        cluster.master.start()
        cluster.until_step(8)
        cluster.master.kill()
        before = cluster.step
        cluster.until_step(before + 10)  # the training goes on without it
        cluster.master.start()
        status = cluster.status()
        assert status.round == 1
        assert [(node.id, node.state) for node in status.nodes] == [(0, "active"), (1, "active")]
        cluster.kill_worker(0)
        cluster.until_trained(0, 1, round_after=1)
        cluster.stop(0, 1)
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


def broken_node(directory: Path) -> dict[str, str]:
    """The environment of a node whose check fails."""
    return {
        "PYTHONPATH": os.pathsep.join(
            [broken_check(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    }


@slow
def test_a_node_that_fails_the_check_is_not_used(tmp_path: Path) -> None:
    broken = broken_node(tmp_path / "inject")
    with Cluster(tmp_path, "1:1", master=("--check",)) as cluster:
        cluster.start(0, environment=broken)
        assert cluster.exit_code(0) == EXIT_REPLACE
        (node,) = cluster.status().nodes
        assert node.state == "excluded"
        assert "the test ended with exit code 3" in node.reason
        assert cluster.said() == []


@pytest.mark.nightly
def test_the_other_nodes_train_without_one_that_fails_the_check(tmp_path: Path) -> None:
    # Nightly: on a machine that does much else, the test of healthy nodes may take too long.
    broken = broken_node(tmp_path / "inject")
    with Cluster(tmp_path, "2:3", master=("--check",)) as cluster:
        cluster.start(0, 2)
        cluster.start(1, environment=broken)
        assert cluster.exit_code(1) == EXIT_REPLACE
        cluster.until_trained(0, 2)
        cluster.stop(0, 2)
        excluded = [node for node in cluster.status().nodes if node.state == "excluded"]
        assert [node.id for node in excluded] == [1]
        assert {entry["size"] for entry in cluster.said()} == {2}
        assert_same_run(cluster)


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
