"""`remesh stats`: the numbers in tensors, and how they are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase

import click
from rich.console import Console

from remesh import catalog
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.errors import StateError
from remesh.formats import native
from remesh.geometry import Box
from remesh.progress import progress
from remesh.storage import shown_url

NUM_BINS = 16
_BAR_WIDTH = 40


@click.command(
    epilog=output.example(
        "remesh stats runs/step_00001000 'model.*'", "remesh stats model.safetensors lm_head.weight"
    )
)
@click.argument("path")
@click.argument("patterns", metavar="NAME...", nargs=-1, required=True)
@places.format_option()
@output.json_option
def stats(*, path: str, patterns: tuple[str, ...], as_json: bool) -> None:
    """Show minimum, maximum, mean, deviation, NaN and infinities of tensors.

    NAMEs may be patterns (* any text, ? any character, [ab] one of these); quote them. If one
    tensor is meant, a histogram of its finite elements is shown too. Tensors are read in chunks, so
    they may be larger than memory. Complex tensors have no statistics. The exit code is 0 whatever
    the numbers are.
    """
    rows = native.begin_anew(lambda: _measure(path, patterns))
    if as_json:
        output.print_json({"kind": "statistics", "path": shown_url(path), "tensors": rows})
    else:
        _print_rows(output.stdout_console(), rows)


def _measure(path: str, patterns: Sequence[str]) -> list[dict[str, object]]:
    """The statistics of each tensor that matches, and the histogram if it is only one."""
    checkpoint = Checkpoint(places.source(path))
    index = checkpoint.index
    names = [
        name
        for name in sorted(index, key=catalog.natural_key)
        if any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not names and len(patterns) == 1:
        raise StateError(places.no_such_name(path, patterns[0], list(index)))
    if not names:
        raise StateError(f"no tensor in {shown_url(path)} matches {' '.join(patterns)}")
    counted = [name for name in names if summary.is_summarised(index[name].dtype)]
    num_bytes = sum(index[name].num_bytes for name in counted)
    boxes = [(name, Box.whole(index[name].shape)) for name in counted]
    rows: dict[str, dict[str, object]] = {
        name: {
            "name": name,
            "dtype": index[name].dtype,
            "shape": index[name].shape,
            "statistics": None,
            "histogram": None,
        }
        for name in names
    }
    with progress(f"reading {path}", num_bytes * (2 if len(names) == 1 else 1)) as on_read:
        statistics = summary.statistics_of_each(checkpoint, boxes, on_read)
        for (name, box), found in zip(boxes, statistics, strict=True):
            rows[name]["statistics"] = asdict(found)
            if len(names) == 1:
                rows[name]["histogram"] = summary.histogram_of(
                    checkpoint, name, box, found, NUM_BINS, on_read
                )
    return list(rows.values())


def _print_rows(console: Console, rows: Sequence[dict[str, object]]) -> None:
    columns = ("<dtype", ">min", ">max", ">mean", ">std", ">zeros", ">NaN", ">inf", "<name")
    table = []
    for row in rows:
        cells, found = ["-"] * 7, row["statistics"]
        if isinstance(found, dict):
            numbers = (found[key] for key in ("minimum", "maximum", "mean", "std"))
            counts = (found[key] for key in ("num_zero", "num_nan", "num_inf"))
            cells = [*map(format_number, numbers), *map(str, counts)]
        table.append((str(row["dtype"]), *cells, output.printable(str(row["name"]))))
    output.print_table(console, columns, table)
    histogram = rows[0]["histogram"]
    if isinstance(histogram, dict):
        console.out("")
        _print_histogram(console, histogram["edges"], histogram["counts"])


def _print_histogram(console: Console, edges: Sequence[float], counts: Sequence[int]) -> None:
    largest = max(counts)
    table = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "#" * -(-count * _BAR_WIDTH // largest) if count else ""
        table.append((format_number(low), format_number(high), str(count), bar))
    output.print_table(console, (">from", ">to", ">elements", "<"), table)


def format_number(number: float | None) -> str:
    """A number of the statistics, for people."""
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.5g}"
