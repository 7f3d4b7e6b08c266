"""What failures cost a training of 16,384 ranks: a simulation, whole, with a chart.

The job is about that of Llama 3 405B: 2,048 nodes, its failures, 54 days. Each strategy for the
state runs over several intervals between checkpoints, once with a state that is fully sharded and
once with two data-parallel replicas of it.
Written are `bench-output/goodput.json` and `bench-output/goodput.svg`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import line_chart
from benchmarks.report import median, print_table, write_json
from benchmarks.simulation import (
    DAY,
    LLAMA3_RATES,
    Cluster,
    Outcome,
    Strategy,
    Workload,
    draw_failures,
    simulate,
)

CLUSTER = Cluster(num_nodes=2048, spares=64, storage_write=2e12, storage_read=2e12)
SHARDED = Workload(state_bytes=5.7e12, step_seconds=6.0)
REPLICATED = dataclasses.replace(SHARDED, copies=2)
MINUTES = (1, 2, 5, 10, 20, 40, 80, 160)
SNAPSHOT_MINUTES = 1
WAYS: dict[str, tuple[dict[str, Any], Workload]] = {
    "storage": ({}, SHARDED),
    "snapshots, no replica": ({"replicas": 0}, SHARDED),
    "snapshots, 1 replica": ({"replicas": 1}, SHARDED),
    "snapshots, 2 replicas": ({"replicas": 2}, SHARDED),
    "entered again, snapshots, 1 replica": ({"replicas": 1, "reenters": True}, SHARDED),
    "live memory, 2 data-parallel replicas": ({"reenters": True}, REPLICATED),
}


def strategy_of(name: str, minutes: int) -> Strategy:
    """A strategy that saves to storage every so many minutes."""
    options, workload = WAYS[name]
    steps = 60 / workload.step_seconds
    snapshots = round(SNAPSHOT_MINUTES * steps) if "replicas" in options else None
    strategy = Strategy(name=name, storage_every=round(minutes * steps), snapshot_every=snapshots)
    return dataclasses.replace(strategy, **options)


def rows_of(by_minutes: Mapping[int, Sequence[Outcome]]) -> list[dict[str, float]]:
    """What the jobs of a strategy came to, for each interval between checkpoints."""
    rows = []
    for minutes, outcomes in by_minutes.items():
        failures = sum(one.num_failures for one in outcomes)
        recoveries = [seconds for one in outcomes for seconds in one.recoveries]
        rows.append(
            {
                "minutes": minutes,
                "goodput": sum(one.goodput for one in outcomes) / len(outcomes),
                "failures": failures,
                "steps_lost": sum(one.steps_lost for one in outcomes) / failures,
                "recovery_seconds": median(recoveries),
                "bytes_moved": sum(one.bytes_moved for one in outcomes) / failures,
            }
        )
    return rows


HEAD = (
    "the state is kept in",
    "goodput, at best",
    "with checkpoints every",
    f"every {MINUTES[-1]} min",
    "steps lost a failure",
    "back after",
    "moved a failure",
)


def cells_of(ways: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[list[str]]:
    """Rows of the table below `HEAD`."""
    for name, rows in ways.items():
        best = max(rows, key=lambda row: row["goodput"])
        yield [
            name,
            f"{best['goodput'] * 100:.2f} %",
            f"{best['minutes']} min",
            f"{rows[-1]['goodput'] * 100:.2f} %",
            f"{best['steps_lost']:.1f}",
            f"{best['recovery_seconds']:.0f} s",
            f"{best['bytes_moved'] / 1e9:,.0f} GB",
        ]


def draw(ways: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """The chart."""
    return line_chart(
        "Goodput on 16,384 ranks, simulated",
        {name: [(row["minutes"], row["goodput"]) for row in rows] for name, rows in ways.items()},
        x_title="minutes between checkpoints in storage",
        bottom=0.6,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="jobs of each strategy and interval")
    parser.add_argument("--days", type=float, default=54.0)
    options = parser.parse_args(arguments)
    seconds = options.days * DAY
    failures = [draw_failures(CLUSTER, LLAMA3_RATES, seconds, job) for job in range(options.jobs)]
    ways = {}
    for name, (_, workload) in WAYS.items():
        by_minutes = {
            minutes: [
                simulate(CLUSTER, workload, strategy_of(name, minutes), drawn, seconds)
                for drawn in failures
            ]
            for minutes in MINUTES
        }
        ways[name] = rows_of(by_minutes)
    title = f"2,048 nodes, {options.days:g} days, {options.jobs} jobs each"
    print_table(title, HEAD, list(cells_of(ways)))
    write_json("goodput", {"jobs": options.jobs, "days": options.days, "ways": ways})
    Path("bench-output/goodput.svg").write_text(draw(ways))


if __name__ == "__main__":
    main()
