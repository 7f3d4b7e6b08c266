"""`remesh verify`: read everything and compare it with its digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click
from rich.console import Console

from remesh._repr import format_bytes
from remesh.cli import output, places
from remesh.cli.checking import Verdict, check, check_entry, paths_in
from remesh.errors import RemeshError


@click.command(epilog=output.example("remesh verify runs/step_00001000", "remesh verify runs"))
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@output.all_option
@places.format_option()
@output.json_option
@click.pass_context
def verify(ctx: click.Context, *, paths: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """Read everything and compare it with its digests.

    Lists all damage: file, range of bytes, and the tensors that lie there. If a PATH is a directory
    of checkpoints, each of them is checked, and unfinished saves are named. The exit code is 1 if a
    checkpoint is damaged, else 2 if there is none at one of the PATHs or it cannot be read, else 0.
    """
    verdicts = []
    console = output.stdout_console()
    for verdict in _check_all(paths):
        verdicts.append(verdict)
        if not as_json:
            _print_verdict(console, verdict, show_all=show_all)
    if as_json:
        output.print_json({"checkpoints": [asdict(verdict) for verdict in verdicts]})
    statuses = {verdict.status for verdict in verdicts}
    if "damaged" in statuses:
        ctx.exit(output.EXIT_DAMAGED)
    if not statuses <= {"sound", "unfinished"}:
        ctx.exit(output.EXIT_USAGE)


def _check_all(paths: Sequence[str]) -> Iterator[Verdict]:
    """The verdicts on all paths, as soon as each is known."""
    for path in paths:
        try:
            entries = paths_in(path)
        except RemeshError:
            entries = []  # `check` meets the same error, and makes it a verdict
        if not entries:
            yield check(path)
        for entry in entries:
            yield check_entry(entry)


def _print_verdict(console: Console, verdict: Verdict, *, show_all: bool) -> None:
    path = output.printable(verdict.path)
    if verdict.status == "sound":
        files = output.plural(verdict.num_files, "file")
        size = format_bytes(verdict.num_bytes)
        # What cannot be compared is not called sound.
        word = "sound" if verdict.has_digests else "readable, no digests to compare with"
        console.out(f"{path}: {word}, {files} with tensors, {size}")
        if verdict.unchecked:
            names = output.printable(output.listed(verdict.unchecked, show_all=show_all))
            text = f"  repaired; no digest proves that these are what was saved: {names}"
            console.out(text, style="yellow")
        return
    if verdict.status == "unfinished":
        console.out(f"{path}: {verdict.error}", style="dim")
        console.out(f"  {output.printable(verdict.advice)}")
        return
    if verdict.status != "damaged":
        output.print_error(verdict.error)
        return
    console.out(f"{path}: damaged", style="red")
    words = {"missing": "missing", "size": "wrong size", "content": "wrong bytes"}
    rows = [
        (
            words[finding.problem],
            f"{finding.start}:{finding.stop}",
            output.printable(finding.file),
            output.printable(output.listed(finding.tensors, show_all=show_all)) or "-",
        )
        for finding in output.capped(verdict.damages, show_all=show_all)
    ]
    if rows:
        output.print_table(console, ("<problem", "<bytes", "<file", "<tensors"), rows, "  ")
        output.print_rest(console, len(verdict.damages), show_all=show_all)
    texts = []
    if verdict.incomplete:
        names = output.listed(verdict.incomplete, show_all=show_all)
        texts.append(f"incomplete: elements of these tensors are not stored exactly once: {names}")
    # An error may say the same.
    advice = "" if "remesh repair" in verdict.error else verdict.advice
    for text in [*texts, *filter(None, [verdict.error, advice])]:
        console.out(f"  {output.printable(text)}")
