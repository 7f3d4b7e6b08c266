"""Real processes that go on when the world changes: what they lose, and which they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.campaigns.settings import dice_of, lengths, share
from tests.elastic import fsdp_job
from tests.elastic.cluster import SILENCE_OF_THE_DEAD, Cluster
from tests.elastic.variants_job import VARIANTS

pytestmark = pytest.mark.timeout(1200)

slow = pytest.mark.slow

PATIENT = ("--reentry-timeout", "120")
"""A process of a slow machine is not given up."""

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])


def assert_no_step_lost(cluster: Cluster, device: str = "cpu") -> None:
    """Every step was made, by no process twice, and with the loss of an uninterrupted run.

    A process that was not ready in time takes over what another has made, and makes it not at all.
    """
    made = cluster.said("step")
    expected = fsdp_job.uninterrupted(cluster.step + 1, device)
    assert {one["step"] for one in made} == set(range(cluster.step + 1))
    assert len({(one["pid"], one["step"]) for one in made}) == len(made)
    for one in made:
        assert one["loss"] == pytest.approx(expected[one["step"]], rel=1e-4), one
    assert all(entry["live"] or entry["memory"] for entry in cluster.said("resume"))


def test_processes_go_on_when_others_die_or_fail(tmp_path: Path) -> None:
    with Cluster(tmp_path, "2:2", job="ddp", agent=PATIENT) as cluster:
        cluster.start(0, 1)
        cluster.until_step(5)
        first, second = cluster.pid_of(0), cluster.pid_of(1)
        cluster.kill_worker(1)
        before = cluster.until_trained(0, 1, round_after=1)
        third = cluster.pid_of(1)
        assert (cluster.pid_of(0), third == second) == (first, False)
        (tmp_path / "fail-1").touch()
        cluster.until_trained(0, 1, round_after=before)
        status = cluster.status()
        # None of them has imported torch by itself.
        assert all(one["warm"] for one in cluster.said("start"))
        # The error of the user is charged, and so is the signal.
        assert [node.num_charged for node in status.nodes] == [0, 2]
        logs = [one.log_tail for failure in status.failures for one in failure.failures]
        assert any("an error of the user's" in text for text in logs)
        cluster.stop(0, 1)
        assert [one["entries"] for one in cluster.said("start") if one["pid"] == first] == [0, 1, 2]
        assert_no_step_lost(cluster)


PHASES = ("forward", "backward", "optimizer", "save", "recovery")


def die(cluster: Cluster, phase: str, rank: int, *, victim: str = "") -> None:
    """Have a rank die in a phase, and wait until the training goes on after that."""
    orders = [cluster.directory / f"die-{phase}-{rank}"]
    if phase == "recovery":
        orders.append(cluster.directory / "die-forward-2")  # the one from which it recovers
    before = cluster.status().round
    for order in orders:
        order.write_text(victim)
    cluster.until(lambda: not any(order.exists() for order in orders))
    cluster.until_round(before + len(orders))
    cluster.until_step(cluster.step + 3)


@on_each_device
@lengths("num_rounds", 1, 4)
def test_a_kill_in_every_phase_loses_no_step(tmp_path: Path, device: str, num_rounds: int) -> None:
    agent = ("--max-restarts", "1000", *PATIENT)
    with Cluster(tmp_path, "1:1", job="ddp", agent=agent, processes=3) as cluster:
        cluster.start(0, environment={"TEST_DEVICE": device})
        cluster.until_step(2)
        for number in range(num_rounds):
            for place, phase in enumerate(PHASES):
                die(cluster, phase, 1 if phase == "recovery" else 1 + (place + number) % 2)
        cluster.stop(0)
        assert len({one["pid"] for one in cluster.said("start") if one["rank"] == 0}) == 1
        assert_no_step_lost(cluster, device)


@on_each_device
@slow
def test_a_part_that_is_lost_comes_from_the_snapshot_of_the_same_step(
    tmp_path: Path, device: str
) -> None:
    """FSDP2 with a snapshot after each step: a process dies, and then a node."""
    with Cluster(tmp_path, "1:2", job="shards", agent=PATIENT, saving=("50", "1", "1")) as cluster:
        cluster.start(0, 1, environment={"TEST_DEVICE": device})
        before = cluster.until_trained(0, 1)
        pid = cluster.pid_of(0)
        # The first world may have been one of a single node, if the other one was slow to start.
        alone = [one for one in cluster.said("start") if one["pid"] == pid and one["size"] == 1]
        die(cluster, "forward", 1)
        cluster.until_trained(0, 1, round_after=before)
        die(cluster, "backward", 1, victim="agent")
        cluster.stop(0)
        sizes = [one["size"] for one in cluster.said("start") if one["pid"] == pid]
        assert sizes == [1] * len(alone) + [2, 2, 1]
        assert_no_step_lost(cluster, device)


@on_each_device
@slow
def test_processes_go_on_in_smaller_and_larger_worlds(tmp_path: Path, device: str) -> None:
    with Cluster(
        tmp_path,
        "2:3",
        job="ddp",
        silence=SILENCE_OF_THE_DEAD,
        agent=PATIENT,
        saving=("1000000", "0", "0"),
    ) as cluster:
        cluster.start(0, 1, 2, environment={"TEST_DEVICE": device})
        before = cluster.until_trained(0, 1, 2)
        pids = [cluster.pid_of(rank) for rank in (1, 2)]
        cluster.kill_agent(0)  # the one with rank 0, whose process has the store
        before = cluster.until_trained(1, 2, round_after=before)
        assert [cluster.pid_of(rank) for rank in (0, 1)] == pids
        cluster.start(0, environment={"TEST_DEVICE": device})
        cluster.until_trained(0, 1, 2, round_after=before)
        assert [cluster.pid_of(rank) for rank in (1, 2)] == pids
        assert not list((tmp_path / "checkpoints").glob("step_*"))  # nothing was saved for it
        cluster.stop(0, 1, 2)
        assert sorted({one["size"] for one in cluster.said("start")}) == [2, 3]
        assert_no_step_lost(cluster, device)


@slow
def test_a_process_that_hangs_is_brought_back(tmp_path: Path) -> None:
    hangs = ("--hang-timeout", "5")
    with Cluster(tmp_path, "2:2", job="ddp", master=hangs, agent=PATIENT) as cluster:
        cluster.start(0, 1)
        before = cluster.until_trained(0, 1)
        pids = [cluster.pid_of(rank) for rank in (0, 1)]
        (tmp_path / "hang-1").touch()
        cluster.until_trained(0, 1, round_after=before)
        assert [cluster.pid_of(rank) for rank in (0, 1)] == pids
        cluster.stop(0, 1)
        assert_no_step_lost(cluster)


@pytest.mark.nightly
def test_a_copy_of_what_is_cut_goes_on(tmp_path: Path) -> None:
    """HSDP of 2 x 2, from which a rank is lost: a copy stays, and a process waits as a spare."""
    options = ("--node-unit", "2", *PATIENT)
    with Cluster(
        tmp_path, "2:4", job="hsdp", silence=SILENCE_OF_THE_DEAD, agent=options
    ) as cluster:
        cluster.start(0, 1, 2, 3)
        before = cluster.until_trained(0, 1, 2, 3)
        pids = [cluster.pid_of(rank) for rank in (0, 1, 2)]
        cluster.kill_agent(3)
        before = cluster.until_trained(0, 1, round_after=before)
        assert [cluster.pid_of(rank) for rank in (0, 1)] == pids[:2]
        cluster.start(3)
        cluster.until_trained(0, 1, 2, 3, round_after=before)
        assert [cluster.pid_of(rank) for rank in (0, 1, 2)] == pids
        cluster.stop(0, 1, 2, 3)
        assert_no_step_lost(cluster)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_whose_state_is_more_than_parameters(tmp_path: Path, variant: str) -> None:
    """The curve is that of a run that nothing disturbs, what the loss does not show included."""
    # What was lost of random numbers, or was being changed by all, comes from a snapshot.
    needs_snapshot = variant in {"dropout", "in backward"}
    saving = ("5", "1" if needs_snapshot else "0", "0")
    phases: tuple[str, ...] = ("forward", "backward", "forward")
    if variant != "in backward":  # where all parts of the state change all the time
        phases += ("optimizer", "save")
    curves: list[dict[int, list[float]]] = []
    for kills in ((), phases):
        directory = tmp_path / str(len(curves))
        directory.mkdir()
        agent = ("--max-restarts", "1000", *PATIENT)
        with Cluster(
            directory, "1:1", job="variants", agent=agent, saving=saving, processes=2
        ) as cluster:
            cluster.start(0, environment={"TEST_VARIANT": variant})
            cluster.until_step(2)
            for phase in kills:
                die(cluster, phase, 1)
            cluster.until_step(40)
            cluster.stop(0)
            curves.append(cluster.losses())
    first, second = curves
    for step in first.keys() & second.keys():
        for loss in second[step]:
            assert loss == pytest.approx(first[step][0], rel=1e-5), step


@on_each_device
@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("num_kills", [20, max(20, 200 * share() // 100)])
def test_kills_at_random_moments_lose_no_step(
    tmp_path: Path, device: str, num_kills: int, covered: Callable[[str], None]
) -> None:
    rng = dice_of("processes that go on", num_kills)
    with Cluster(tmp_path, "3:3", job="ddp", agent=("--max-restarts", "1000", *PATIENT)) as cluster:
        cluster.start(0, 1, 2, environment={"TEST_DEVICE": device})
        before = cluster.until_trained(0, 1, 2)
        for _ in range(num_kills):
            cluster.until_step(cluster.step + rng.randrange(1, 4))
            for rank in rng.sample(range(1, 3), rng.choice([1, 1, 2])):
                cluster.kill_worker(rank)
            before = cluster.until_trained(0, 1, 2, round_after=before)
        cluster.stop(0, 1, 2)
        assert len({one["pid"] for one in cluster.said("start") if one["rank"] == 0}) == 1
        assert_no_step_lost(cluster, device)
        covered(f"{num_kills} kills at random moments, {cluster.step + 1} steps, none lost")
