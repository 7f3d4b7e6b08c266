"""Snapshots in the memory of nodes: what is kept, found and loaded. Ranks are threads."""

from __future__ import annotations

import logging
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh import catalog
from remesh.checkpoint import scattered
from remesh.checkpoint.scattered import nodes_of
from remesh.elastic.snapshot_rescue import store_newest
from remesh.events import Event
from remesh.exchange import ThreadExchange
from remesh.pipeline import from_memory
from remesh.run_info import RunInfo
from remesh.storage import open_storage
from remesh.training import manager as manager_module
from remesh.training.manager import Manager
from remesh.training.resuming import Resumed
from tests.engine.small_checkpoint import flip
from tests.support import run_ranks

NUM_ROWS = 600


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path)
    with tempfile.TemporaryDirectory(prefix="remesh-test-", dir=parent) as directory:
        yield Path(directory)


class Job:
    """A job whose ranks lie on nodes, each with a directory for snapshots."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.root = directory / "run"
        self.directory = directory
        self._nodes: Sequence[int] = ()
        self._options = {"every": 4, "memory_every": 1, **options}
        monkeypatch.setattr(manager_module, "run_info", self._run_info)

    def _run_info(self) -> RunInfo:
        rank = int(threading.current_thread().name.removeprefix("rank "))
        return RunInfo(snapshot_dir=str(self.place(self._nodes[rank])))

    def place(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    def files(self, node: int) -> list[str]:
        """What lies there: names of snapshots and of their files."""
        found = [path.relative_to(self.place(node)) for path in self.place(node).rglob("*")]
        return sorted(f"{path.parts[1]}/{path.name}" for path in found if len(path.parts) > 3)

    def play(self, nodes: Sequence[int], *steps: int, crash: bool = False) -> list[Played]:
        """Resume on nodes (the node of each rank), and make steps."""
        self._nodes = nodes
        return run_ranks(len(nodes), self._play, steps, crash)

    def _play(self, exchange: ThreadExchange, steps: Sequence[int], crash: bool) -> Played:
        manager = Manager(self.root, group=exchange, save_at_end=False, **self._options)
        state = state_of(0, exchange)
        resumed = manager.resume(state)
        loaded = state["w"].parts[0].data.copy(), state["step"]
        for step in steps:
            manager.step(step, state_of(step, exchange), metrics={"loss": float(step)})
        if not crash:
            manager.close()
        return resumed, loaded


MakeJob = Callable[..., Job]
"""Makes a job, with options of the manager."""


@pytest.fixture
def make_job(shm: Path, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    return partial(Job, shm, monkeypatch)


Played = tuple[Resumed | None, tuple[Any, int]]


def state_of(step: int, exchange: ThreadExchange) -> dict[str, Any]:
    """Rows that depend on the step, cut among the ranks, and a value."""
    rank, world_size = exchange.rank, exchange.world_size
    rows = rows_of(step, rank, world_size)
    sharded = remesh.ShardedTensor.from_rank_offsets("w", rows, (0, rank, world_size))
    return {"w": sharded, "step": step}


def rows_of(step: int, rank: int, world_size: int) -> Any:
    size = NUM_ROWS // world_size
    return np.arange(size, dtype=np.float32) + size * rank + 1000 * step


def assert_went_on(played: list[Played], step: int, *, from_memory: bool) -> None:
    for rank, (resumed, (rows, value)) in enumerate(played):
        assert resumed is not None
        assert (resumed.step, resumed.from_memory, value) == (step, from_memory, step)
        np.testing.assert_array_equal(rows, rows_of(step, rank, len(played)))


def stored_steps(job: Job) -> list[int]:
    return sorted(int(path.parent.name[-8:]) for path in job.root.glob("*/remesh.json"))


# A node that joins, as 5 does, brings nothing and gets what it needs.
@pytest.mark.parametrize("after", [[0, 0, 1, 1], [1, 0], [0, 1, 1], [0], [5, 1, 0]])
def test_a_job_resumes_from_memory_in_any_layout(after: list[int], make_job: MakeJob) -> None:
    job = make_job()
    before = [0, 0, 0, 0] if after == [0] else [0, 0, 1, 1]
    assert all(resumed is None for resumed, _ in job.play(before, *range(1, 7)))
    assert stored_steps(job) == [4]
    # What is stored must not be needed.
    for file in job.root.glob("*/data-*/*.safetensors"):
        file.write_bytes(b"")
    assert_went_on(job.play(after), 6, from_memory=True)
    assert stored_steps(job) == [4, 6]  # what was in memory only is saved at once
    assert remesh.Checkpoint(job.root / "step_00000006").verify().ok


def test_the_metrics_and_the_run_go_on(make_job: MakeJob) -> None:
    job = make_job()
    job.play([0, 1], *range(1, 7))
    (resumed, _), _ = job.play([0, 1])
    assert resumed is not None
    assert resumed.info.metrics == {"loss": 6.0}
    infos = catalog.list_checkpoints(open_storage(job.root))
    assert [info.step for info in infos] == [4, 6]
    assert infos[0].run == infos[1].run == resumed.info.run
    assert infos[1].metrics == {"loss": 6.0}


def test_the_memory_holds_two_snapshots_at_most(make_job: MakeJob) -> None:
    most = 0

    def count(event: Event) -> None:
        nonlocal most
        if event.point == "save.file_finished":
            most = max(most, len(list(job.directory.glob("node-*/*/step_*/data-*/*0.safetensors"))))

    job = make_job(every=None, memory_every=2, on_event=count)
    job.play([0], *range(1, 10))
    assert most == 2
    assert {name.partition("/")[0] for name in job.files(0)} == {"step_00000006", "step_00000008"}
    assert_went_on(job.play([0]), 8, from_memory=True)


def test_a_lost_node_makes_a_snapshot_useless_and_the_reason_is_said(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job()
    job.play([0, 1, 2], *range(1, 7))
    with caplog.at_level(logging.WARNING, logger="remesh"):
        played = job.play([0, 2])
    assert_went_on(played, 4, from_memory=False)
    resumed, _ = played[0]
    assert resumed is not None
    names, reasons = zip(*resumed.passed_over, strict=True)
    assert set(names) == {"step_00000005", "step_00000006"}
    assert all("no node that is here has data-" in reason for reason in reasons)
    assert "passed over step_00000006: in memory, but no node that is here has" in caplog.text
    assert job.files(0) == job.files(2) == []  # of no use any more


def test_replicas_make_up_for_a_lost_node(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "PIECE_BYTES", 100)  # several pieces of unequal files
    monkeypatch.setattr(from_memory, "MESSAGE_BYTES", 250)
    job = make_job(memory_replicas=1)
    job.play([0, 1, 1, 2], *range(1, 7))
    assert_went_on(job.play([2, 0]), 6, from_memory=True)


def test_a_single_node_has_nowhere_to_put_replicas(make_job: MakeJob) -> None:
    job = make_job(memory_replicas=2)
    job.play([0, 0], 1, 2)
    assert_went_on(job.play([0, 0]), 2, from_memory=True)


DEATHS = [
    ("save.described", 0),
    ("save.described", 1),
    ("save.file_created", 0),
    ("save.file_created", 1),
    ("save.chunk_written", 0),
    ("save.chunk_written", 1),
    ("save.file_finished", 0),
    ("save.file_finished", 1),
    ("save.parts_gathered", 0),  # a moment of rank 0
]


@pytest.mark.parametrize(("point", "rank"), DEATHS)
def test_a_torn_snapshot_is_never_used(point: str, rank: int, make_job: MakeJob) -> None:
    make_job(every=None).play([0, 1], 1, 2)

    def die(event: Event) -> None:
        if event.point == point and event.rank == rank:
            raise KeyboardInterrupt  # nothing is tidied up

    torn = make_job(every=None, on_event=die)
    with pytest.raises((KeyboardInterrupt, remesh.errors.RemeshError)):
        torn.play([0, 1], 3)
    job = make_job(every=None)
    assert_went_on(job.play([0, 1], 3, 4), 2, from_memory=True)
    assert_went_on(job.play([0, 1]), 4, from_memory=True)


def test_one_record_is_enough(make_job: MakeJob) -> None:
    """A rank that dies while records are put leaves a snapshot that is complete all the same."""
    job = make_job(every=None)
    job.play([0, 1], 1, 2)
    (record,) = job.place(1).glob("*/step_00000002/remesh.json")
    record.unlink()
    assert_went_on(job.play([0, 1]), 1, from_memory=True)


def test_damage_is_found_and_the_next_older_one_used(make_job: MakeJob) -> None:
    job = make_job()
    job.play([0, 1], *range(1, 6))
    for file in job.directory.glob("node-*/*/step_00000005/data-*/00001.safetensors"):
        flip(file, -1)
    played = job.play([0, 1])
    assert_went_on(played, 4, from_memory=True)
    assert played[0][0] is not None
    assert played[0][0].passed_over[0][0] == "step_00000005"


def test_a_newer_stored_checkpoint_is_preferred(make_job: MakeJob) -> None:
    make_job(every=None).play([0], 1, 2)
    make_job(memory_every=None, every=1).play([0], 3, 4)
    assert_went_on(make_job().play([0]), 4, from_memory=False)


def test_other_roots_have_snapshots_of_their_own(make_job: MakeJob) -> None:
    job = make_job()
    job.play([0], 1, 2)
    other = make_job()
    other.root = job.directory / "other"
    assert other.play([0], 1)[0][0] is None
    assert_went_on(job.play([0]), 2, from_memory=True)


def test_too_little_memory_ends_no_training(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job()
    job.place(1).parent.mkdir(exist_ok=True)
    job.place(1).write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="remesh"):
        job.play([0, 1], *range(1, 6))
    warnings = [r.getMessage() for r in caplog.records if "no more snapshots" in r.getMessage()]
    assert len(warnings) == 1
    assert stored_steps(job) == [4]
    assert job.files(0) == []


def test_without_an_agent_there_are_none(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job()
    monkeypatch.setattr(manager_module, "run_info", RunInfo)
    with caplog.at_level(logging.WARNING, logger="remesh"):
        job.play([0, 0], *range(1, 6))
    assert "Start the job with `remesh run`" in caplog.text
    assert_went_on(job.play([0, 0]), 4, from_memory=False)


@pytest.mark.parametrize("num_replicas", [0, 1])
def test_agents_store_the_newest_snapshot_together(num_replicas: int, make_job: MakeJob) -> None:
    job = make_job(memory_replicas=num_replicas)
    job.play([0, 1, 1], *range(1, 7))
    first, second = str(job.place(0)), str(job.place(1))
    place = str(job.root / "step_00000006")
    if num_replicas:
        assert store_newest(second, whole_only=True) == [place]
    else:
        assert store_newest(second, whole_only=True) == []
        assert store_newest(second, whole_only=False) == []
        assert not Path(place, "remesh.json").exists()
        assert store_newest(first, whole_only=False) == [place]
    assert store_newest(first, whole_only=False) == []  # it is there already
    assert remesh.Checkpoint(place).verify().ok
    assert not list(Path(place).glob("*/*.whole"))
    stored_only = make_job(memory_every=None)
    assert_went_on(stored_only.play([0, 1]), 6, from_memory=False)


def test_agents_store_nothing_of_which_a_part_is_lost(make_job: MakeJob) -> None:
    job = make_job()
    job.play([0, 1, 2], *range(1, 7))
    assert [store_newest(str(job.place(n)), whole_only=False) for n in (0, 2)] == [[], []]
    assert stored_steps(job) == [4]
    assert store_newest("", whole_only=False) == []


@pytest.mark.parametrize(
    "other", ["warmup", "step_500", "step_2000000000", "z", "step_00000006", "old/step_00000009"]
)
def test_checkpoints_of_others_in_the_root_keep_no_snapshot_from_being_stored(
    other: str, make_job: MakeJob
) -> None:
    job = make_job()
    job.play([0], *range(1, 7))
    remesh.save({"x": np.arange(3.0)}, job.root / other)
    (place,) = store_newest(str(job.place(0)), whole_only=False)
    assert remesh.Checkpoint(place).verify().ok
    assert remesh.Checkpoint(place).values["step"] == 6
    np.testing.assert_array_equal(
        remesh.Checkpoint(job.root / other).read_array("x"), np.arange(3.0)
    )
    assert store_newest(str(job.place(0)), whole_only=False) == []  # it is there already


def test_a_damaged_checkpoint_keeps_no_snapshot_from_being_stored(make_job: MakeJob) -> None:
    job = make_job(every=6)
    job.play([0], *range(1, 7))
    (job.root / "step_00000006" / "remesh.json").write_text("{}")
    (place,) = store_newest(str(job.place(0)), whole_only=False)
    assert place != str(job.root / "step_00000006")
    assert remesh.Checkpoint(place).verify().ok
    resumed, _ = make_job(memory_every=None).play([0])[0]
    assert resumed is not None
    assert resumed.info.path == place


@given(
    places=st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), distance=st.integers(1, 4)
)
def test_peers_lie_on_another_node_and_share_the_work(places: list[str], distance: int) -> None:
    nodes = nodes_of(places)
    assert sorted(rank for ranks in nodes.ranks for rank in ranks) == list(range(len(places)))
    assert [nodes.node[ranks[0]] for ranks in nodes.ranks] == list(range(len(nodes.ranks)))
    if distance >= len(nodes.ranks):
        return
    peers = {rank: nodes.peer(rank, distance) for rank in range(len(places))}
    assert sorted(peers) == list(range(len(places)))
    for rank, peer in peers.items():
        assert places[peer] != places[rank]
    for ranks in nodes.ranks:
        taken = [peers[rank] for rank in ranks]
        there = len({place for place in places if place == places[taken[0]]})
        assert there == 1
        size = sum(place == places[taken[0]] for place in places)
        assert max(taken.count(peer) for peer in taken) == math.ceil(len(ranks) / size)
