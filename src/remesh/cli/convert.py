"""`remesh convert`: write a checkpoint in another format. Casts alone need torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.checkpoint import convert as convert_checkpoint
from remesh.cli import output
from remesh.errors import StateError
from remesh.events import Event
from remesh.formats.table import WRITERS
from remesh.progress import progress
from remesh.storage import shown_url
from remesh.transform import Transform


@click.command(
    epilog=output.example(
        "remesh convert downloaded runs/base --format remesh",
        "remesh convert runs/step_00001000 weights --format huggingface --transform names.json",
    )
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--format",
    "name",
    type=click.Choice(list(WRITERS)),
    required=True,
    help="The format to write.",
)
@click.option(
    "--transform",
    "program",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Statements (docs/transform.md); or *.json, old names or prefixes to new ones or null.",
)
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Convert what is stored under such names alone, such as 'model.*'; may be repeated.",
)
@click.option(
    "--metadata",
    "metadata_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON to record; for huggingface the model's config.json.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint of the format at DST.")
@output.json_option
def convert(
    *,
    source: str,
    target: str,
    name: str,
    program: Path | None,
    only: tuple[str, ...],
    metadata_file: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC, of any format, to DST in another one.

    Tensors are read and written a few MiB at a time, so they need not fit in memory. DST is
    committed last and read once more: a conversion that is killed leaves no checkpoint, and may be
    started again. The exit code is 1 if SRC is damaged, 2 if it cannot be read or the format does
    not take what it holds, else 0.
    """
    checkpoint = Checkpoint(source)
    num_bytes = int(checkpoint.index.boxes.num_bytes.sum())
    with progress(f"writing {target}", num_bytes) as on_bytes:

        def on_event(event: Event) -> None:
            if event.point == "save.chunk_written":
                on_bytes(event.num_bytes)

        report = convert_checkpoint(
            source,
            target,
            format=name,
            transform=None if program is None else _transform(program),
            only=only or "*",
            metadata=None if metadata_file is None else _json_object(metadata_file),
            overwrite=overwrite,
            on_event=on_event,
        )
    if as_json:
        document = {
            "kind": "conversion",
            "source": shown_url(source),
            "source_format": report.source_format,
            "target": shown_url(target),
            "format": report.format,
            "num_tensors": report.num_tensors,
            "num_values": report.num_values,
            "num_bytes": report.num_bytes,
            "has_digests": report.verified.has_digests,
            "unchecked": list(report.unchecked),
        }
        output.print_json(document)
        return
    console = output.stdout_console()
    counts = f"{output.plural(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)}"
    others = f", {output.plural(report.num_values, 'value')}" if report.num_values else ""
    checked = "compared with its digests" if report.verified.has_digests else "no digests"
    console.out(
        f"{output.printable(shown_url(target))}: {report.source_format} to {report.format}, "
        f"{counts}{others}; read again, {checked}",
        highlight=False,
    )
    if report.unchecked:
        names = output.printable(output.listed(report.unchecked, show_all=False))
        text = f"  repaired; no digest proves that these are what was saved: {names}"
        console.out(text, style="yellow", highlight=False)


def _transform(file: Path) -> Transform:
    """The transformation in a file: statements, or renames in JSON."""
    return Transform(_json_object(file) if file.suffix == ".json" else file.read_text())


def _json_object(file: Path) -> Mapping[str, object]:
    """The object in a file of JSON.

    Raises:
        StateError: If there is something else in it.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise StateError(f"{file}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateError(f"{file}: must hold a JSON object, not {type(found).__name__}")
    return found
