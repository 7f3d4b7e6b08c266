"""`remesh show`: one tensor or value of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

import click
import numpy as np

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.core.index import Piece
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

    Of a tensor: type, shape, pieces, statistics and first elements. Statistics are over the finite
    elements; std divides by their number. Complex tensors have none. The tensor is read in chunks,
    so it may be larger than memory.
    Of a tensor that is made of others, it shows their names and what they make.
    """
    if name is None:
        raise click.UsageError(f"name a tensor or value; remesh ls {path} --values lists them")
    checkpoint, looked = native.retry_if_replaced(partial(_open_and_look, path, name))
    if looked is not None:
        if as_json:
            output.print_json(_tensor_document(path, looked))
        else:
            _print_tensor(looked)
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
        output.line(*output.format_value(value).splitlines())


def _open_and_look(path: str, name: str) -> tuple[Checkpoint, _Looked | None]:
    """A checkpoint, and what is found in it if the name is that of a tensor."""
    checkpoint = Checkpoint(path, format=places.format_of(path))
    is_tensor = name in checkpoint.index
    return checkpoint, _look_at(checkpoint, name) if is_tensor else None


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """A tensor, and what was found in it; `statistics` is None if its type has none."""

    checkpoint: Checkpoint
    name: str
    statistics: summary.Statistics | None
    elements: summary.Array


def _look_at(checkpoint: Checkpoint, name: str) -> _Looked:
    statistics = summary.statistics_of(name, checkpoint, [name])[name]
    elements = summary.first_elements(checkpoint, name, NUM_FIRST_ELEMENTS)
    return _Looked(checkpoint, name, statistics, elements)


def _tensor_document(path: str, looked: _Looked) -> dict[str, object]:
    index = looked.checkpoint.index
    stored = index[looked.name]
    return {
        "kind": "tensor",
        "path": shown_url(path),
        "name": looked.name,
        "tied_to": index.aliases.get(looked.name),
        "dtype": stored.dtype,
        "shape": stored.shape,
        "num_bytes": stored.num_bytes,
        "pieces": [_piece_document(piece) for piece in index.pieces(looked.name)],
        "statistics": None if looked.statistics is None else asdict(looked.statistics),
        "elements": looked.elements,
    }


def _print_tensor(looked: _Looked) -> None:
    index = looked.checkpoint.index
    stored, tied_to = index[looked.name], index.aliases.get(looked.name)
    facts = [
        ("dtype", stored.dtype),
        ("shape", output.format_shape(stored.shape)),
        ("size", format_bytes(stored.num_bytes)),
    ]
    if tied_to is not None:
        facts.append(("tied to", tied_to))
    output.line(looked.name, style="bold")
    output.print_facts(facts)
    pieces = index.pieces(looked.name)
    if pieces:
        output.line()
        output.print_table(_PIECE_COLUMNS, pieces, _piece_row, indent="  ")
    output.line()
    if looked.statistics is None:
        is_complex = stored.dtype.startswith("complex")
        reason = "it has no order" if is_complex else "only its bits are known"
        output.line(f"  statistics of {stored.dtype} are not given: {reason}")
    else:
        output.print_facts(_statistics_facts(looked.statistics))
    _print_elements(looked)


def _statistics_facts(statistics: summary.Statistics) -> list[tuple[str, str]]:
    none_finite = "- (no finite element)"
    absent = none_finite if statistics.minimum is None else "- (beyond float64)"
    shown = summary.format_number
    return [
        ("min", shown(statistics.minimum, none_finite, 6)),
        ("max", shown(statistics.maximum, none_finite, 6)),
        ("mean", shown(statistics.mean, absent, 6)),
        ("std", shown(statistics.std, absent, 6)),
        ("zeros", f"{statistics.num_zero} of {statistics.num_elements}"),
        ("NaN", str(statistics.num_nan)),
        ("inf", str(statistics.num_inf)),
    ]


def _print_elements(looked: _Looked) -> None:
    elements, shape = looked.elements, looked.checkpoint.index[looked.name].shape
    if not elements.size:
        return
    if elements.size == math.prod(shape):
        title, shown = "elements", elements.reshape(shape)
    else:
        title, shown = f"first {elements.size} of {math.prod(shape)} elements", elements
    text = np.array2string(shown, max_line_width=78, precision=6)
    output.line("", f"  {title}", style="bold")
    output.line(*(f"  {line}" for line in text.splitlines()))


def _piece_document(piece: Piece) -> dict[str, object]:
    """A piece in JSON."""
    return {
        "offset": piece.box.offset,
        "shape": piece.box.shape,
        "file": piece.path,
        "start": piece.position,
        "num_bytes": piece.num_bytes,
    }


_PIECE_COLUMNS = ("<box", ">size", "<bytes", "<file")


def _piece_row(piece: Piece) -> tuple[str, ...]:
    """The cells of `_PIECE_COLUMNS`."""
    stop = piece.position + piece.num_bytes
    return str(piece.box), format_bytes(piece.num_bytes), f"{piece.position}:{stop}", piece.path
