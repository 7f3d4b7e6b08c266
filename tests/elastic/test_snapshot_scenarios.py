"""Processes and nodes that die, with snapshots in memory; real processes, agents are nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import remesh
from remesh.elastic.directories import SNAPSHOTS, remove_abandoned, snapshot_directory
from tests.elastic.cluster import SILENCE_OF_THE_DEAD, Cluster
from tests.elastic.test_scenarios import assert_same_run

pytestmark = pytest.mark.timeout(1200)

slow = pytest.mark.slow


@pytest.fixture
def memory() -> Iterator[Path]:
    """Where the agents of a test keep snapshots."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="remesh-test-", dir=parent) as directory:
        yield Path(directory)


class Remembering(Cluster):
    """Nodes that keep snapshots in one directory."""

    def __init__(
        self, directory: Path, memory: Path, nodes: str, *, agent: tuple[str, ...] = (), **rest: Any
    ) -> None:
        super().__init__(directory, nodes, agent=("--snapshot-dir", str(memory), *agent), **rest)

    def last_stored(self) -> int:
        records = self.directory.glob("checkpoints/*/remesh.json")
        return max((int(path.parent.name[-8:]) for path in records), default=0)

    def num_repeated(self) -> int:
        return sum(len(losses) - 1 for losses in self.losses().values())


@slow
def test_with_replicas_the_loss_of_a_node_loses_no_step(tmp_path: Path, memory: Path) -> None:
    options: dict[str, Any] = {"saving": ("100000", "1", "1"), "silence": SILENCE_OF_THE_DEAD}
    with Remembering(tmp_path, memory, "2:3", **options) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        cluster.until_step(10)
        # If one node was late, the world has grown already.
        num_resumes, num_twice = len(cluster.said("resume")), cluster.num_repeated()
        cluster.kill_agent(1)
        cluster.until_trained(0, 2, round_after=before)
        cluster.stop(0, 2)
        found = cluster.said("resume")[num_resumes:]
        assert [(entry["memory"], entry["size"]) for entry in found] == [(True, 2)] * 2
        assert found[0]["step"] >= 10
        assert cluster.num_repeated() <= num_twice + 1
        assert_same_run(cluster)


@slow
def test_without_replicas_it_goes_back_to_storage_and_says_why(
    tmp_path: Path, memory: Path
) -> None:
    options: dict[str, Any] = {"saving": ("8", "1", "0"), "silence": SILENCE_OF_THE_DEAD}
    with Remembering(tmp_path, memory, "2:3", **options) as cluster:
        cluster.start(0, 1, 2)
        before = cluster.until_trained(0, 1, 2)
        num_resumes, stored = len(cluster.said("resume")), cluster.last_stored()

        def has_saved_by_itself() -> bool:
            newest = cluster.last_stored()
            return newest > stored and newest % 8 == 0

        cluster.until(has_saved_by_itself)
        cluster.kill_agent(1)
        before = cluster.until_trained(0, 2, round_after=before)
        found = cluster.said("resume")[num_resumes:]
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
    options: dict[str, Any] = {"saving": ("100000", "1", "0"), "agent": ("--max-restarts", "0")}
    with Remembering(tmp_path, memory, "2:2", **options) as cluster:
        cluster.start(0, 1)
        cluster.until_step(8)
        cluster.kill_worker(1)
        assert [cluster.exit_code(number) for number in (0, 1)] == [1, 1]
        stored = cluster.last_stored()
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
