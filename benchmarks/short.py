"""The benchmarks in three minutes: one table, with the limit of each row.

Each benchmark runs by itself with a small state and few rounds; what does not end in time is left
out, and the table says so. Times are multiples of the limit that took turns with it: for files the
same bytes raw, for live state the plain batched send and receive, for a snapshot one copy, for a
compressed state its uncompressed bytes on the link. A recovery has no limit; its seconds are in the
name of the row, beside those of torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import median, print_table, write_json

SECONDS = 180.0
"""Of all together."""

Row = dict[str, Any]
"""What was done, by remesh and by DCP; what is unknown is None."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in its short form.

    Attributes:
        name: Of the module and of its result.
        options: Its options.
        rows: Makes rows of its result.
    """

    name: str
    options: tuple[str, ...]
    rows: Callable[[Any], Iterable[Row]]


def of_files(result: Any) -> Iterator[Row]:
    for task in dict.fromkeys(row["task"] for row in result):
        of = {row["contestant"]: row for row in result if row["task"] == task}
        if "remesh" in of:
            yield row_of(task, of["limit"], of["remesh"], of.get("torch DCP"))


def of_incremental(result: Any) -> Iterator[Row]:
    for name, run in result["runs"].items():
        yield {
            "what": f"1 rank, save again, {name}: {run['written']:.0%} written",
            "limit_seconds": run["limit_seconds"],
            "remesh": run["durable"],
            "dcp": run["dcp_durable"],
            "cpu": run["cpu_seconds"],
        }


def of_reshard(result: Any) -> Iterator[Row]:
    of = {row["contestant"]: row for row in result["rows"]}
    for name, row in of.items():
        if not name.startswith("limit"):
            yield row_of(f"{row['ranks']} ranks, live, {name}", of["limit"], row, None)


def of_snapshots(result: Any) -> Iterator[Row]:
    of = {row["contestant"]: row for row in result}
    for name, row in of.items():
        if name.startswith("snapshot"):
            beside = of["torch DCP"] if name == "snapshot" else None  # it has no replicas
            yield row_of(f"{row['ranks']} ranks, {name}", of["limit"], row, beside)


def of_compression(result: Any) -> Iterator[Row]:
    for row in result["links"]:
        if row["compress"] == "zstd":
            link = f"{row['bytes_per_second'] / 1e6:.0f} MB/s"
            for task in ("save", "load"):
                yield {
                    "what": f"1 rank, {task} at {link}, compressed to {row['stored']:.0%}",
                    "limit_seconds": row["limit_seconds"],
                    "remesh": row[task],
                }


def of_recovery(result: Any) -> Iterator[Row]:
    for name, runs in result["results"].items():
        back = [one["seconds"] for one in runs if one is not None]
        after = f"after {median(back):.1f} s" if back else f"not within {result['limit']:g} s"
        yield {"what": f"4 ranks, {name}: next new step {after}"}


def row_of(what: str, limit: Any, ours: Any, theirs: Any) -> Row:
    return {
        "what": what,
        "limit_seconds": limit["seconds"],
        "remesh": ours["times_limit"],
        "dcp": None if theirs is None else theirs["times_limit"],
        "cpu": ours["cpu_seconds"],
    }


SIDES = ("go on", "torchrun, own store")
"""Whose recovery is measured; torchrun by default may never come back."""
BENCHMARKS = (
    Benchmark("save_load", ("--gib=0.25", "--rounds=2", "--ranks", "2"), of_files),
    Benchmark(
        "reshard",
        ("--gib=0.5", "--rounds=3", "--ranks", "2", "--cases", "rows to columns"),
        of_reshard,
    ),
    Benchmark("incremental", ("--gib=0.25", "--rounds=2"), of_incremental),
    Benchmark("snapshots", ("--gib=0.25", "--rounds=3", "--ranks", "2"), of_snapshots),
    Benchmark("compression", ("--steps=20", "--copies=1", "--rounds=1"), of_compression),
    Benchmark(
        "recovery",
        ("--repeats=1", "--limit=30", "--failures=worker", "--sides", *SIDES),
        of_recovery,
    ),
)


def run(benchmark: Benchmark, seconds: float) -> list[Row]:
    """The rows of a benchmark; one that says why if it does not end in time or fails."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *benchmark.options]
    if seconds <= 0:
        return [{"what": f"{benchmark.name}: no time was left"}]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        if process.wait(seconds):
            return [{"what": f"{benchmark.name}: ended with {process.returncode}"}]
    except subprocess.TimeoutExpired:
        return [{"what": f"{benchmark.name}: did not end within {seconds:.0f} s"}]
    finally:
        end_group(process)
    document = json.loads(Path(f"bench-output/{benchmark.name}.json").read_text())
    return list(benchmark.rows(document["result"]))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a benchmark and the jobs that it started, whose agents end their processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    ends = time.monotonic() + SECONDS
    rows: list[Row] = []
    for benchmark in BENCHMARKS:
        rows += run(benchmark, ends - time.monotonic())
    table = []
    for row in rows:
        limit, cpu = row.get("limit_seconds"), row.get("cpu")
        times = [row.get(name) for name in ("remesh", "dcp")]
        table.append(
            [
                row["what"],
                "" if limit is None else f"{limit:.2f} s",
                *("" if one is None else f"{one:.1f}" for one in times),
                "" if cpu is None else f"{cpu:.2f} s",
            ]
        )
    columns = ["", "limit", "remesh: x limit", "DCP: x limit", "remesh: CPU"]
    print_table("remesh in three minutes", columns, table)
    write_json("short", rows)


if __name__ == "__main__":
    main()
