"""`remesh ls`: what a checkpoint holds, and what lies in a directory of checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.catalog import CheckpointInfo
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.core.integrity import Finding, repair_advice
from remesh.errors import CorruptCheckpointError, StateError
from remesh.formats import native
from remesh.storage import open_storage, shown_url


@click.command(
    epilog=output.example(
        "remesh ls runs",
        "remesh ls runs/step_00001000 'model.*'",
        "remesh ls model.safetensors '*.weight'",
    )
)
@click.argument("path")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--values", "with_values", is_flag=True, help="List plain values and objects too.")
@output.all_option
@places.format_option()
@output.json_option
def ls(
    *,
    path: str,
    patterns: tuple[str, ...],
    with_values: bool,
    show_all: bool,
    as_json: bool,
) -> None:
    """List what a checkpoint holds, or the checkpoints in a directory.

    PATTERNs choose names (* any text, ? any character, [ab] one of these); quote them.

    Of a directory of checkpoints, each is listed with its status: committed (the newest has a *),
    unfinished (no commit record), damaged (files are missing or have another size), or unreadable.
    Only `remesh verify` reads everything. In a bucket, those of remesh are found one level down;
    give the path of any other one.
    """
    storage = open_storage(path)
    if places.is_checkpoint(path):
        listing = native.retry_if_replaced(lambda: _Listing.of(path, patterns))
        if as_json:
            output.print_json(_listing_document(listing, with_values))
        else:
            # What a pattern chose is shown; by default there may be too many.
            _print_listing(listing, with_values or bool(patterns), show_all)
        if listing.findings:
            raise CorruptCheckpointError(
                f"{listing.path}: damaged: {catalog.describe_findings(listing.findings)}. "
                f"{repair_advice(listing.path)}"
            )
        return
    steps = catalog.list_checkpoints(storage, compare_sizes=True, with_others=True)
    if not steps:
        raise catalog.nothing_at(storage)
    found = [step for step in steps if _matches(step.name, patterns)]
    if not found:
        raise StateError(f"no checkpoint in {shown_url(path)} matches {' '.join(patterns)}")
    newest = catalog.newest_of(steps)
    if as_json:
        checkpoints = [{**facts_of(step), "newest": step is newest} for step in found]
        output.print_json(
            {"kind": "directory", "path": shown_url(path), "checkpoints": checkpoints}
        )
    else:
        _print_steps(found, newest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def facts_of(step: CheckpointInfo) -> dict[str, object]:
    """The properties of a checkpoint, as JSON has them; null for what is not known."""
    return {
        "name": step.name,
        "path": step.path,
        "status": step.status,
        "problem": step.problem,
        "step": None if step.step < 0 else step.step,
        "run": step.run,
        "created": step.created or None,
        "num_bytes": step.num_bytes,
        "world_size": step.world_size or None,
        "metrics": step.metrics,
        "pinned": step.is_pinned,
        "format": step.format,
        "repaired_from": step.repaired_from,
        "num_lost": step.num_lost,
    }


def _print_steps(steps: Sequence[CheckpointInfo], newest: CheckpointInfo | None) -> None:
    styles = {"committed": None, "unfinished": "dim", "damaged": "red", "unreadable": "red"}
    output.print_table(
        ("<status", "<committed", ">ranks", ">size", "<name"),
        steps,
        lambda step: (
            step.status,
            output.format_time(step.created) if step.created else "-",
            str(step.world_size) if step.world_size else "-",
            format_bytes(step.num_bytes),
            step.name + _marks(step, newest),
        ),
        style=lambda step: "bold green" if step is newest else styles[step.status],
    )
    problems = [f"{step.name}: {step.problem}" for step in steps if step.problem]
    if problems:
        output.line("", *"\n".join(problems).splitlines())
    broken = [step for step in steps if step.status in {"damaged", "unfinished"}]
    if broken:
        output.line(*map(advice_on, broken))


def advice_on(step: CheckpointInfo) -> str:
    """The command for a step that is broken, as a sentence."""
    if step.status == "unfinished" and not step.num_bytes:  # a save was killed before it wrote
        return f"To remove it: remesh prune {shlex.quote(step.path)} --incomplete --yes"
    return repair_advice(step.path)


def _marks(step: CheckpointInfo, newest: CheckpointInfo | None) -> str:
    marks = [" *"] if step is newest else []
    if step.format != native.FORMAT_NAME:
        marks.append(f"  ({step.format})")
    if step.repaired_from:
        lost = f", {step.num_lost} lost" if step.num_lost else ""
        marks.append(f"  (repaired{lost})")
    return "".join(marks)


@dataclass(frozen=True, slots=True, eq=False)
class _Listing:
    """A checkpoint, and the names in it that were asked for."""

    path: str  # what the user called it
    checkpoint: Checkpoint
    findings: list[Finding]  # files that are missing or have another size
    tensors: list[str]  # chosen names of tensors, ties included
    values: dict[str, object]  # chosen values, lists of names included
    objects: dict[str, object]  # chosen elements of sharded objects

    @classmethod
    def of(cls, path: str, patterns: Sequence[str]) -> _Listing:
        checkpoint = Checkpoint(path, format=places.format_of(path))
        values, objects = {**checkpoint.values, **checkpoint.lists}, checkpoint.objects
        listing = cls(
            shown_url(path),
            checkpoint,
            places.findings_of(path, checkpoint),
            _chosen(checkpoint.index, patterns),
            {name: values[name] for name in _chosen(values, patterns)},
            {name: objects[name] for name in _chosen(objects, patterns)},
        )
        if patterns and not (listing.tensors or listing.values or listing.objects):
            raise StateError(f"no name in {shown_url(path)} matches {' '.join(patterns)}")
        return listing


def _totals(checkpoint: Checkpoint) -> dict[str, int]:
    """Counts over the whole checkpoint, whatever was chosen."""
    index = checkpoint.index
    return {
        "num_tensors": len(index.tensors),
        "num_ties": len(index.aliases),
        "num_pieces": index.num_pieces,
        "num_elements": int(index.tensors.shapes.prod(axis=1).sum()),
        "num_tensor_bytes": index.num_bytes,
        "num_values": len(checkpoint.values) + len(checkpoint.lists),
        "num_objects": len(checkpoint.objects),
        "num_files": len(index.files),
        "num_file_bytes": places.num_file_bytes(checkpoint),
        "num_uncompressed_bytes": sum(file.num_bytes for file in index.files),
    }


def _chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match, in natural order."""
    return sorted((name for name in names if _matches(name, patterns)), key=catalog.natural_key)


def _listing_document(listing: _Listing, with_values: bool) -> dict[str, object]:
    index = listing.checkpoint.index
    tensors = []
    for name in listing.tensors:
        stored = index[name]
        tensors.append(
            {
                "name": name,
                "tied_to": index.aliases.get(name),
                "dtype": stored.dtype,
                "shape": stored.shape,
                "num_pieces": stored.num_pieces,
                "num_bytes": stored.num_bytes,
            }
        )

    def listed(values: Mapping[str, object]) -> list[dict[str, object]]:
        return [
            {"name": name, "type": output.type_name(value)}
            | ({"value": value} if with_values else {})
            for name, value in values.items()
        ]

    return {
        "kind": "checkpoint",
        "path": listing.path,
        "status": "damaged" if listing.findings else "committed",
        "damages": [asdict(finding) for finding in listing.findings],
        "format": listing.checkpoint.format,
        **_record_document(listing.checkpoint),
        "totals": _totals(listing.checkpoint),
        "tensors": tensors,
        "values": listed(listing.values),
        "objects": listed(listing.objects),
    }


def _record_document(checkpoint: Checkpoint) -> dict[str, object]:
    """The content of the commit record; nothing for other systems' checkpoints, which have none."""
    record = places.record_of(checkpoint)
    if record is None:
        return {}
    return {
        "created": record.created,
        "world_size": record.world_size,
        "remesh_version": record.remesh_version,
        "format_version": record.version,
        "metadata": record.metadata,
    }


def _print_listing(listing: _Listing, with_values: bool, show_all: bool) -> None:
    output.line(listing.path, style="bold")
    hint = "" if with_values else " (--values lists them)"
    output.print_facts(summary.facts_of(listing.checkpoint, hint))
    _print_tensors(listing, show_all)
    if with_values:
        _print_values("value", listing.values, show_all)
        _print_values("object", listing.objects, show_all)


def _print_tensors(listing: _Listing, show_all: bool) -> None:
    """The chosen tensors, a line each."""
    index = listing.checkpoint.index

    def row(name: str) -> tuple[str, ...]:
        stored = index[name]
        shown = f"{name} -> {index.aliases[name]}" if name in index.aliases else name
        size, shape = format_bytes(stored.num_bytes), output.format_shape(stored.shape)
        return stored.dtype, shape, str(stored.num_pieces), size, shown

    if listing.tensors:
        output.line()
        columns = ("<dtype", "<shape", ">pieces", ">size", "<name")
        output.print_table(columns, listing.tensors, row, show_all=show_all)


def _print_values(kind: str, values: Mapping[str, object], show_all: bool) -> None:
    if values:
        output.line()
        output.print_table(
            ("<type", f"<{kind}", "<content"),
            list(values.items()),
            lambda one: (output.type_name(one[1]), one[0], output.cut(output.format_value(one[1]))),
            show_all=show_all,
        )
