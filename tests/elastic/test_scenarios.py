"""Machines that die, leave and join, with real processes: four agents are four nodes."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest

from remesh.elastic.agent import EXIT_DRAINED, EXIT_REPLACE
from tests.elastic.cluster import SILENCE_OF_THE_DEAD, Cluster, kill
from tests.elastic.train import uninterrupted

pytestmark = pytest.mark.timeout(1200)

slow = pytest.mark.slow


def assert_same_run(cluster: Cluster) -> None:
    """No step is missing, and each had the loss of an uninterrupted run every time it was made.

    The ranks of a world were told the same number of restarts.
    """
    starts = [entry for entry in cluster.said() if entry["kind"] == "start"]
    restarts = {(entry["world"], entry["restarts"]) for entry in starts}
    assert len(restarts) == len({world for world, _ in restarts})
    losses, expected = cluster.losses(), uninterrupted(cluster.step + 1)
    assert sorted(losses) == list(range(cluster.step + 1))
    for step, values in losses.items():
        assert values == pytest.approx([expected[step]] * len(values), rel=1e-4), f"step {step}"


def charged(cluster: Cluster) -> dict[int, int]:
    return {node.id: node.num_charged for node in cluster.status().nodes if node.num_charged}


def history(cluster: Cluster) -> str:
    return "\n".join(line.text for line in cluster.status().history)


def test_a_killed_process_costs_a_restart_of_its_node_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2") as cluster:
        cluster.start(0, 1)
        cluster.until_step(12)
        cluster.kill_worker(1)
        cluster.until_round(2)
        assert charged(cluster) == {1: 1}
        status = cluster.status()
        first = status.failures[0].failures[0]
        assert (first.node_id, first.rank, first.signal) == (1, 1, "SIGKILL")
        cluster.until_trained(0, 1, round_after=1)
        cluster.stop(0, 1)
        assert cluster.status().phase == "succeeded"
        assert_same_run(cluster)


def test_the_world_shrinks_when_a_node_dies(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:2", silence=SILENCE_OF_THE_DEAD) as cluster:
        cluster.start(0, 1)
        before = cluster.until_trained(0, 1)
        cluster.kill_agent(0)
        cluster.until_trained(1, round_after=before)
        cluster.stop(1)
        assert charged(cluster) == {}
        assert [entry["size"] for entry in cluster.said() if entry["kind"] == "end"] == [1]
        assert_same_run(cluster)


@slow
def test_four_nodes_shrink_to_two_when_one_dies_and_grow_back(tmp_path: Path) -> None:
    unit = ("--node-unit", "2")
    with Cluster(tmp_path, "2:4", silence=SILENCE_OF_THE_DEAD, agent=unit) as cluster:
        cluster.start(3, 1, 2, 0)
        before = cluster.until_trained(0, 1, 2, 3)
        cluster.kill_agent(1)
        before = cluster.until_trained(0, 2, round_after=before)
        waiting = [node.id for node in cluster.status().nodes if node.state == "ready"]
        assert waiting == [3]
        cluster.start(1)
        cluster.until_trained(0, 1, 2, 3, round_after=before)
        cluster.stop(0, 1, 2, 3)
        assert charged(cluster) == {}
        sizes = [entry["size"] for entry in cluster.said() if entry["kind"] == "start"]
        assert sorted(set(sizes)) == [2, 4]
        assert_same_run(cluster)


@slow
def test_the_node_with_rank_0_dies(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:3", silence=SILENCE_OF_THE_DEAD) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        cluster.kill_agent(0)
        cluster.until_trained(1, 2, round_after=before)
        cluster.stop(1, 2)
        assert charged(cluster) == {}
        assert_same_run(cluster)


@slow
def test_the_master_dies_while_the_job_runs(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2") as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        cluster.master.kill()
        cluster.master.wait()
        before = cluster.step
        cluster.until_step(before + 10)  # the training goes on without it
        cluster.start_master()
        status = cluster.status()
        assert status.round == 1
        assert [(node.id, node.state) for node in status.nodes] == [(0, "active"), (1, "active")]
        cluster.kill_worker(0)
        cluster.until_trained(0, 1, round_after=1)
        cluster.stop(0, 1)
        assert_same_run(cluster)


@slow
def test_the_master_dies_while_nodes_join(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2") as cluster:
        cluster.start(0)
        cluster.until(lambda: [node.id for node in cluster.status().nodes] == [0])
        cluster.master.kill()
        cluster.master.wait()
        cluster.start(1)
        cluster.start_master()
        cluster.until_step(20)
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
        assert charged(cluster) == {}
        cluster.stop(0, 1)
        assert_same_run(cluster)
        assert {len(values) for values in cluster.losses().values()} == {1}


@slow
def test_a_hanging_rank_is_found_its_stack_shown_and_the_job_restarted(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", master=("--hang-timeout", "15")) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        (tmp_path / "hang-1").touch()
        cluster.until(lambda: re.search(r"\bhang\b", cluster.status().stacks.get(1, "")))
        cluster.until(lambda: "train.py" in cluster.status().stacks.get(0, ""))
        assert "the job hangs: no rank has finished a step for" in history(cluster)
        cluster.until_trained(0, 1, round_after=1)
        cluster.stop(0, 1)
        assert_same_run(cluster)


@slow
def test_two_failures_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, "3:3") as cluster:
        cluster.start(0, 1, 2)
        cluster.until_step(8)
        pids = [cluster.pid_of(0), cluster.pid_of(2)]
        # Stopped, the second cannot die of what happens to the first.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                kill(pid, number)
        cluster.until_trained(0, 1, 2, round_after=1)
        cluster.stop(0, 1, 2)
        assert {0} <= charged(cluster).keys() <= {0, 2}
        assert_same_run(cluster)


@slow
def test_a_late_node_is_taken_in_after_a_checkpoint(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:2", master=("--save-grace", "300")) as cluster:
        cluster.start(0)
        cluster.until_step(8)
        cluster.until(lambda: cluster.status().saved)
        before = cluster.status().saved or 0
        cluster.start(1)
        cluster.until_trained(0, 1, round_after=1)
        grown = [entry for entry in cluster.said() if entry["size"] == 2]
        taken_in = next(entry["step"] for entry in grown if entry["kind"] == "step")
        resumed = next(entry["step"] for entry in grown if entry["kind"] == "resume")
        assert resumed == taken_in > before
        # The master hears of a save that the restart overtook with the next heartbeat.
        cluster.until(lambda: (cluster.status().saved or 0) >= taken_in)
        assert charged(cluster) == {}
        cluster.stop(0, 1)
        assert_same_run(cluster)
        # The ranks waited for the restart after the save, so no step was made in vain.
        assert {len(values) for values in cluster.losses().values()} == {1}


def injected(directory: Path, program: str) -> dict[str, str]:
    """An environment in which the process of the node check runs a program first."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        f"import sys\nif 'remesh.elastic.node_check' in sys.orig_argv:\n    {program}\n"
    )
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}


@slow
def test_a_node_that_fails_the_check_is_not_used(tmp_path: Path) -> None:
    broken = injected(tmp_path / "inject", "import os; os._exit(3)")
    with Cluster(tmp_path, "2:3", master=("--check",)) as cluster:
        cluster.start(0, 2)
        cluster.start(1, environment=broken)
        assert cluster.exit_code(1) == EXIT_REPLACE
        cluster.until_trained(0, 2)
        cluster.stop(0, 2)
        status = cluster.status()
        excluded = [node for node in status.nodes if node.state == "excluded"]
        assert [node.id for node in excluded] == [1]
        assert "the test ended with exit code 3" in excluded[0].reason
        assert {entry["size"] for entry in cluster.said()} == {2}
        assert_same_run(cluster)


@slow
def test_a_slow_node_is_done_without(tmp_path: Path) -> None:
    # A clock that runs fast makes everything else look slow.
    slow_down = "import time; now = time.monotonic; time.monotonic = lambda: 30 * now()"
    options = ("--check", "--exclude-stragglers")
    with Cluster(tmp_path, "2:3", master=options) as cluster:
        cluster.start(0, 1)
        cluster.start(2, environment=injected(tmp_path / "inject", slow_down))
        assert cluster.exit_code(2) == EXIT_REPLACE
        cluster.until_trained(0, 1)
        cluster.stop(0, 1)
        excluded = [node for node in cluster.status().nodes if node.state == "excluded"]
        assert [node.id for node in excluded] == [2]
        assert "is a straggler" in excluded[0].reason
        assert_same_run(cluster)


@slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow-1").touch()

    def is_named() -> bool:
        """Now and then another rank is slow too, or the others are."""
        slow_ranks = {rank.rank: rank.slow for rank in cluster.status().ranks if rank.slow}
        return slow_ranks.keys() == {1} and 3 < (slow_ranks[1] or 0) < 30

    def is_measured() -> bool:
        with urlopen(f"{cluster.url}/metrics") as response:
            metrics = response.read().decode()
        seconds = dict(re.findall(r'remesh_rank_step_seconds{rank="(.)"} (.+)', metrics))
        return seconds.keys() >= {"0", "1"} and float(seconds["1"]) > 3 * float(seconds["0"])

    with Cluster(tmp_path, "1:1", agent=("--nproc-per-node", "3")) as cluster:
        cluster.start(0)
        cluster.until(is_named)
        cluster.until(is_measured)
        cluster.stop(0)
        assert_same_run(cluster)


@slow
def test_a_flapping_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:3", silence=SILENCE_OF_THE_DEAD) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        for _ in range(3):
            cluster.kill_agent(2)
            cluster.until_world(0, 1, round_after=before)
            cluster.start(2)
            before = cluster.until_trained(0, 1, 2, round_after=before + 1)
        cluster.stop(0, 1, 2)
        assert_same_run(cluster)


@slow
def test_a_node_that_keeps_failing_ends_the_job_with_its_error(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", agent=("--max-restarts", "1")) as cluster:
        cluster.start(0, 1)
        for number in (1, 2):
            cluster.until_trained(0, 1, round_after=number - 1)
            cluster.kill_worker(1)
        assert cluster.exit_code(1) == 1
        assert cluster.exit_code(0) == 1
        status = cluster.status()
        assert status.phase == "failed"
        assert "the 1 restarts of its node are used up" in status.reason


@pytest.mark.parametrize(
    "num_failures",
    [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(1500)
def test_many_failures_in_a_row(tmp_path: Path, num_failures: int) -> None:
    seed = int(os.environ.get("REMESH_TEST_SEED", "7"))
    dice = random.Random(seed)
    # A living node that is taken for dead is one accident more.
    with Cluster(tmp_path, "1:3", silence=3, agent=("--max-restarts", "100")) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        for _ in range(num_failures):
            cluster.until_step(cluster.step + dice.randint(1, 8))
            before = cluster.status().round
            number = dice.randrange(3)
            if dice.random() < 0.6:
                cluster.kill_worker(number)
            else:
                cluster.kill_agent(number)
                cluster.start(number)
            cluster.until_round(before + 1)
        cluster.until_trained(0, 1, 2)
        cluster.stop(0, 1, 2)
        assert_same_run(cluster)
