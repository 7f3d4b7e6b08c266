"""`remesh latest`, `pin`, `unpin`, and the part of `remesh prune` that removes checkpoints.

They decide by the same functions as `remesh.Manager`. Nothing needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec

from remesh import catalog
from remesh._repr import format_bytes
from remesh.catalog import CheckpointInfo
from remesh.checkpoint import Checkpoint
from remesh.cli import output
from remesh.errors import RemeshError
from remesh.storage import open_storage
from remesh.training import retention
from remesh.training.retention import KeepBest, KeepEvery, KeepLast, KeepPolicy, RetentionDecision


@click.command(epilog=output.example("remesh latest runs"))
@click.argument("root")
@output.json_option
def latest(*, root: str, as_json: bool) -> None:
    """Print the path of the newest checkpoint in a directory.

    The newest is the committed one with the highest step that has all of its files and is not
    known to be damaged; a job resumes from it. The exit code is 2 if there is none.
    """
    storage = open_storage(root)
    from_newest = reversed(catalog.list_checkpoints(storage))
    newest = next((info for info in from_newest if not _checked(info).problem), None)
    if newest is None:
        raise catalog.nothing_at(storage)
    if as_json:
        output.print_json(_facts(newest))
    else:
        click.echo(output.printable(newest.path))


@click.command(epilog=output.example("remesh pin runs/step_00001000"))
@click.argument("checkpoint")
def pin(*, checkpoint: str) -> None:
    """Keep a checkpoint, whatever retention policies say."""
    Checkpoint(checkpoint)
    catalog.pin(checkpoint)
    click.echo(f"{output.printable(checkpoint)}: pinned")


@click.command(epilog=output.example("remesh unpin runs/step_00001000"))
@click.argument("checkpoint")
def unpin(*, checkpoint: str) -> None:
    """Let retention policies decide about a checkpoint again."""
    Checkpoint(checkpoint)
    catalog.unpin(checkpoint)
    click.echo(f"{output.printable(checkpoint)}: not pinned")


def parse_best(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> list[KeepBest]:
    """The values of `--keep-best`; a callback for click."""
    found = []
    for text in texts:
        metric, _, rest = text.partition(":")
        mode, _, count = rest.partition(":")
        if not metric or mode not in {"min", "max"} or not (count or "1").strip("0").isdecimal():
            raise click.BadParameter(f"{text!r}: write METRIC:min or METRIC:max, then :N for N")
        found.append(KeepBest(metric, "min" if mode == "min" else "max", int(count or 1)))
    return found


def keep_options(
    keep_last: int | None, keep_every: int | None, keep_best: Sequence[KeepBest]
) -> list[KeepPolicy]:
    """The policies that the options of `remesh prune` name."""
    last = [] if keep_last is None else [KeepLast(keep_last)]
    every = [] if keep_every is None else [KeepEvery(keep_every)]
    return [*last, *every, *keep_best]


def prune_checkpoints(
    root: str, policies: Sequence[KeepPolicy], run: str | None, *, removes: bool, as_json: bool
) -> None:
    """Show what policies keep of a directory's checkpoints; remove the rest if asked to."""
    storage = open_storage(root)
    infos = [_checked(info) for info in catalog.list_checkpoints(storage)]
    if not infos:
        raise catalog.nothing_at(storage)
    newest = catalog.newest_of([info for info in infos if not info.problem])
    whose = run if run is not None else "" if newest is None else newest.run
    decisions = retention.decide(infos, policies, run=whose, now=time.time())
    removed: set[str] = set()
    if removes:
        gone = retention.remove_unkept(storage, decisions, now=time.time())
        removed = {info.name for info in gone}
        catalog.finish_removals(storage)
    if as_json:
        items = [
            {
                **_facts(decision.info),
                "kept": list(decision.reasons),
                "removed": decision.info.name in removed,
            }
            for decision in decisions
        ]
        output.print_json({"root": root, "run": whose, "checkpoints": items})
    else:
        _print_decisions(decisions, removed, removes=removes)


def _checked(info: CheckpointInfo) -> CheckpointInfo:
    """What is known of a checkpoint, with a look at the sizes of its files."""
    if info.problem:
        return info
    below = open_storage(info.path)
    try:
        _, findings = catalog.read_record_and_sizes(below)
    except RemeshError as error:
        return msgspec.structs.replace(info, problem=str(error))
    return msgspec.structs.replace(info, problem=catalog.describe_findings(findings))


def _facts(info: CheckpointInfo) -> dict[str, object]:
    return {
        "path": info.path,
        "step": info.step,
        "run": info.run,
        "created": info.created,
        "num_bytes": info.num_bytes,
        "metrics": info.metrics,
        "pinned": info.is_pinned,
        "problem": info.problem,
    }


def _print_decisions(
    decisions: Sequence[RetentionDecision], removed: set[str], *, removes: bool
) -> None:
    rows = []
    for decision in decisions:
        info = decision.info
        gone = info.name in removed
        rest = "removed" if gone else "in use" if removes else "superfluous"
        what = "kept" if decision.is_kept else rest
        why = f"  ({output.printable('; '.join(decision.reasons))})" if decision.is_kept else ""
        size = format_bytes(info.num_bytes)
        rows.append((what, str(info.step), size, f"{output.printable(info.path)}{why}"))
    console = output.stdout_console()
    output.print_table(console, ("<what", ">step", ">size", "<path"), rows)
    chosen = [
        decision
        for decision in decisions
        if (decision.info.name in removed if removes else not decision.is_kept)
    ]
    size = format_bytes(sum(decision.info.num_bytes for decision in chosen))
    count = output.plural(len(chosen), "checkpoint")
    if removes:
        console.out(f"removed {count}, {size}")
    elif chosen:
        console.out(f"{count}, {size}; --yes removes them")
    else:
        console.out("nothing to remove")
