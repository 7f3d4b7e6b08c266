"""`remesh latest`, `pin`, `unpin` and `prune`; checkpoints are chosen as by `remesh.Manager`.

Nothing needs torch.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places
from remesh.cli.ls import facts_of
from remesh.errors import CheckpointNotFoundError, RemeshError, StateError
from remesh.maintenance import orphans
from remesh.storage import Storage, open_storage, shown_url
from remesh.training.policies import KeepLast, decide_retention, remove_unkept


@click.command(epilog=output.example("remesh latest runs"))
@click.argument("root")
@output.json_option
def latest(*, root: str, as_json: bool) -> None:
    """Print the path of the newest checkpoint in a directory.

    The newest is the committed one with the highest step that has all of its files and is not
    known to be damaged; a job resumes from it. The exit code is 2 if there is none.
    """
    storage = open_storage(root)
    newest = catalog.newest_of(catalog.list_checkpoints(storage, compare_sizes=True))
    if newest is None:
        raise _nothing_to_choose(root, storage)
    if as_json:
        output.print_json(facts_of(newest))
    else:
        output.line(newest.path)


@click.command(epilog=output.example("remesh pin runs/step_00001000"))
@click.argument("checkpoint")
def pin(*, checkpoint: str) -> None:
    """Keep a checkpoint, whatever retention policies say."""
    Checkpoint(checkpoint)
    catalog.pin(checkpoint)
    output.line(f"{shown_url(checkpoint)}: pinned")


@click.command(epilog=output.example("remesh unpin runs/step_00001000"))
@click.argument("checkpoint")
def unpin(*, checkpoint: str) -> None:
    """Let retention policies decide about a checkpoint again."""
    Checkpoint(checkpoint)
    catalog.unpin(checkpoint)
    output.line(f"{shown_url(checkpoint)}: not pinned")


def _prune_checkpoints(root: str, keep_last: int, run: str | None, removes: bool) -> dict[str, Any]:
    """What is kept of a directory's checkpoints; the rest is removed if that is asked for."""
    storage = open_storage(root)
    infos = catalog.list_checkpoints(storage, compare_sizes=True)
    if not infos:
        raise _nothing_to_choose(root, storage)
    newest = catalog.newest_of(infos)
    whose = run if run is not None else "" if newest is None else newest.run
    decisions = decide_retention(infos, [KeepLast(keep_last)], run=whose, now=time.time())
    removed: set[str] = set()
    if removes:
        removed = {info.name for info in remove_unkept(storage, decisions, now=time.time())}
        catalog.finish_removals(storage)
    found = [
        {**facts_of(one.info), "kept": list(one.reasons), "removed": one.info.name in removed}
        for one in decisions
    ]
    return {"run": whose, "checkpoints": found}


def _prune_leftovers(root: str, removes: bool) -> dict[str, Any]:
    """What dead saves left; it is removed if that is asked for."""
    found = []
    for one in orphans.find_orphans(root, now=time.time(), older_than=orphans.DEFAULT_AGE):
        gone = (
            removes
            and not one.kept
            and orphans.remove_orphan(one, root, now=time.time(), older_than=orphans.DEFAULT_AGE)
        )
        facts = {key: value for key, value in asdict(one).items() if key != "files"}
        found.append({**facts, "removed": gone})
    return {"leftovers": found}


def _nothing_to_choose(root: str, storage: Storage) -> RemeshError:
    """The error about a directory that has no checkpoint of which a manager knows the step."""
    if places.is_checkpoint(root):
        return StateError(f"{storage.url}: a checkpoint itself; give the directory that it is in")
    found = catalog.list_checkpoints(storage, compare_sizes=True, with_others=True)
    if any(not info.problem for info in found):
        return CheckpointNotFoundError(
            f"{storage.url}: no checkpoint of remesh whose name ends with a step\n"
            f"remesh ls {shlex.quote(shown_url(root))} lists those that are there"
        )
    return catalog.nothing_at(storage)


def _print_removals(
    noun: str, when: str, items: Sequence[Mapping[str, Any]], rest: str, *, removes: bool
) -> None:
    """Print what is kept or removed, and a sum; `rest` is the word for what is neither."""

    def row(one: Mapping[str, Any]) -> tuple[str, ...]:
        what = "removed" if one["removed"] else "kept" if one["kept"] else rest
        reasons = one["kept"] if isinstance(one["kept"], str) else "; ".join(one["kept"])
        why = f"  ({reasons})" if reasons else ""
        at = _age(one["age"]) if when == "age" else str(one[when])
        return what, at, format_bytes(one["num_bytes"]), f"{one['path']}{why}"

    output.print_table(("<what", f">{when}", ">size", "<path"), items, row)
    chosen = [one for one in items if (one["removed"] if removes else not one["kept"])]
    size = format_bytes(sum(one["num_bytes"] for one in chosen))
    what = f"{output.plural(len(chosen), noun)}, {size}"
    if removes:
        output.line(f"removed {what}")
    else:
        output.line(f"{what}; --yes removes them" if chosen else "nothing to remove")


@click.command(
    epilog=output.example(
        "remesh prune runs --incomplete --yes",
        "remesh prune runs --keep-last 3",
    )
)
@click.argument("root")
@click.option("--incomplete", is_flag=True, help="What dead saves left behind.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Remove checkpoints, but not the newest N.",
)
@click.option("--run", help="Whose checkpoints may be removed; by default the newest one's run.")
@click.option("--yes/--dry-run", "removes", default=False, help="Remove it, or only list it.")
@output.json_option
def prune(
    *,
    root: str,
    incomplete: bool,
    keep_last: int | None,
    run: str | None,
    removes: bool,
    as_json: bool,
) -> None:
    """Remove what dead saves left in a directory, or checkpoints that need not be kept.

    With --incomplete: folders data-<save id>, in ROOT and below it, that no commit record refers
    to, and hidden files .remesh-put-*, if nothing in them was changed for an hour (a running save
    changes its files all the time). Checkpoints are not touched, nor is anything that no save
    writes.

    With --keep-last: the checkpoints directly in ROOT but the newest N. Those that are pinned, in
    use, damaged or of another run stay too.

    Without --yes nothing is removed.
    """
    if incomplete == (keep_last is not None):
        raise click.UsageError("say what to prune: --incomplete, or --keep-last")
    if keep_last is None:
        document = _prune_leftovers(root, removes)
    else:
        document = _prune_checkpoints(root, keep_last, run, removes)
    if as_json:
        output.print_json({"root": shown_url(root), **document})
    elif not incomplete:
        rest = "in use" if removes else "superfluous"
        _print_removals("checkpoint", "step", document["checkpoints"], rest, removes=removes)
    elif found := document["leftovers"]:
        rest = "kept" if removes else "garbage"
        _print_removals("leftover", "age", found, rest, removes=removes)
    else:
        output.line("nothing is left of dead saves")


def _age(seconds: float) -> str:
    """An age in whole hours, or minutes if it is less than one: `3h`."""
    return f"{int(seconds // 3600)}h" if seconds >= 3600 else f"{max(int(seconds // 60), 0)}m"
