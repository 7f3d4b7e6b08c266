"""Processes and nodes that die, with snapshots in memory; real processes, agents are nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import remesh
from remesh.elastic.snapshot import PREFIX, remove_abandoned, snapshot_directory
from tests.elastic.cluster import Cluster
from tests.elastic.test_scenarios import assert_same_run

pytestmark = pytest.mark.timeout(600)

slow = pytest.mark.slow


@pytest.fixture
def memory() -> Iterator[Path]:
    """Where the agents of a test keep snapshots."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="remesh-test-", dir=parent) as directory:
        yield Path(directory)


def cluster_of(
    directory: Path, memory: Path, nodes: str, num_steps: int, *, saving: tuple[str, ...]
) -> Cluster:
    options = ("--snapshot-dir", str(memory))
    return Cluster(directory, nodes, num_steps, agent=options, saving=saving)


def resumes(cluster: Cluster) -> list[dict[str, Any]]:
    """What each process resumed from, in the order of time."""
    return [entry for entry in cluster.said() if entry["kind"] == "resume"]


def has_resumed(cluster: Cluster, num_processes: int) -> bool:
    return len(resumes(cluster)) >= num_processes


def last_stored(cluster: Cluster) -> int:
    records = cluster.directory.glob("checkpoints/*/remesh.json")
    return max((int(path.parent.name[-8:]) for path in records), default=0)


def num_repeated(cluster: Cluster) -> int:
    """Steps that were made twice."""
    return sum(len(losses) - 1 for losses in cluster.losses().values())


@slow
def test_after_a_killed_process_the_job_goes_on_from_memory(tmp_path: Path, memory: Path) -> None:
    with cluster_of(tmp_path, memory, "2:2", 40, saving=("15", "1", "0")) as cluster:
        cluster.start(0, 1)
        cluster.until_step(22)
        stored = last_stored(cluster)
        cluster.kill_worker(1)
        cluster.finish(0, 1)
        found = resumes(cluster)
        assert [entry["memory"] for entry in found] == [True, True]
        (step,) = {entry["step"] for entry in found}
        assert step >= 22
        assert step > stored
        assert num_repeated(cluster) <= 1
        assert_same_run(cluster, 40)
        # What was in memory only is stored by now.
        assert (tmp_path / "checkpoints" / f"step_{step:08d}" / "remesh.json").exists()
    assert list(memory.iterdir()) == []


@slow
def test_with_replicas_the_loss_of_a_node_loses_no_step(tmp_path: Path, memory: Path) -> None:
    with cluster_of(tmp_path, memory, "2:3", 60, saving=("1000", "1", "1")) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        cluster.until_step(10)
        cluster.kill_agent(1)
        cluster.until_world(0, 2, round_after=1)
        cluster.finish(0, 2)
        found = resumes(cluster)
        assert [(entry["memory"], entry["size"]) for entry in found] == [(True, 2)] * 2
        assert found[0]["step"] >= 10
        assert num_repeated(cluster) <= 1
        assert_same_run(cluster, 60)


@slow
def test_without_replicas_it_goes_back_to_storage_and_says_why(
    tmp_path: Path, memory: Path
) -> None:
    with cluster_of(tmp_path, memory, "2:3", 200, saving=("8", "1", "0")) as cluster:
        cluster.start(0, 1, 2)
        cluster.until_world(0, 1, 2)
        cluster.until_step(13)
        cluster.kill_agent(1)
        cluster.until_world(0, 2, round_after=1)
        cluster.until(lambda: len(resumes(cluster)) == 2)
        for entry in resumes(cluster):
            assert not entry["memory"]
            assert entry["step"] % 8 == 0
            assert any("no node that is here has" in reason for reason in entry["passed_over"])
        # The agent that was killed has left its memory; the next one on the machine cleans up.
        assert len(list(memory.iterdir())) == 3
        before = set(memory.iterdir())
        cluster.start(1)
        cluster.until_world(0, 1, 2, round_after=2)
        assert len(list(memory.iterdir())) == 3
        assert len(before & set(memory.iterdir())) == 2
        cluster.finish(0, 1, 2)
        assert_same_run(cluster, 200)
    assert list(memory.iterdir()) == []


@slow
def test_a_snapshot_that_was_being_written_is_not_used(tmp_path: Path, memory: Path) -> None:
    with cluster_of(tmp_path, memory, "2:2", 40, saving=("1000", "1", "0")) as cluster:
        cluster.start(0, 1)
        for rank in (1, 0):
            num_wanted = len(resumes(cluster)) + 2
            cluster.until_step(cluster.step + 5)
            (tmp_path / f"torn-{rank}").touch()
            cluster.until(partial(has_resumed, cluster, num_wanted))
            before = resumes(cluster)[-1]
            assert before["memory"]
        cluster.finish(0, 1)
        # A step whose snapshot was torn is made again, and no other.
        assert num_repeated(cluster) == 2
        assert_same_run(cluster, 40)
    assert list(memory.iterdir()) == []


@slow
def test_what_is_in_memory_is_stored_when_the_job_fails(tmp_path: Path, memory: Path) -> None:
    options = ("--snapshot-dir", str(memory), "--max-restarts", "0")
    saving = ("1000", "1", "0")
    with Cluster(tmp_path, "2:2", 1000, agent=options, saving=saving) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        cluster.kill_worker(1)
        assert [cluster.agents[number].wait(120) for number in (0, 1)] == [1, 1]
        stored = last_stored(cluster)
        assert stored in (cluster.step, cluster.step + 1)
        assert remesh.Checkpoint(tmp_path / f"checkpoints/step_{stored:08d}").verify().ok
    assert list(memory.iterdir()) == []


def test_directories_of_living_agents_stay(tmp_path: Path) -> None:
    parent = str(tmp_path)
    abandoned = tmp_path / f"{PREFIX}dead"
    abandoned.mkdir()
    (abandoned / "file").write_bytes(b"x")
    (tmp_path / f"{PREFIX}link").symlink_to(abandoned)
    with snapshot_directory(parent) as first:
        assert not abandoned.exists()
        assert Path(first).parent == tmp_path
        assert Path(first).stat().st_mode & 0o777 == 0o700
        with snapshot_directory(parent) as second:
            assert second != first
            assert remove_abandoned(parent) == []
            assert Path(first).is_dir()
        assert not Path(second).exists()
    assert not Path(first).exists()


def test_without_memory_there_is_no_directory(tmp_path: Path) -> None:
    with snapshot_directory("") as nowhere, snapshot_directory(str(tmp_path / "none")) as missing:
        assert nowhere == missing == ""
