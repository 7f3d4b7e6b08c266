"""`remesh convert`: write a checkpoint in another format. Casts alone need torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint, ConversionReport
from remesh.checkpoint import convert as convert_checkpoint
from remesh.cli import output, places
from remesh.cli.places import json_object, transform_option
from remesh.core.index import Index
from remesh.elastic.script import finish
from remesh.errors import CheckpointNotFoundError, StateError
from remesh.formats.huggingface import CONFIG_NAME
from remesh.formats.table import WRITERS
from remesh.pipeline import Compress
from remesh.recipes import huggingface_to_megatron, megatron_to_huggingface
from remesh.run_info import run_info
from remesh.storage import open_storage, shown_url
from remesh.transform import Transform

RECIPES = ("huggingface-to-megatron", "megatron-to-huggingface")


@click.command(
    epilog=output.example(
        "remesh convert downloaded runs/base --format remesh",
        "remesh convert runs/step_00001000 weights --format huggingface --transform names.json",
        "remesh convert downloaded run --format torch_dist --recipe huggingface-to-megatron",
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
@places.format_option("--source-format")
@transform_option("What becomes of SRC")
@click.option(
    "--recipe",
    type=click.Choice(RECIPES),
    help="A ready-made transformation; to Hugging Face it needs --metadata, the config.json.",
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
@click.option(
    "--compress",
    type=click.Choice(get_args(Compress)),
    help="Compress the data files without loss, for --format remesh.",
)
@output.json_option
def convert(
    *,
    source: str,
    target: str,
    name: str,
    transform: Transform | None,
    recipe: str | None,
    only: tuple[str, ...],
    metadata_file: Path | None,
    overwrite: bool,
    compress: Compress | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC, of any format, to DST in another one.

    Tensors are read and written a few MiB at a time, so they need not fit in memory. DST is
    committed last and read once more: a conversion that is killed leaves no checkpoint. Processes
    of torchrun (torchrun --nproc-per-node 4 -m remesh convert ...) share the work. The exit code
    is 1 if SRC is damaged, 2 if it cannot be read or the format does not take what it holds, else
    0.
    """
    source_format = places.format_of(source)
    metadata = None
    if metadata_file is not None:
        metadata = json_object(metadata_file.read_bytes(), str(metadata_file))
    if recipe is not None:
        if transform is not None:
            raise StateError("--recipe and --transform are two transformations; give one of them")
        index = Checkpoint(source, format=source_format).index
        transform = _recipe(recipe, source, index, metadata)
        only = only or _sources_of(transform, index)
    with _ranks() as (rank, group):
        report = convert_checkpoint(
            source,
            target,
            format=name,
            source_format=source_format,
            transform=transform,
            only=only or "*",
            metadata=metadata,
            overwrite=overwrite,
            compress=compress,
            group=group,
        )
    if rank == 0:
        _print_report(report, source, target, as_json=as_json)
    if group is not None:
        finish()  # without a race between gloo's threads and the end of the interpreter


@contextmanager
def _ranks() -> Iterator[tuple[int, Any]]:
    """The number of this process and the group that it converts with; None if it is alone."""
    info = run_info()
    if info.world_size == 1 or not info.run_id:  # variables of a pod alone start no group
        yield 0, None
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _print_report(report: ConversionReport, source: str, target: str, *, as_json: bool) -> None:
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
            "seconds": report.seconds,
            "has_digests": report.verified.has_digests,
            "unchecked": list(report.unchecked),
        }
        output.print_json(document)
        return
    counts = f"{output.plural(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)}"
    others = f", {output.plural(report.num_values, 'value')}" if report.num_values else ""
    rate = report.num_bytes / 1e9 / max(report.seconds, 1e-9)
    checked = "compared with its digests" if report.verified.has_digests else "no digests"
    output.line(
        f"{shown_url(target)}: {report.source_format} to {report.format}, "
        f"{counts}{others}; read again, {checked}; {report.seconds:.1f} s, {rate:.2f} GB/s"
    )
    if report.unchecked:
        names = output.listed(report.unchecked, show_all=False)
        text = f"  repaired; no digest proves that these are what was saved: {names}"
        output.line(text, style="yellow")


def _recipe(
    name: str, source: str, index: Index, metadata: Mapping[str, object] | None
) -> Transform:
    if name == RECIPES[0]:
        storage = open_storage(source)
        try:
            text = storage.read(CONFIG_NAME)
        except CheckpointNotFoundError as error:
            raise StateError(
                f"{storage.url}: no {CONFIG_NAME} beside the weights, which says what the model is"
            ) from error
        return huggingface_to_megatron(json_object(text, f"{storage.url}/{CONFIG_NAME}"))
    if metadata is None:
        raise StateError(f"--recipe {name}: give the model's config.json with --metadata")
    return megatron_to_huggingface(metadata, index)


def _sources_of(transform: Transform, index: Index) -> tuple[str, ...]:
    """The stored names that a recipe reads; the rest is of the other system alone."""
    read = (name.literal for statement in transform.statements for name in statement.left)
    return tuple(dict.fromkeys(name for name in read if name is not None and name in index))
