"""Intervals between saves, and the goodput that they give.

For each way to keep a state the intervals follow the rule of Young ("A first order approximation to
the optimum checkpoint interval", 1974) and Daly (2006): what a save costs per second of training is
as much as the steps that a failure loses, on average, if the interval is the square root of twice
the cost of a save times the mean time between the failures that it is for. Then the ways are
simulated against the same failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.simulation.cluster import (
    DAY,
    Cluster,
    FailureRates,
    Workload,
    draw_failures,
)
from remesh.simulation.training import (
    COPY_SHARE,
    Durations,
    Outcome,
    Strategy,
    blocked_seconds,
    simulate,
)

STORAGE_SHARE = 0.25
"""Part of the time in which the storage may be busy with the saves of one job."""
LEAST_SECONDS = 60.0
"""Between two checkpoints in storage, which are files to create, to commit and to remove."""
EQUAL = 0.0005
"""Goodputs that differ by less count as equal."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected result of a strategy."""

    strategy: Strategy
    goodput: float  # mean over the simulated jobs: time of the steps that count ÷ all time
    lowest: float  # of the jobs
    highest: float  # of the jobs
    steps_lost_per_failure: float  # steps made again, per failure
    recovery_seconds: float  # median from a failure to the next step
    bytes_per_failure: float  # bytes that a recovery brings to nodes, on average
    blocked_share: float  # part of the time that saves and snapshots block training
    snapshot_bytes: float  # host memory of each node that snapshots take
    sources: dict[str, float]  # where states came from: part of the recoveries by source


def best_interval(
    cost: float, mean_between: float, step_seconds: float, *, least: float = 0.0
) -> int:
    """Steps between two saves that cost seconds each, by the rule of Young and Daly."""
    seconds = max(math.sqrt(2 * cost * mean_between), least, step_seconds)
    return max(math.ceil(seconds / step_seconds - 1e-9), 1)


def strategies(cluster: Cluster, workload: Workload, rates: FailureRates) -> list[Strategy]:
    """The ways to keep a state, from the simplest on, with the best intervals of each."""
    rate = sum(rates.values())
    between = DAY / rate if rate > 0 else math.inf
    node_bytes = workload.node_bytes(cluster.num_nodes)
    copy = node_bytes / cluster.memory
    least = max(workload.state_bytes / cluster.storage_write / STORAGE_SHARE, LEAST_SECONDS)
    step = workload.step_seconds

    def stored(mean_between: float) -> int:
        return best_interval(COPY_SHARE * copy, min(mean_between, 30 * DAY), step, least=least)

    def snapshot(replicas: int) -> int:
        cost = copy + replicas * node_bytes / cluster.link
        return best_interval(cost, min(between, 30 * DAY), step)

    ways = [Strategy(name="storage", storage_every=stored(between))]
    # Snapshots and live memory leave few failures to storage, one in ten, say.
    rarely = stored(10 * between)
    ways += [
        Strategy(
            name=f"snapshots, {replicas} replica{'' if replicas == 1 else 's'}",
            storage_every=stored(between) if replicas == 0 else rarely,
            snapshot_every=snapshot(replicas),
            replicas=replicas,
        )
        for replicas in (0, 1, 2)
        if replicas < cluster.num_nodes
    ]
    live = Strategy(name="live memory", storage_every=rarely, reenters=True)
    if workload.copies > 1:
        ways.append(live)
    if cluster.num_nodes > 1:
        ways.append(
            Strategy(
                name="live memory, snapshots with 1 replica",
                storage_every=rarely,
                snapshot_every=snapshot(1),
                replicas=1,
                reenters=True,
            )
        )
    return ways


def estimate(
    cluster: Cluster,
    workload: Workload,
    rates: FailureRates,
    strategy: Strategy,
    *,
    days: float = 30.0,
    num_jobs: int = 4,
    durations: Durations | None = None,
) -> Estimate:
    """Simulate jobs with one strategy; jobs of the same number have the same failures."""
    seconds = days * DAY
    drawn = [draw_failures(cluster, rates, seconds, seed) for seed in range(num_jobs)]
    outcomes = [
        simulate(cluster, workload, strategy, failures, seconds, durations=durations)
        for failures in drawn
    ]
    return _summary(cluster, workload, strategy, outcomes)


def _summary(
    cluster: Cluster, workload: Workload, strategy: Strategy, outcomes: Sequence[Outcome]
) -> Estimate:
    goodputs = [outcome.goodput for outcome in outcomes]
    num_failures = max(sum(outcome.num_failures for outcome in outcomes), 1)
    recoveries = sorted(seconds for outcome in outcomes for seconds in outcome.recoveries)
    sources = sum((outcome.sources for outcome in outcomes), start=Counter[str]())
    node_bytes = workload.node_bytes(cluster.num_nodes)
    blocked = blocked_seconds(cluster, strategy, node_bytes)
    kept = 2 * node_bytes * (1 + strategy.replicas)  # the newest, and the one being written
    return Estimate(
        strategy=strategy,
        goodput=sum(goodputs) / len(goodputs),
        lowest=min(goodputs),
        highest=max(goodputs),
        steps_lost_per_failure=sum(one.steps_lost for one in outcomes) / num_failures,
        recovery_seconds=recoveries[len(recoveries) // 2] if recoveries else 0.0,
        bytes_per_failure=sum(one.bytes_moved for one in outcomes) / num_failures,
        blocked_share=blocked / (workload.step_seconds + blocked),
        snapshot_bytes=0.0 if strategy.snapshot_every is None else kept,
        sources={name: count / len(recoveries) for name, count in sources.items()},
    )


def recommended(estimates: Sequence[Estimate]) -> Estimate:
    """The first of those whose goodput is the highest, or as good as that."""
    highest = max(one.goodput for one in estimates)
    return next(one for one in estimates if one.goodput >= highest - EQUAL)
