"""Processes and nodes that die, with snapshots in memory; real processes, agents are nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import remesh
from remesh.elastic.directories import SNAPSHOTS, remove_abandoned, snapshot_directory
from tests.elastic.cluster import SILENCE, SILENCE_OF_THE_DEAD, Cluster
from tests.elastic.test_scenarios import assert_same_run

pytestmark = pytest.mark.timeout(1200)

slow = pytest.mark.slow


@pytest.fixture
def memory() -> Iterator[Path]:
    """Where the agents of a test keep snapshots."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="remesh-test-", dir=parent) as directory:
        yield Path(directory)


def cluster_of(
    directory: Path,
    memory: Path,
    nodes: str,
    *,
    saving: tuple[str, ...],
    silence: float = SILENCE,
    agent: tuple[str, ...] = (),
    job: Literal["numpy", "fsdp"] = "numpy",
) -> Cluster:
    options = ("--snapshot-dir", str(memory), *agent)
    return Cluster(directory, nodes, silence=silence, agent=options, job=job, saving=saving)


def resumes(cluster: Cluster) -> list[dict[str, Any]]:
    """What each process resumed from, in the order of time."""
    return cluster.said("resume")


def have_resumed(cluster: Cluster, num_processes: int) -> bool:
    return len(resumes(cluster)) == num_processes


def is_stored(cluster: Cluster, step: int) -> bool:
    return (cluster.directory / "checkpoints" / f"step_{step:08d}" / "remesh.json").exists()


def last_stored(cluster: Cluster) -> int:
    records = cluster.directory.glob("checkpoints/*/remesh.json")
    return max((int(path.parent.name[-8:]) for path in records), default=0)


def has_saved_by_itself(cluster: Cluster, after: int) -> bool:
    """Whether a checkpoint is newer than a step, and one of those that are made every 8 steps."""
    stored = last_stored(cluster)
    return stored > after and stored % 8 == 0


def num_repeated(cluster: Cluster) -> int:
    """Steps that were made twice."""
    return sum(len(losses) - 1 for losses in cluster.losses().values())


@slow
def test_after_a_killed_process_the_job_goes_on_from_memory(tmp_path: Path, memory: Path) -> None:
    with cluster_of(tmp_path, memory, "2:2", saving=("15", "1", "0"), job="fsdp") as cluster:
        cluster.start(0, 1)
        cluster.until_step(22)
        stored = last_stored(cluster)
        cluster.kill_worker(1)
        cluster.until(partial(have_resumed, cluster, 2))
        (step,) = {entry["step"] for entry in resumes(cluster)}
        # What was in memory only is stored.
        cluster.until(partial(is_stored, cluster, step))
        cluster.stop(0, 1)
        assert [entry["memory"] for entry in resumes(cluster)] == [True, True]
        assert step >= max(22, stored)
        assert num_repeated(cluster) <= 1
        assert_same_run(cluster)
    assert list(memory.iterdir()) == []


@slow
def test_with_replicas_the_loss_of_a_node_loses_no_step(tmp_path: Path, memory: Path) -> None:
    saving = ("100000", "1", "1")
    with cluster_of(tmp_path, memory, "2:3", saving=saving, silence=SILENCE_OF_THE_DEAD) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        cluster.until_step(10)
        # If one node was late, the world has grown already.
        num_resumes, num_twice = len(resumes(cluster)), num_repeated(cluster)
        cluster.kill_agent(1)
        cluster.until_trained(0, 2, round_after=before)
        cluster.stop(0, 2)
        found = resumes(cluster)[num_resumes:]
        assert [(entry["memory"], entry["size"]) for entry in found] == [(True, 2)] * 2
        assert found[0]["step"] >= 10
        assert num_repeated(cluster) <= num_twice + 1
        assert_same_run(cluster)


@slow
def test_without_replicas_it_goes_back_to_storage_and_says_why(
    tmp_path: Path, memory: Path
) -> None:
    with cluster_of(
        tmp_path, memory, "2:3", saving=("8", "1", "0"), silence=SILENCE_OF_THE_DEAD
    ) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        num_resumes, stored = len(resumes(cluster)), last_stored(cluster)
        cluster.until(lambda: has_saved_by_itself(cluster, stored))
        cluster.kill_agent(1)
        before = cluster.until_trained(0, 2, round_after=before)
        found = resumes(cluster)[num_resumes:]
        assert len(found) == 2
        for entry in found:
            assert not entry["memory"]
            assert entry["step"] > stored
            assert entry["step"] % 8 == 0
            assert any("no node that is here has" in reason for reason in entry["passed_over"])
        # The agent that was killed has left its memory; the next one on the machine cleans up.
        left = set(memory.iterdir())
        assert len(left) == 3
        cluster.start(1)
        cluster.until_trained(0, 1, 2, round_after=before)
        assert len(list(memory.iterdir())) == 3
        assert len(left & set(memory.iterdir())) == 2
        cluster.stop(0, 1, 2)
        assert_same_run(cluster)
    assert list(memory.iterdir()) == []


@slow
def test_what_is_in_memory_is_stored_when_the_job_fails(tmp_path: Path, memory: Path) -> None:
    saving, none = ("100000", "1", "0"), ("--max-restarts", "0")
    with cluster_of(tmp_path, memory, "2:2", saving=saving, agent=none) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        cluster.kill_worker(1)
        assert [cluster.exit_code(number) for number in (0, 1)] == [1, 1]
        stored = last_stored(cluster)
        assert stored in (cluster.step, cluster.step + 1)
        assert remesh.Checkpoint(tmp_path / f"checkpoints/step_{stored:08d}").verify().ok
    assert list(memory.iterdir()) == []


def test_directories_of_living_agents_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = str(tmp_path)
    abandoned, other = tmp_path / f"{SNAPSHOTS}dead", tmp_path / f"{SNAPSHOTS}gone"
    abandoned.mkdir()
    other.mkdir()
    (abandoned / "file").write_bytes(b"x")
    (tmp_path / f"{SNAPSHOTS}link").symlink_to(abandoned)
    with snapshot_directory(parent) as first:
        assert not abandoned.exists()
        assert caplog.messages == [
            f"removed what agents that are dead have left: {abandoned}, {other}"
        ]
        assert Path(first).parent == tmp_path
        assert Path(first).stat().st_mode & 0o777 == 0o700
        with snapshot_directory(parent) as second:
            assert second != first
            assert remove_abandoned(parent, SNAPSHOTS) == []
            assert Path(first).is_dir()
        assert not Path(second).exists()
    assert not Path(first).exists()


def test_without_memory_there_is_no_directory(tmp_path: Path) -> None:
    with snapshot_directory("") as nowhere, snapshot_directory(str(tmp_path / "none")) as missing:
        assert nowhere == missing == ""
