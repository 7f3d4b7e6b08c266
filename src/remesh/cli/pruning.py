"""`remesh prune`: removing what dead saves left, and what no policy keeps. Nothing needs torch."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console

from remesh._repr import format_bytes
from remesh.cli import keeping, output
from remesh.maintenance import orphans
from remesh.maintenance.orphans import Orphan
from remesh.training.retention import KeepBest

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """The value of an option that takes a duration, in seconds; a callback for click."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration; write it like 90s, 30m, 1h or 2d")
    return float(found[1]) * _SECONDS[found[2]]


@click.command(
    epilog=output.example(
        "remesh prune runs --incomplete --yes",
        "remesh prune runs --keep-last 3 --keep-every 1000 --keep-best loss:min",
    )
)
@click.argument("root")
@click.option("--incomplete", is_flag=True, help="What dead saves left behind.")
@click.option(
    "--older-than",
    default="1h",
    show_default=True,
    metavar="DURATION",
    callback=parse_duration,
    help="How long it must not have changed: 90s, 30m, 1h, 2d.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Remove checkpoints, but not the newest N.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Remove checkpoints, but not those whose step N divides.",
)
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC:min|max[:N]",
    callback=keeping.parse_best,
    help="Remove checkpoints, but not the best one, or N, by a metric.",
)
@click.option("--run", help="Whose checkpoints may be removed; by default the newest one's run.")
@click.option(
    "--yes/--dry-run", "removes", default=False, help="Remove it, or only list it (the default)."
)
@output.json_option
def prune(
    *,
    root: str,
    incomplete: bool,
    older_than: float,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Sequence[KeepBest],
    run: str | None,
    removes: bool,
    as_json: bool,
) -> None:
    """Remove what dead saves left in a directory, or checkpoints that need not be kept.

    With --incomplete: folders data-<save id>, in ROOT and below it, that no commit record refers
    to, and hidden files .remesh-put-*, if nothing in them was changed for some time (a running save
    changes its files all the time). Checkpoints are not touched, nor is anything that no save
    writes.

    With --keep-...: those checkpoints directly in ROOT that none of these options keeps. Whatever
    they say, the newest good checkpoint stays, and so do those that are pinned, in use, damaged or
    of another run.

    Without --yes nothing is removed.
    """
    policies = keeping.keep_options(keep_last, keep_every, keep_best)
    if incomplete == bool(policies):
        raise click.UsageError("say what to prune: --incomplete, or --keep-last and the like")
    if policies:
        keeping.prune_checkpoints(root, policies, run, removes=removes, as_json=as_json)
        return
    now = time.time()
    leftovers = orphans.find_orphans(orphans.scan(root), now=now, older_than=older_than)
    removed = {
        leftover.path
        for leftover in leftovers
        if removes
        and not leftover.kept
        and orphans.remove_orphan(leftover, root, now=time.time(), older_than=older_than)
    }
    if as_json:
        items = [{**asdict(one), "removed": one.path in removed} for one in leftovers]
        output.print_json({"root": root, "leftovers": items})
        return
    _print_leftovers(output.stdout_console(), leftovers, removed, removes=removes)


def _print_leftovers(
    console: Console, leftovers: Sequence[Orphan], removed: set[str], *, removes: bool
) -> None:
    if not leftovers:
        console.out("nothing is left of dead saves")
        return
    rows = []
    for one in leftovers:
        what = "removed" if one.path in removed else "kept" if one.kept or removes else "garbage"
        where = output.printable(one.path)
        why = f"  ({output.printable(one.kept)})" if one.kept else ""
        rows.append((what, _age(one.age), format_bytes(one.num_bytes), f"{where}{why}"))
    output.print_table(console, ("<what", ">age", ">size", "<path"), rows)
    chosen = [one for one in leftovers if (one.path in removed if removes else not one.kept)]
    size = format_bytes(sum(one.num_bytes for one in chosen))
    count = output.plural(len(chosen), "leftover")
    if removes:
        console.out(f"removed {count}, {size}")
    elif chosen:
        console.out(f"{count}, {size}; --yes removes them")


def _age(seconds: float) -> str:
    """An age in its largest whole unit: `3h`."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{max(int(seconds), 0)}s"
