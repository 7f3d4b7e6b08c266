"""`remesh verify`: read everything and compare it with its digests.

A sound record and index let every block of every file be compared. If the index or the values are
damaged themselves, the checkpoint cannot be opened; then those files and the sizes of all others
are checked by the record, and if even that is damaged, only it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places
from remesh.cli.ls import advice_on
from remesh.core.integrity import Finding, hex_digest, repair_advice
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RemeshError,
)
from remesh.events import progress
from remesh.formats import native
from remesh.storage import Storage, open_storage, shown_url


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
    for verdict in _check_all(paths):
        verdicts.append(verdict)
        if not as_json:
            _print_verdict(verdict, show_all=show_all)
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
            is_one, storage = places.is_checkpoint(path), open_storage(path)
            found = [] if is_one else catalog.list_checkpoints(storage, with_others=True)
        except RemeshError:
            found = []  # `check` meets the same error, and makes it a verdict
        if not found:
            yield check(path)
        for one in found:
            if one.status == "unfinished":
                advice = advice_on(one)
                yield Verdict(one.path, "unfinished", error=one.problem, advice=advice)
            else:
                yield check(one.path)


def _print_verdict(verdict: Verdict, *, show_all: bool) -> None:
    path = verdict.path
    if verdict.status == "sound":
        files = output.plural(verdict.num_files, "file")
        size = format_bytes(verdict.num_bytes)
        # What cannot be compared is not called sound.
        word = "sound" if verdict.has_digests else "readable, no digests to compare with"
        output.line(f"{path}: {word}, {files} with tensors, {size}")
        if verdict.unchecked:
            names = output.listed(verdict.unchecked, show_all=show_all)
            text = f"  repaired; no digest proves that these are what was saved: {names}"
            output.line(text, style="yellow")
        return
    if verdict.status == "unfinished":
        output.line(f"{path}: {verdict.error}", style="dim")
        output.line(f"  {verdict.advice}")
        return
    if verdict.status != "damaged":
        output.print_error(verdict.error)
        return
    output.line(f"{path}: damaged", style="red")
    if verdict.damages:
        words = {"missing": "missing", "size": "wrong size", "content": "wrong bytes"}
        output.print_table(
            ("<problem", "<bytes", "<file", "<tensors"),
            verdict.damages,
            lambda finding: (
                words[finding.problem],
                f"{finding.start}:{finding.stop}",
                finding.file,
                output.listed(finding.tensors, show_all=show_all) or "-",
            ),
            indent="  ",
            show_all=show_all,
        )
    texts = []
    if verdict.incomplete:
        names = output.listed(verdict.incomplete, show_all=show_all)
        texts.append(f"incomplete: elements of these tensors are not stored exactly once: {names}")
    # An error may say the same.
    advice = "" if "remesh repair" in verdict.error else verdict.advice
    for text in [*texts, *verdict.error.splitlines(), *filter(None, [advice])]:
        output.line(f"  {text}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding at a path."""

    path: str  # what the user called it, without secrets
    status: Literal["sound", "damaged", "unfinished", "absent", "unreadable"]
    """`sound`; `damaged`; `unfinished`, without a commit record, if a directory of checkpoints was
    asked for; `absent`, if there is no checkpoint; or `unreadable`, because the storage refused
    or a newer remesh wrote it."""
    num_files: int = 0  # data files of a checkpoint that could be opened
    num_bytes: int = 0
    damages: tuple[Finding, ...] = ()  # everything that is not as it was written, by file and byte
    error: str = ""  # why it could not be opened or fully checked; empty if it was
    has_digests: bool = True
    """Bytes could be compared with something; other systems record none, and `sound` then
    only says that everything could be read."""
    unchecked: tuple[str, ...] = ()
    """Names that a repair has taken over without a digest that proves them."""
    incomplete: tuple[str, ...] = ()
    """Names of tensors of which some elements are not stored exactly once."""
    advice: str = ""  # the command that shows what can be saved of a damaged checkpoint of remesh


def check(path: str) -> Verdict:
    """Read everything at a path; errors of remesh become part of the verdict."""
    try:
        return native.retry_if_replaced(lambda: _check(path))
    except CheckpointNotFoundError as error:
        return Verdict(shown_url(path), "absent", error=str(error))
    except RemeshError as error:
        return Verdict(shown_url(path), "unreadable", error=str(error))


def _check(path: str) -> Verdict:
    storage = open_storage(path)
    try:
        checkpoint = Checkpoint(path, format=places.format_of(path))
        num_bytes = sum(file.num_bytes for file in checkpoint.index.files)
        with progress(f"reading {shown_url(path)}", num_bytes) as on_read:
            report = checkpoint.verify(on_read)
    except CorruptCheckpointError as error:
        return Verdict(
            shown_url(path),
            "damaged",
            damages=tuple(_check_files(storage)),
            error=str(error),
            advice=_advice(path, storage),
        )
    damages = tuple(merge(report.damages))
    is_damaged = bool(damages or report.incomplete)
    status: Literal["sound", "damaged"] = "damaged" if is_damaged else "sound"
    return Verdict(
        shown_url(path),
        status,
        report.num_files,
        report.num_bytes,
        damages,
        has_digests=report.has_digests,
        unchecked=report.unchecked,
        incomplete=report.incomplete,
        advice=_advice(path, storage) if is_damaged else "",
    )


def _advice(path: str, storage: Storage) -> str:
    """The next command for a damaged checkpoint; repair knows those of remesh alone."""
    return repair_advice(shown_url(path)) if storage.exists(native.RECORD_NAME) else ""


def merge(damages: Iterable[Finding]) -> list[Finding]:
    """Damage, sorted by file and byte, with adjacent blocks as one."""
    merged: list[Finding] = []
    for damage in damages:
        last = merged[-1] if merged else damage
        are_blocks = last.problem == damage.problem == "content"
        if are_blocks and (last.file, last.stop) == (damage.file, damage.start):
            names = tuple(dict.fromkeys((*last.tensors, *damage.tensors)))
            merged[-1] = replace(last, stop=damage.stop, tensors=names)
        else:
            merged.append(damage)
    return merged


def _check_files(storage: Storage) -> list[Finding]:
    """The damage of a checkpoint that cannot be opened, as far as it can be told."""
    if not storage.exists(native.RECORD_NAME):
        return []
    try:
        record, findings = catalog.read_record_and_sizes(storage)
    except CorruptCheckpointError:
        return [Finding(native.RECORD_NAME, "content", 0, storage.size(native.RECORD_NAME))]
    wrong = {finding.file for finding in findings}
    with native.unless_replaced(storage, native.identity_of(record)):
        for file in (record.index, record.values):
            if file.path not in wrong and hex_digest(storage.read(file.path)) != file.digest:
                findings.append(Finding(file.path, "content", 0, file.num_bytes))
    return findings
