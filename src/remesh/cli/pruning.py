"""`remesh prune`: removing what dead saves left behind. Nothing needs torch."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console

from remesh.checkpoint import garbage
from remesh.checkpoint.garbage import Leftover
from remesh.cli import output

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """The value of an option that takes a duration, in seconds; a callback for click.

    Raises:
        BadParameter: If the text is not a duration.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration; write it like 90s, 30m, 1h or 2d")
    return float(found[1]) * _SECONDS[found[2]]


@click.command(
    epilog=output.example("remesh prune runs --incomplete", "remesh prune runs --incomplete --yes")
)
@click.argument("root")
@click.option("--incomplete", is_flag=True, help="What dead saves left behind.")
@click.option(
    "--older-than",
    default="1h",
    show_default=True,
    metavar="DURATION",
    callback=parse_duration,
    help="How long nobody must have touched it: 90s, 30m, 1h, 2d.",
)
@click.option("--yes", "removes", is_flag=True, help="Remove it; otherwise it is only listed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def prune(*, root: str, incomplete: bool, older_than: float, removes: bool, as_json: bool) -> None:
    """Remove what dead saves left in a directory and below it.

    That is: folders data-<save id> that no commit record refers to, and hidden files
    .remesh-put-*, if nothing in them was changed for some time (a running save changes its files
    all the time). Checkpoints are never touched, nor is anything that no save writes. Without
    --yes nothing is removed.
    """
    if not incomplete:
        raise click.UsageError("say what to prune: --incomplete")
    now = time.time()
    leftovers = garbage.decide(garbage.look(root), now=now, older_than=older_than)
    removed = {
        leftover.path
        for leftover in leftovers
        if removes
        and not leftover.kept
        and garbage.remove(leftover, root, now=time.time(), older_than=older_than)
    }
    if as_json:
        items = [{**asdict(one), "removed": one.path in removed} for one in leftovers]
        output.print_json({"root": root, "leftovers": items})
        return
    _print_leftovers(output.stdout_console(), leftovers, removed, removes=removes)


def _print_leftovers(
    console: Console, leftovers: Sequence[Leftover], removed: set[str], *, removes: bool
) -> None:
    if not leftovers:
        console.out("nothing is left of dead saves", highlight=False)
        return
    rows = []
    for one in leftovers:
        what = "removed" if one.path in removed else "kept" if one.kept or removes else "garbage"
        where = output.printable(one.path)
        why = f"  ({output.printable(one.kept)})" if one.kept else ""
        rows.append((what, _age(one.age), output.format_bytes(one.num_bytes), f"{where}{why}"))
    output.print_table(console, ("<what", ">age", ">size", "<path"), rows)
    chosen = [one for one in leftovers if (one.path in removed if removes else not one.kept)]
    size = output.format_bytes(sum(one.num_bytes for one in chosen))
    count = output.plural(len(chosen), "leftover")
    if removes:
        console.out(f"removed {count}, {size}", highlight=False)
    elif chosen:
        console.out(f"{count}, {size}; --yes removes them", highlight=False)


def _age(seconds: float) -> str:
    """An age in its largest whole unit: `3h`."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{max(int(seconds), 0)}s"
