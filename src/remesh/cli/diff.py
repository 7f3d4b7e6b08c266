"""`remesh diff`: what differs between two checkpoints, of any formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console

from remesh.checkpoint import Checkpoint
from remesh.cli import output, places
from remesh.cli.comparing import Comparison, TensorDifference, Tolerance, compare
from remesh.cli.transforms import transform_option
from remesh.events import progress
from remesh.formats import native
from remesh.storage import shown_url
from remesh.transform import Transform


@click.command(
    epilog=output.example(
        "remesh diff runs/step_00001000 runs/step_00002000",
        "remesh diff runs/step_00001000 exported --transform names.aoa --atol 1e-6",
    )
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@transform_option("What A becomes before it is compared")
@click.option("--structure", is_flag=True, help="Compare names, types and shapes alone.")
@click.option(
    "--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance; 0 by default."
)
@click.option(
    "--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance; 0 by default."
)
@output.all_option
@places.format_option()
@output.json_option
@click.pass_context
def diff(
    ctx: click.Context,
    *,
    first: str,
    second: str,
    transform: Transform | None,
    structure: bool,
    rtol: float,
    atol: float,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show what differs between two checkpoints, of any formats.

    Names, types and shapes of tensors, their values, and plain values. Elements are equal if they
    differ by atol + rtol * abs(B) at most; two NaN are equal. Tensors are read in chunks. With a
    transformation plain values are not compared. The exit code is 0 if nothing differs, 1 if
    something does, 2 if one of them cannot be read.
    """
    tolerance = None if structure else Tolerance(rtol, atol)

    def run() -> Comparison:
        one, other = Checkpoint(places.source(first)), Checkpoint(places.source(second))
        num_bytes = 0 if structure else other.index.num_bytes
        with progress(f"comparing {second}", num_bytes) as on_read:
            return compare(one, other, transform=transform, tolerance=tolerance, on_read=on_read)

    comparison = native.begin_anew(run)
    if as_json:
        document = {
            "kind": "difference",
            "first": shown_url(first),
            "second": shown_url(second),
            "equal": comparison.is_equal,
            **asdict(comparison),
        }
        output.print_json(document)
    else:
        _print_comparison(output.stdout_console(), comparison, show_all=show_all)
    if not comparison.is_equal:
        ctx.exit(output.EXIT_DIFFERENT)


def _print_comparison(console: Console, found: Comparison, *, show_all: bool) -> None:
    def names(title: str, listed: Sequence[str]) -> None:
        if listed:
            console.out(f"{title}: {len(listed)}", style="bold")
            shown = output.capped(listed, show_all=show_all)
            console.out("\n".join(f"  {output.printable(name)}" for name in shown))
            output.print_rest(console, len(listed), show_all=show_all)

    names("tensors only in A", found.only_first)
    names("tensors only in B", found.only_second)
    if found.tensors:
        console.out(f"tensors that differ: {len(found.tensors)}", style="bold")
        rows = [_row(one) for one in output.capped(found.tensors, show_all=show_all)]
        columns = ("<dtype", "<shape", ">elements", ">largest", "<name")
        output.print_table(console, columns, rows, "  ")
        output.print_rest(console, len(found.tensors), show_all=show_all)
    names("values only in A", found.only_first_values)
    names("values only in B", found.only_second_values)
    if found.values:
        console.out(f"values that differ: {len(found.values)}", style="bold")
        items = output.capped(list(found.values.items()), show_all=show_all)
        for name, (left, right) in items:
            text = f"{name}: {_short(left)} | {_short(right)}"
            console.out(f"  {output.printable(text)}")
        output.print_rest(console, len(found.values), show_all=show_all)
    equal = output.plural(found.num_equal, "tensor")
    console.out(f"equal: {equal}" + ("" if not found.is_equal else "; nothing differs"))


def _row(one: TensorDifference) -> tuple[str, ...]:
    def both(left: str, right: str) -> str:
        return left if left == right else f"{left} | {right}"

    count = "-" if one.num_different is None else str(one.num_different)
    largest = "-" if one.max_difference is None else f"{one.max_difference:.3g}"
    shapes = both(*(output.format_shape(shape) for shape in one.shapes))
    return both(*one.dtypes), shapes, count, largest, output.printable(one.name)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
