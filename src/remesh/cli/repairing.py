"""`remesh repair`: a new checkpoint of what is whole in a damaged one. Nothing needs torch."""

from __future__ import annotations

import shlex
from dataclasses import asdict

import click

from remesh._repr import format_bytes, listed
from remesh.cli import output
from remesh.core.geometry import Box
from remesh.maintenance.repair import RepairReport, plan_repair, write_repaired

MAX_HOLES = 4
"""Holes of a tensor that are listed for people; JSON has all."""


@click.command(
    epilog=output.example(
        "remesh repair runs/step_00001000 --dry-run",
        "remesh repair runs/step_00001000 --to runs/step_00001000-repaired",
    )
)
@click.argument("path")
@click.option("--to", "target", metavar="TARGET", help="Directory of the new checkpoint.")
@click.option("--dry-run", is_flag=True, help="Only say what can be saved.")
@click.option(
    "--save", "save_id", metavar="ID", help="Which save, if the files of several lie there."
)
@click.option(
    "--keep-unchecked",
    is_flag=True,
    help="Save also what no digest proves, which may be wrong.",
)
@output.json_option
@click.pass_context
def repair(
    ctx: click.Context,
    *,
    path: str,
    target: str | None,
    dry_run: bool,
    save_id: str | None,
    keep_unchecked: bool,
    as_json: bool,
) -> None:
    """Save what can be saved of a damaged checkpoint into a new one.

    Commit record, index and values may be damaged or gone: an index is made anew from the headers
    of the data files. Only whole tensors are saved, and only what a digest proves to be what was
    saved once. With --keep-unchecked the rest is saved as well, and the new checkpoint says so to
    everything that loads or verifies it. PATH is only read. The exit code is 0 if everything is
    saved and proven, 1 if something is lost, left out or unchecked, 2 if nothing can be saved.
    """
    if target is None and not dry_run:
        raise click.UsageError("give --to TARGET for the new checkpoint, or --dry-run")
    plan = plan_repair(path, save_id=save_id, keep_unchecked=keep_unchecked)
    report = plan.report
    if target is not None and not dry_run and not report.is_empty:
        report = write_repaired(plan, target)
    if as_json:
        is_complete = report.is_complete
        output.print_json({**asdict(report), "is_complete": is_complete})
    else:
        _print_report(report, save_id)
    if report.is_empty:
        hint = "; --keep-unchecked saves what no digest proves" if report.left_out else ""
        output.print_error(f"{report.source}: nothing can be saved{hint}")
        ctx.exit(output.EXIT_USAGE)
    if not report.is_complete:
        ctx.exit(output.EXIT_DAMAGED)


def _print_report(report: RepairReport, save_id: str | None) -> None:
    line = output.line
    line(f"{report.source}: save {report.save_id}", style="bold")
    output.print_facts(
        [("record", report.record), ("index", report.index), ("values", report.values)],
    )
    if report.files:
        output.print_table(
            ("<state", "<file", "<problem"),
            report.files,
            lambda file: (file.state, file.path, file.problem),
            indent="  ",
        )
    size = format_bytes(report.num_bytes)
    can_be = "saved" if report.target else "can be saved"
    line(
        f"{can_be}: {output.plural(len(report.saved), 'tensor')} ({size}) and "
        f"{output.plural(report.num_values, 'value')}"
    )
    if report.unchecked:
        names = output.listed(report.unchecked, show_all=False)
        line(f"  of which no digest proves: {names}", style="yellow")
    if report.left_out:
        names = output.listed(report.left_out, show_all=False)
        line(f"left out, because no digest proves them: {names}", style="yellow")
        line("  they may be right or wrong; --keep-unchecked saves them, too", style="yellow")
    if report.lost or report.lost_aliases:
        line(
            f"lost: {output.plural(len(report.lost) + len(report.lost_aliases), 'tensor')}",
            style="red",
        )
        for tensor in report.lost:
            line(f"  {tensor.name} {output.format_shape(tensor.shape)}: {_holes(tensor.holes)}")
        for alias in report.lost_aliases:
            line(f"  {alias}: tied to one of these")
    if report.values in {"damaged", "missing"}:
        line("lost: all plain values and objects", style="red")
    for note in report.notes:
        line(f"note: {note}")
    if report.target:
        line(f"written to {report.target}")
    elif not report.is_empty:
        line(f"To save it: {_next_command(report, save_id)}")


def _next_command(report: RepairReport, save_id: str | None) -> str:
    source = report.source.rstrip("/")
    words = ["remesh", "repair", source, "--to", f"{source}-repaired"]
    if save_id is not None:
        words += ["--save", save_id]
    if report.left_out:
        words.append("--keep-unchecked")
    return shlex.join(words)


def _holes(holes: tuple[Box, ...]) -> str:
    if not holes:
        return "its pieces contradict each other"
    return f"missing {listed(holes, MAX_HOLES)}"
