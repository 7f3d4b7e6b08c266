"""Machines that die, leave and join, with real processes: four agents are four nodes."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.elastic.cluster import Cluster
from tests.elastic.train import uninterrupted

pytestmark = pytest.mark.timeout(600)

slow = pytest.mark.slow


def assert_same_run(cluster: Cluster, num_steps: int) -> None:
    """Every step was made, each time with the loss of a run without interruption."""
    losses, expected = cluster.losses(), uninterrupted(num_steps)
    assert sorted(losses) == list(range(num_steps))
    for step, values in losses.items():
        for value in values:
            assert value == pytest.approx(expected[step], rel=1e-4), f"step {step}"


def charged(cluster: Cluster) -> dict[int, int]:
    return {node.id: node.num_charged for node in cluster.status().nodes if node.num_charged}


def test_a_killed_process_costs_a_restart_of_its_node_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", 60) as cluster:
        cluster.start(0, 1)
        cluster.until_step(12)
        cluster.kill_worker(1)
        cluster.until_round(2)
        assert charged(cluster) == {1: 1}
        status = cluster.status()
        first = status.failures[0].failures[0]
        assert (first.node_id, first.rank, first.signal) == (1, 1, "SIGKILL")
        cluster.finish(0, 1)
        assert cluster.status().phase == "succeeded"
        assert_same_run(cluster, 60)


def test_four_nodes_shrink_to_two_when_one_dies_and_grow_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:4", 400, agent=("--node-unit", "2")) as cluster:
        cluster.start(3, 1, 2, 0)
        cluster.until_world(0, 1, 2, 3)
        cluster.until_step(8)
        cluster.kill_agent(1)
        cluster.until_world(0, 2, round_after=1)
        waiting = [node.id for node in cluster.status().nodes if node.state == "ready"]
        assert waiting == [3]
        before = cluster.step
        cluster.until_step(before + 5)
        cluster.start(1)
        cluster.until_world(0, 1, 2, 3, round_after=2)
        # The world grew after a checkpoint, so no step was lost.
        assert charged(cluster) == {}
        cluster.until_step(before + 20)
        sizes = [entry["size"] for entry in cluster.said() if entry["kind"] == "start"]
        assert sorted(set(sizes)) == [2, 4]
        for number in range(4):
            cluster.agents[number].send_signal(signal.SIGINT)
        losses, expected = cluster.losses(), uninterrupted(400)
        for step, values in losses.items():
            assert values == pytest.approx([expected[step]] * len(values), rel=1e-4)


@slow
def test_the_node_with_rank_0_dies(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:3", 100) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        cluster.until_step(8)
        cluster.kill_agent(0)
        cluster.until_world(1, 2, round_after=1)
        cluster.finish(1, 2)
        assert charged(cluster) == {}
        assert_same_run(cluster, 100)


@slow
def test_the_master_dies_while_the_job_runs(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", 150) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        cluster.master.kill()
        cluster.master.wait()
        before = cluster.step
        cluster.until_step(before + 10)  # the training goes on without it
        cluster.start_master()
        assert cluster.status().round == 1
        assert cluster.world() == [0, 1]
        cluster.kill_worker(0)
        cluster.until_round(2)
        cluster.finish(0, 1)
        assert_same_run(cluster, 150)


@slow
def test_the_master_dies_while_nodes_join(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", 20) as cluster:
        cluster.start(0)
        cluster.until(lambda: [node.id for node in cluster.status().nodes] == [0])
        cluster.master.kill()
        cluster.master.wait()
        cluster.start(1)
        cluster.start_master()
        cluster.finish(0, 1)
        assert_same_run(cluster, 20)


@slow
def test_sigterm_drains_a_node_after_a_last_checkpoint(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:3", 200) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        cluster.until_step(8)
        cluster.agents[2].send_signal(signal.SIGTERM)
        assert cluster.agents[2].wait(60) == 143
        cluster.until_world(0, 1, round_after=1)
        history = " ".join(line.text for line in cluster.status().history)
        assert "node 2 leaves, drained: SIGTERM, saved at step" in history
        assert charged(cluster) == {}
        cluster.finish(0, 1)
        assert_same_run(cluster, 200)


@slow
def test_a_hanging_rank_is_found_its_stack_shown_and_the_job_restarted(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", 60, master=("--hang-timeout", "5")) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        (tmp_path / "hang-1").touch()
        cluster.until(lambda: cluster.status().phase == "hanging")
        cluster.until(lambda: cluster.status().stacks.keys() >= {0, 1})
        assert "train.py" in cluster.status().stacks[1]
        cluster.until_round(2)
        cluster.finish(0, 1)
        assert_same_run(cluster, 60)


@slow
def test_two_failures_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, "3:3", 80) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_step(8)
        first, second = cluster.pid_of(0), cluster.pid_of(2)
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        cluster.until_round(2)
        cluster.finish(0, 1, 2)
        assert set(charged(cluster)) <= {0, 2}
        assert_same_run(cluster, 80)


@slow
def test_a_flapping_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:3", 500) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        for _ in range(3):
            before = cluster.status().round
            cluster.until_step(cluster.step + 3)
            cluster.kill_agent(2)
            cluster.until_world(0, 1, round_after=before)
            cluster.start(2)
            cluster.until_world(0, 1, 2, round_after=before + 1)
        cluster.until_step(cluster.step + 5)
        losses, expected = cluster.losses(), uninterrupted(500)
        for step, values in losses.items():
            assert values == pytest.approx([expected[step]] * len(values), rel=1e-4)


@slow
def test_a_node_that_keeps_failing_ends_the_job_with_its_error(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", 500, agent=("--max-restarts", "1")) as cluster:
        cluster.start(0, 1)
        for number in (1, 2):
            cluster.until_round(number)
            cluster.until_step(cluster.step + 3)
            cluster.kill_worker(1)
        assert cluster.agents[1].wait(60) == 1
        assert cluster.agents[0].wait(60) == 1
        status = cluster.status()
        assert status.phase == "failed"
        assert "the 1 restarts of its node are used up" in status.reason


@slow
def test_many_failures_in_a_row(tmp_path: Path) -> None:
    seed = int(os.environ.get("REMESH_TEST_SEED", "7"))
    dice = random.Random(seed)
    with Cluster(tmp_path, "1:3", 100_000, agent=("--max-restarts", "100")) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        for _ in range(20):
            before = cluster.status().round
            cluster.until(lambda: cluster.status().phase == "running")
            cluster.until_step(cluster.step + dice.randint(1, 8))
            if dice.random() < 0.6:
                cluster.kill_worker(dice.randrange(len(cluster.world())))
            else:
                number = dice.choice(cluster.world())
                cluster.kill_agent(number)
                cluster.start(number)
            cluster.until_round(before + 1)
        cluster.until_step(cluster.step + 5)
        losses, expected = cluster.losses(), uninterrupted(cluster.step + 1)
        assert sorted(losses) == list(range(len(losses)))
        for step, values in losses.items():
            assert values == pytest.approx([expected[step]] * len(values), rel=1e-4)
