"""What tensors take, and the numbers in them: parts of `remesh ls` and `remesh report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, summary
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.events import progress


@dataclass(frozen=True, slots=True)
class Usage:
    """The tensors whose names begin alike."""

    prefix: str  # what their names begin with
    num_bytes: int  # bytes of the tensors; tied ones count once
    num_elements: int
    num_tensors: int  # how many there are


def _size(num_bytes: int, total: int) -> tuple[str, str]:
    return format_bytes(num_bytes), f"{100 * num_bytes / total if total else 0:.1f} %"


def usages_of(index: Index, depth: int) -> list[Usage]:
    """What tensors take whose names have their first `depth` parts in common, the largest first."""
    tensors = index.tensors
    sizes = tensors.shapes.prod(axis=1)
    found: dict[str, list[int]] = {}
    for name, size, num_bytes in zip(
        tensors.names, sizes.tolist(), (sizes * tensors.itemsizes).tolist(), strict=True
    ):
        parts = name.split(".")
        prefix = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
        counts = found.setdefault(prefix, [0, 0, 0])
        counts[0] += num_bytes
        counts[1] += size
        counts[2] += 1
    usages = [Usage(prefix, *counts) for prefix, counts in found.items()]
    return sorted(usages, key=lambda usage: (-usage.num_bytes, catalog.natural_key(usage.prefix)))


def print_usages(console: Console, usages: Sequence[Usage], *, show_all: bool) -> None:
    """Print which parts of a state take how many bytes."""
    total = sum(usage.num_bytes for usage in usages)
    rows = [
        (
            *_size(usage.num_bytes, total),
            output.format_count(usage.num_elements),
            str(usage.num_tensors),
            output.printable(usage.prefix),
        )
        for usage in output.capped(usages, show_all=show_all)
    ]
    output.print_table(console, (">size", ">share", ">elements", ">tensors", "<name"), rows)
    output.print_rest(console, len(usages), show_all=show_all)


def statistics_of(
    path: str, checkpoint: Checkpoint, names: Sequence[str]
) -> dict[str, summary.Statistics | None]:
    """The statistics of tensors, which are read in chunks; None where a type has none."""
    index = checkpoint.index
    found: dict[str, summary.Statistics | None] = dict.fromkeys(names)
    counted = [name for name in names if summary.is_summarised(index[name].dtype)]
    boxes = [(name, Box.whole(index[name].shape)) for name in counted]
    with progress(f"reading {path}", sum(index[name].num_bytes for name in counted)) as on_read:
        measured = summary.statistics_of_each(checkpoint, boxes, on_read)
    return found | dict(zip(counted, measured, strict=True))


def statistics_cells(found: summary.Statistics | None) -> list[str]:
    """Minimum, maximum, mean, deviation; zeros, NaN and infinities, for people."""
    if found is None:
        return ["-"] * 7
    numbers = (found.minimum, found.maximum, found.mean, found.std)
    counts = (found.num_zero, found.num_nan, found.num_inf)
    return [*map(format_number, numbers), *map(str, counts)]


def print_statistics(
    console: Console, statistics: Mapping[str, summary.Statistics | None], index: Index
) -> None:
    """Print the numbers in tensors, a line each."""
    columns = ("<dtype", ">min", ">max", ">mean", ">std", ">zeros", ">NaN", ">inf", "<name")
    rows = [
        (index[name].dtype, *statistics_cells(found), output.printable(name))
        for name, found in statistics.items()
    ]
    output.print_table(console, columns, rows)


def format_number(number: float | None) -> str:
    """A number of the statistics, for people."""
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.5g}"
