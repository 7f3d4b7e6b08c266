"""The simulation of failures: what is known in closed form, and rules that always hold."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from benchmarks.simulation import (
    COPY_SHARE,
    DAY,
    LLAMA3_RATES,
    Cluster,
    Durations,
    Failure,
    FailureKind,
    Outcome,
    Strategy,
    Workload,
    draw_failures,
    formation_seconds,
    memory_survives,
    simulate,
    snapshot_survives,
)
from hypothesis import given

from remesh.checkpoint.scattered import nodes_of, replica_distances
from remesh.elastic.master import TICK_SECONDS
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT

CLUSTER = Cluster(num_nodes=4, spares=4, nodes_per_rack=2, storage_write=1e9, storage_read=1e9)
WORKLOAD = Workload(state_bytes=4e9, step_seconds=1.0, copies=2)
STORED = Strategy(name="storage", storage_every=100)
LIVE = Strategy(name="live", storage_every=100, reenters=True)
SNAPSHOTS = Strategy(name="snapshots", storage_every=100, snapshot_every=10, replicas=1)
DURATIONS = Durations(start=60.0, stop=5.0, leave=1.0, enter=2.0, warm=10.0)
NODE, PROCESS, RACK = FailureKind.NODE, FailureKind.PROCESS, FailureKind.RACK


def run(
    strategy: Strategy,
    *failures: Failure,
    seconds: float = 1000.0,
    cluster: Cluster = CLUSTER,
    workload: Workload = WORKLOAD,
) -> Outcome:
    return simulate(cluster, workload, strategy, failures, seconds, durations=DURATIONS)


def node_fails(time: float, first_node: int = 0) -> Failure:
    return Failure(time, NODE, first_node)


def test_without_failures_only_saves_take_time() -> None:
    outcome = run(STORED, seconds=1e5)

    copy = WORKLOAD.state_bytes * 2 / 4 / CLUSTER.memory
    assert outcome.goodput == pytest.approx(1 / (1 + COPY_SHARE * copy / 100), rel=1e-4)
    assert outcome.steps_lost == outcome.num_failures == 0


def test_storage_loses_the_steps_since_the_newest_checkpoint_that_was_durable() -> None:
    # The save of step 500 takes 4 s; at 503 s it has not ended.
    early, late = run(STORED, node_fails(503.0)), run(STORED, node_fails(580.0))

    assert early.steps_lost == 502 - 400
    assert late.steps_lost == 579 - 500
    reading = 4e9 / CLUSTER.storage_read + 2e9 / CLUSTER.link
    formed = formation_seconds(NODE, 4, 1, DURATIONS.stop)
    assert late.recoveries == [pytest.approx(formed + 60.0 + reading)]
    assert late.bytes_moved == 8e9
    assert late.sources == {"storage": 1}


def test_processes_that_go_on_lose_no_step_and_move_only_what_is_lacking() -> None:
    outcome = run(LIVE, node_fails(580.0))

    assert outcome.steps_lost == 0
    formed = formation_seconds(NODE, 4, 1, DURATIONS.leave)
    assert outcome.recoveries == [pytest.approx(formed + 10.0 + 2e9 / CLUSTER.link)]
    assert outcome.bytes_moved == 2e9
    assert outcome.sources == {"live memory": 1}


def test_snapshots_survive_a_rack_and_not_a_node_with_its_replica() -> None:
    rack = Failure(585.0, RACK, 2)
    survived = run(SNAPSHOTS, rack)
    lost = run(SNAPSHOTS, node_fails(585.0, 0), node_fails(586.0, 2))

    assert (survived.sources, lost.sources) == ({"snapshot": 1}, {"storage": 1})
    assert survived.steps_lost < 10 < lost.steps_lost


def test_a_failure_during_a_recovery_begins_it_anew() -> None:
    # Nodes 0 and 2 hold the same half of the state: together they take it away.
    apart = run(LIVE, node_fails(580.0), node_fails(581.0, 1))
    both = run(LIVE, node_fails(580.0), node_fails(581.0, 2))

    assert apart.sources == {"live memory": 1}
    assert apart.num_failures == 2
    assert both.sources == {"storage": 1}
    assert len(both.recoveries) == 1
    assert both.recoveries[0] > 1.0 + formation_seconds(NODE, 4, 2, DURATIONS.leave)


def test_a_job_without_spares_shrinks_and_grows_again() -> None:
    cluster = Cluster(num_nodes=4, repair_seconds=400.0)
    outcome = run(LIVE, node_fails(100.0), cluster=cluster)

    leave = DURATIONS.leave
    formed = formation_seconds(NODE, 4, 1, leave) + formation_seconds(None, 3, 0, leave)
    trained = 1000.0 - formed - 2 * 10.0
    slower = 400.0 / 4
    assert outcome.steps == pytest.approx(trained - slower, abs=10)


def test_a_job_that_has_too_few_nodes_waits_for_a_repair() -> None:
    cluster = Cluster(num_nodes=4, min_nodes=4, repair_seconds=400.0)
    outcome = run(LIVE, node_fails(100.0), cluster=cluster)

    assert outcome.waiting == pytest.approx(400.0)
    formed = formation_seconds(NODE, 4, 1, DURATIONS.leave)
    assert outcome.steps == pytest.approx(1000 - 400 - formed - 10, abs=5)


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_replicas_lie_far_apart(replicas: int) -> None:
    distances = replica_distances(12, replicas)

    assert len(set(distances)) == replicas
    assert all(4 <= distance <= 8 for distance in distances)
    nodes = nodes_of([f"node{node}" for node in range(12)])
    for node in range(12):
        holders = {node} | {nodes.node[nodes.peer(node, far)] for far in distances}
        assert not snapshot_survives(12, replicas, sorted(holders))
        for left in holders:
            assert snapshot_survives(12, replicas, sorted(holders - {left}))
    assert replica_distances(2, 5) == [1]
    assert replica_distances(1, 5) == []


def test_a_copy_of_each_element_has_to_live() -> None:
    assert memory_survives(4, 2, [0, 1])
    assert not memory_survives(4, 2, [0, 2])
    assert memory_survives(4, 4, [0, 1, 2])
    assert not memory_survives(4, 1, [3])
    assert memory_survives(4, 1, [])


@given(
    seed=st.integers(0, 1000),
    strategy=st.sampled_from([STORED, LIVE, SNAPSHOTS]),
    copies=st.sampled_from([1, 2, 4]),
    spares=st.integers(0, 3),
    min_nodes=st.integers(1, 4),
)
def test_time_and_steps_add_up(
    seed: int, strategy: Strategy, copies: int, spares: int, min_nodes: int
) -> None:
    cluster = Cluster(num_nodes=4, spares=spares, min_nodes=min_nodes, nodes_per_rack=2)
    workload = Workload(state_bytes=4e9, step_seconds=1.0, copies=copies)
    rates = dict.fromkeys(FailureKind, 20.0)
    failures = draw_failures(cluster, rates, DAY, seed)

    outcome = run(strategy, *failures, seconds=DAY, cluster=cluster, workload=workload)

    made = outcome.steps + outcome.steps_lost
    assert 0 <= outcome.goodput <= 1
    assert made * workload.step_seconds + outcome.waiting <= DAY + 1e-6
    assert outcome.num_failures <= len(failures)
    assert all(seconds > 0 for seconds in outcome.recoveries)
    assert outcome.steps_lost >= 0


def test_failures_come_at_their_rates() -> None:
    cluster = Cluster(num_nodes=2048)
    failures = draw_failures(cluster, LLAMA3_RATES, 54 * DAY, 1)

    assert len(failures) == pytest.approx(419, abs=4 * math.sqrt(419))
    assert failures == draw_failures(cluster, LLAMA3_RATES, 54 * DAY, 1)
    assert sorted(failures, key=lambda failure: failure.time) == list(failures)


@pytest.mark.parametrize("num_nodes", [2, 8, 2048])
def test_silence_is_noticed_after_the_timeout_and_told_with_the_next_heartbeat(
    num_nodes: int,
) -> None:
    formed = formation_seconds(NODE, num_nodes, 1, 2.0)

    assert HEARTBEAT_TIMEOUT - 1.0 + 2.0 < formed < HEARTBEAT_TIMEOUT + TICK_SECONDS + 1.0 + 2.0
    assert formation_seconds(PROCESS, num_nodes, 0, 2.0) <= 0.1 + 1.0 + 2.0
    assert formation_seconds(None, num_nodes, 0, 2.0) <= 1.0 + 2.0
