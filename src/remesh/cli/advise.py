"""`remesh advise`: how often to save where, and what goodput to expect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output
from remesh.formats import native
from remesh.simulation.advice import Estimate, estimate, recommended, strategies
from remesh.simulation.cluster import (
    LLAMA3_RATES,
    Cluster,
    FailureRates,
    Workload,
    scaled,
)
from remesh.simulation.training import Durations

_F = TypeVar("_F", bound=Callable[..., Any])

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgtp]?)(i?)b?(?:/s)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def _num_bytes(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    """The value of an option that takes bytes, or those of a second; a callback for click."""
    if text is None:
        return None
    found = _BYTES.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no number of bytes; write 80GB or 1.5TiB, say")
    size: float = float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2].lower()]
    if not 0 < size < math.inf:
        raise click.BadParameter(f"{text!r} must be more than nothing, and finite")
    return size


def _option(flag: str, kind: object, metavar: str, text: str, **more: Any) -> Callable[[_F], _F]:
    return click.option(flag, type=kind, metavar=metavar, help=text, **more)


def _bytes_option(flag: str, text: str, default: str | None = None) -> Callable[[_F], _F]:
    return _option(flag, None, "BYTES", text, callback=_num_bytes, default=default)


_COUNT, _SECONDS = click.IntRange(min=1), click.FloatRange(min=0, min_open=True)


@click.command(
    epilog=output.example(
        "remesh advise --checkpoint runs/step_00001000 --nodes 4 --step-seconds 0.5",
        "remesh advise --state-size 1TB --nodes 64 --spares 2 --copies 8 --step-seconds 4",
    )
)
@_bytes_option("--state-size", "Bytes of the state: weights and optimizer.")
@_option("--checkpoint", str, "PATH", "A checkpoint whose size is that of the state.")
@_option("--nodes", _COUNT, "N", "Nodes that train.", required=True)
@_option("--ranks-per-node", _COUNT, "N", "Training processes of a node.", default=8)
@_option("--spares", click.IntRange(min=0), "N", "Further nodes that wait for a place.", default=0)
@_option("--step-seconds", _SECONDS, "SECONDS", "Time of a step.", required=True)
@_option(
    "--copies",
    _COUNT,
    "N",
    "Nodes that hold each element: 1 if the state is fully sharded (FSDP, ZeRO), else the "
    "number of data-parallel replicas (DDP, HSDP).",
    default=1,
)
@_option(
    "--failures-per-day",
    click.FloatRange(min=0),
    "NUMBER",
    "Failures of the whole job; by default those of Llama 3's training, per node.",
)
@_bytes_option("--storage-write", "What the storage takes a second, from all nodes.", "10GB")
@_bytes_option("--storage-read", "What it gives a second; by default as much as it takes.")
@_bytes_option("--link", "What a node receives a second from others.", "25GB")
@_bytes_option("--memory", "What a node copies in its memory a second.", "40GB")
@_option(
    "--start-seconds",
    click.FloatRange(min=0),
    "SECONDS",
    "From the start of a process until it can resume.",
    default=60.0,
)
@_option(
    "--days",
    click.FloatRange(min=1, max=3650),
    "N",
    "Length of each of the simulated jobs.",
    default=30.0,
)
@output.json_option
def advise(
    *, state_size: float | None, checkpoint: str | None, days: float, as_json: bool, **given: Any
) -> None:
    """Say how often to save where, and what goodput to expect.

    Goodput is the part of the time that goes into steps that count. Each way to keep the state is
    given its best intervals (Young and Daly) and simulated against the same failures: checkpoints
    in storage, snapshots in the nodes' memory, and processes that go on with the state that they
    hold. Sizes are bytes, such as 80GB or 1.5TiB.
    """
    if not all(math.isfinite(number) for number in (days, *given.values()) if number is not None):
        raise click.UsageError("all numbers must be finite")
    if (state_size is None) == (checkpoint is None):
        raise click.UsageError("give --state-size or --checkpoint, and not both")
    if checkpoint is not None:
        path = checkpoint
        index = native.retry_if_replaced(lambda: Checkpoint(path)).index
        state_size = float(sum(index[name].num_bytes for name in index))
    nodes, copies = given["nodes"], given["copies"]
    if copies > nodes:
        raise click.UsageError(f"--copies {copies}: there are only {nodes} nodes")
    cluster = Cluster(
        num_nodes=nodes,
        spares=given["spares"],
        ranks_per_node=given["ranks_per_node"],
        link=given["link"],
        memory=given["memory"],
        storage_write=given["storage_write"],
        storage_read=given["storage_read"] or given["storage_write"],
    )
    assert state_size is not None
    workload = Workload(state_bytes=state_size, step_seconds=given["step_seconds"], copies=copies)
    rates = _rates(nodes, given["failures_per_day"])
    durations = Durations(start=given["start_seconds"])
    estimates = [
        estimate(cluster, workload, rates, strategy, days=days, durations=durations)
        for strategy in strategies(cluster, workload, rates)
    ]
    best = recommended(estimates)
    if as_json:
        output.print_json(
            {
                "kind": "advice",
                "failures_per_day": sum(rates.values()),
                "estimates": [asdict(one) for one in estimates],
                "recommended": best.strategy.name,
                "arguments": _arguments(best),
            }
        )
        return
    output.line(
        f"{format_bytes(round(state_size))} on {output.plural(nodes, 'node')}, "
        f"{sum(rates.values()):.3g} failures a day"
    )
    output.print_table(_COLUMNS, estimates, _row)
    output.line(f"recommended: {best.strategy.name}", f"  {_arguments(best)}")


_COLUMNS = (
    ">goodput",
    ">lost a failure",
    ">back after",
    ">blocked",
    ">every (storage)",
    ">(memory)",
    "<state is kept in",
)


def _rates(nodes: int, failures_per_day: float | None) -> FailureRates:
    """Failures a day of this job, of the kinds that Llama 3's training had."""
    if failures_per_day is None:
        return scaled(LLAMA3_RATES, nodes / 2048)
    return scaled(LLAMA3_RATES, failures_per_day / sum(LLAMA3_RATES.values()))


def _row(one: Estimate) -> Sequence[str]:
    strategy = one.strategy
    memory = "-" if strategy.snapshot_every is None else f"{strategy.snapshot_every} steps"
    return (
        f"{one.goodput:.2%}",
        f"{one.steps_lost_per_failure:.1f} steps",
        f"{one.recovery_seconds:.0f} s",
        f"{one.blocked_share:.2%}",
        f"{strategy.storage_every} steps",
        memory,
        strategy.name,
    )


def _arguments(best: Estimate) -> str:
    """The line of a script that keeps its state so."""
    strategy = best.strategy
    words = [f"every={strategy.storage_every}"]
    if strategy.snapshot_every is not None:
        words.append(f"memory_every={strategy.snapshot_every}")
        words.append(f"memory_replicas={strategy.replicas}")
    if strategy.reenters:
        words.append("job=job")
    return f"remesh.Manager(root, {', '.join(words)})"
