"""`remesh show`: one tensor or value of a checkpoint."""

from __future__ import annotations

import math
from functools import partial

import click
import numpy as np

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.core.index import Index
from remesh.core.state import TENSOR_RECORD
from remesh.errors import StateError
from remesh.formats import native
from remesh.storage import shown_url

NUM_FIRST_ELEMENTS = 10


@click.command(epilog=output.example("remesh show runs/step_00001000 model.embed.weight"))
@click.argument("path")
@click.argument("name", required=False)
@places.format_option()
@output.json_option
def show(*, path: str, name: str | None, as_json: bool) -> None:
    """Show one tensor or value of a checkpoint.

    Of a tensor: type, shape, pieces and first elements, which alone are read. Of a tensor that is
    made of others, it shows their names and what they make.
    """
    if name is None:
        raise click.UsageError(f"name a tensor or value; remesh ls {path} --values lists them")
    checkpoint, elements = native.retry_if_replaced(partial(_open_and_read, path, name))
    if elements is not None:
        if as_json:
            output.print_json(_tensor_document(path, checkpoint.index, name, elements))
        else:
            _print_tensor(checkpoint.index, name, elements)
        return
    values, objects = {**checkpoint.values, **checkpoint.lists}, checkpoint.objects
    if f"{name}.{TENSOR_RECORD}" in values:
        name = f"{name}.{TENSOR_RECORD}"
    if name not in values and name not in objects:
        raise StateError(places.no_such_name(path, name, [*checkpoint.index, *values, *objects]))
    kind, value = ("value", values[name]) if name in values else ("object", objects[name])
    if as_json:
        shown = {"type": output.type_name(value), "value": value}
        output.print_json({"kind": kind, "path": shown_url(path), "name": name, **shown})
    else:
        output.line(*output.format_value(value, output.laid_out).splitlines())


def _open_and_read(path: str, name: str) -> tuple[Checkpoint, summary.Array | None]:
    """A checkpoint, and the first elements of a tensor if the name is that of one."""
    checkpoint = Checkpoint(path, format=places.format_of(path))
    if name not in checkpoint.index:
        return checkpoint, None
    return checkpoint, summary.first_elements(checkpoint, name, NUM_FIRST_ELEMENTS)


def _tensor_document(
    path: str, index: Index, name: str, elements: summary.Array
) -> dict[str, object]:
    stored = index[name]
    return {
        "kind": "tensor",
        "path": shown_url(path),
        "name": name,
        "tied_to": index.aliases.get(name),
        "dtype": stored.dtype,
        "shape": stored.shape,
        "num_bytes": stored.num_bytes,
        "pieces": [
            {
                "offset": piece.box.offset,
                "shape": piece.box.shape,
                "file": piece.path,
                "start": piece.position,
                "num_bytes": piece.num_bytes,
            }
            for piece in index.pieces(name)
        ],
        "elements": elements,
    }


def _print_tensor(index: Index, name: str, elements: summary.Array) -> None:
    stored, tied_to = index[name], index.aliases.get(name)
    facts = [
        ("dtype", stored.dtype),
        ("shape", output.format_shape(stored.shape)),
        ("size", format_bytes(stored.num_bytes)),
    ]
    if tied_to is not None:
        facts.append(("tied to", tied_to))
    output.line(name, style="bold")
    output.print_facts(facts)
    pieces = index.pieces(name)
    if pieces:
        output.line()
        output.print_table(
            ("<box", ">size", "<bytes", "<file"),
            pieces,
            lambda piece: (
                str(piece.box),
                format_bytes(piece.num_bytes),
                f"{piece.position}:{piece.position + piece.num_bytes}",
                piece.path,
            ),
            indent="  ",
        )
    _print_elements(elements, stored.shape)


def _print_elements(elements: summary.Array, shape: tuple[int, ...]) -> None:
    if not elements.size:
        return
    if elements.size == math.prod(shape):
        title, shown = "elements", elements.reshape(shape)
    else:
        title, shown = f"first {elements.size} of {math.prod(shape)} elements", elements
    text = np.array2string(shown, max_line_width=78, precision=6)
    output.line("", f"  {title}", style="bold")
    output.line(*(f"  {line}" for line in text.splitlines()))
