"""What the page is given: charts over the whole job, and parts of long lists, of bounded size."""

from __future__ import annotations

import msgspec

from remesh.elastic.job import (
    JobState,
    NodeLost,
    Policy,
    apply,
)
from remesh.elastic.liveness import Liveness
from remesh.elastic.nodes import Settings
from remesh.elastic.progress import (
    RankProgress,
)
from remesh.elastic.protocol import ReportFailures
from remesh.elastic.status import MAX_ROWS, OF_A_PAGE, status_of
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
    assert len(job.active) == num_nodes
    return job


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
    shown = status_of(job, live, 2000.0, limits=OF_A_PAGE)
    assert len(msgspec.json.encode(shown)) < MAX_BYTES
    status = status_of(job, live, 2000.0)
    assert len(msgspec.json.encode(status)) < 16 << 20
    assert {4321, 77} < {rank.rank for rank in status.ranks}
    assert (len(status.ranks), status.num_ranks) == (MAX_ROWS, 8000)
    assert (len(status.nodes), status.nodes_by_state["active"]) == (1000, 1000)
    assert len(shown.nodes) == len(shown.ranks) == OF_A_PAGE.rows
    # Ranks in trouble come first.
    assert [rank.rank for rank in shown.ranks[:3]] == [4321, 77, 0]
    (failed,) = shown.failures
    assert len(failed.failures) == OF_A_PAGE.failures
    assert {len(one.message) for one in failed.failures} == {OF_A_PAGE.text}
    (failed,) = status.failures
    assert len(failed.failures) == 240


def test_nodes_in_trouble_are_shown() -> None:
    job = apply(job_of(120, 1), NodeLost(node_id=77, incarnation="77a"), 1001.0)
    shown = status_of(job, Liveness.after_start(job, 1001.0), 2000.0, limits=OF_A_PAGE)
    assert [node.id for node in shown.nodes] == [*range(49), 77]
    assert shown.nodes_by_state["gone"] == 1
