"""What the page is given: charts over the whole job, and parts of long lists, of bounded size."""

from __future__ import annotations

import itertools

import msgspec

from remesh.elastic.job import (
    MAX_CHECKPOINTS,
    CheckpointSaved,
    JobState,
    NodeLost,
    Policy,
    ProgressRecorded,
    apply,
)
from remesh.elastic.liveness import Liveness
from remesh.elastic.progress import (
    MAX_SAMPLES,
    RankProgress,
    Sample,
    TrainingProgress,
    Trend,
    extend,
)
from remesh.elastic.protocol import ReportFailures
from remesh.elastic.rendezvous import Settings
from remesh.elastic.status import MAX_ROWS, PAGE_ROWS, Query, Status, status_of
from tests.elastic.agents import failure_of, join_of

MAX_BYTES = 300_000


def job_of(num_nodes: int, num_processes: int = 8) -> JobState:
    """A job that runs on so many nodes."""
    settings = Settings(
        min_nodes=num_nodes, max_nodes=num_nodes, node_unit=1, last_call=0.0, join_timeout=60.0
    )
    job = JobState(policy=Policy())
    for number in range(num_nodes):
        address = f"10.0.{number // 256}.{number % 256}"
        join = join_of(number, address=address, num_processes=num_processes, settings=settings)
        job = apply(job, join, 1000.0)
    assert len(job.rendezvous.active) == num_nodes
    return job


def seen(job: JobState, live: Liveness, query: Query) -> Status:
    return status_of(job, live, 2000.0, (), query)


def test_a_job_of_a_thousand_nodes_has_a_small_overview() -> None:
    job = job_of(1000)
    live = Liveness.after_start(job, 1000.0)
    live.round = 1
    live.ranks = {
        rank: RankProgress(step=9 if rank == 77 else 10, time=1999.0, step_seconds=1.0)
        for rank in range(8000)
    }
    live.ranks[4321] = RankProgress(step=10, time=1999.0, step_seconds=2.5)
    live.stacks = dict.fromkeys(range(8000), "frame\n" * 10000)
    for node in range(30):
        failures = tuple(
            failure_of(
                node,
                rank=8 * node + local,
                local_rank=local,
                message="RuntimeError: " + "x" * 5000,
                log_tail="y" * 5000,
            )
            for local in range(8)
        )
        report = ReportFailures(node_id=node, incarnation=f"{node}a", round=1, failures=failures)
        job = apply(job, report, 1500.0)
    shown = seen(job, live, Query())
    assert len(msgspec.json.encode(shown)) < MAX_BYTES
    status = status_of(job, live, 2000.0)
    assert len(msgspec.json.encode(status)) < 16 << 20
    assert {4321, 77} < {rank.rank for rank in status.ranks}
    assert (len(status.ranks), status.num_ranks) == (MAX_ROWS, 8000)
    assert (len(status.nodes), status.nodes_by_state["active"]) == (1000, 1000)
    assert shown.nodes_part.num_found == 1000
    assert len(shown.nodes) == len(shown.ranks) == PAGE_ROWS
    # Ranks in trouble come first.
    assert [rank.rank for rank in shown.ranks[:3]] == [4321, 77, 0]
    assert (shown.num_slow, shown.num_behind, shown.num_stacks) == (1, 1, 8000)
    (failed,) = shown.failures
    assert (len(failed.failures), failed.num_more) == (5, 235)
    assert {len(one.message) for one in failed.failures} == {4000}
    (failed,) = status.failures
    assert (len(failed.failures), failed.num_more) == (240, 0)


def test_nodes_are_found_by_what_they_show() -> None:
    job = apply(job_of(120, 1), NodeLost(node_id=77, incarnation="77a"), 1001.0)
    live = Liveness.after_start(job, 1001.0)

    def found(find: str, page: int = 1) -> list[int]:
        return [node.id for node in seen(job, live, Query(find, page)).nodes]

    assert found("gone") == [77]
    assert found("") == [*range(49), 77]  # the one in trouble is on the first page
    assert found("HOST-77 gone") == [77]
    assert found("host-77 active") == []
    assert found("10.0.0.11") == [11, *range(110, 120)]
    assert found("", 3) == [*range(100, 120)]
    assert found("", 9) == found("", 3)  # there are no more pages
    assert seen(job, live, Query()).nodes_by_state["gone"] == 1


def test_a_trend_covers_the_whole_job_with_few_samples() -> None:
    known = Trend()
    for second in range(100_000):
        known = extend(known, Sample(float(second), 8, second, 1.0, 0.9))
    assert MAX_SAMPLES / 2 <= len(known.samples) <= MAX_SAMPLES
    assert known.samples[0].time == 0
    times = [sample.time for sample in known.samples]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= 2 * known.interval


def test_the_trend_shows_worlds_and_steps() -> None:
    job = job_of(3, 2)
    for step in range(1, 5):
        progress = TrainingProgress(
            began=1000.0, moved=1000.0, first_step=0, last_step=step, recent=(2.0,) * step
        )
        job = apply(job, ProgressRecorded(progress), 1000.0 + 2 * step)
    job = apply(job, NodeLost(node_id=1, incarnation="1a"), 1008.5)
    assert [sample.num_ranks for sample in job.trend.samples] == [0, 6, 6, 6, 6, 6, 4]
    assert [sample.step for sample in job.trend.samples[2:6]] == [1, 2, 3, 4]
    assert job.trend.samples[5].step_seconds == 2.0
    assert job.trend.samples[5].goodput == 1.0


def test_the_newest_checkpoints_are_remembered() -> None:
    job = job_of(1)
    for step in range(10, 1000, 10):
        job = apply(job, CheckpointSaved(step), 1000.0 + step)
    job = apply(job, CheckpointSaved(500), 3000.0)  # reported late
    live = Liveness.after_start(job, 3000.0)
    saved = seen(job, live, Query()).checkpoints
    assert len(saved) == MAX_CHECKPOINTS
    assert (saved[0].step, saved[0].time) == (990, 1990.0)
