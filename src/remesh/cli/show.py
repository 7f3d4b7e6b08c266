"""`remesh show`: one tensor or value of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial

import click
import numpy as np

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.core.geometry import Box
from remesh.core.index import Piece
from remesh.core.state import TENSOR_RECORD
from remesh.errors import StateError
from remesh.formats import native
from remesh.storage import shown_url

_BOUND = r"\s*(?:[0-9]{1,18}|[0-9]{0,18}\s*:\s*[0-9]{0,18})\s*"
_BOX = re.compile(f"{_BOUND}(?:,{_BOUND})*")


def check_box(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    """Refuse a text that is no region; a callback for click."""
    if text is not None and not _BOX.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not a box; write it like 0:10,5:7")
    return text


def box_in(text: str, name: str, shape: tuple[int, ...]) -> Box:
    """The box of a text in a tensor of this shape; dims that are not given are whole."""
    where, parts = f"{name} has shape {list(shape)}", text.split(",")
    if len(parts) > len(shape):
        raise StateError(f"--box {text} has {len(parts)} dims, but {where}")
    bounds = []
    for dim, extent in enumerate(shape):
        first, colon, last = parts[dim].partition(":") if dim < len(parts) else ("", ":", "")
        start = int(first) if first.strip() else 0
        stop = start + 1 if not colon else int(last) if last.strip() else extent
        if not start < stop <= extent:
            raise StateError(f"--box {text}: {start}:{stop} is not in dim {dim}; {where}")
        bounds.append((start, stop))
    return Box.from_slices(*bounds)


NUM_FIRST_ELEMENTS = 10
NUM_BOX_ELEMENTS = 1000
"""Elements that are shown of a box that was asked for."""


@click.command(
    epilog=output.example("remesh show runs/step_00001000 model.embed.weight --box 0:10,5:7")
)
@click.argument("path")
@click.argument("name", required=False)
@click.option(
    "--box",
    "box_text",
    callback=check_box,
    help="A region to look at, such as 0:10,5:7. A single number is one index, an empty side the "
    "end of the dim; dims that are not given are whole.",
)
@places.format_option()
@output.json_option
def show(*, path: str, name: str | None, box_text: str | None, as_json: bool) -> None:
    """Show one tensor or value of a checkpoint.

    Of a tensor: type, shape, pieces, statistics and first elements; of a --box with up to 1000
    elements, all of them. Statistics are over the finite elements; std divides by their number.
    Complex tensors have none. The tensor is read in chunks, so it may be larger than memory.
    Of a tensor that is made of others, it shows their names and what they make.
    """
    if name is None:
        raise click.UsageError(f"name a tensor or value; remesh ls {path} --values lists them")
    checkpoint, looked = native.retry_if_replaced(partial(_open_and_look, path, name, box_text))
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
    if box_text is not None:
        raise StateError(f"{name} is not a tensor, so it has no --box")
    kind, value = ("value", values[name]) if name in values else ("object", objects[name])
    if as_json:
        shown = {"type": output.type_name(value), "value": value}
        output.print_json({"kind": kind, "path": shown_url(path), "name": name, **shown})
    else:
        output.line(*output.format_value(value).splitlines())


def _open_and_look(path: str, name: str, box_text: str | None) -> tuple[Checkpoint, _Looked | None]:
    """A checkpoint, and what is found in it if the name is that of a tensor."""
    checkpoint = Checkpoint(path, format=places.format_of(path))
    is_tensor = name in checkpoint.index
    return checkpoint, _look_at(checkpoint, name, box_text) if is_tensor else None


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """A tensor, and what was found in a region of it; `statistics` is None if its type has none."""

    checkpoint: Checkpoint
    name: str
    box: Box
    statistics: summary.Statistics | None
    elements: summary.Array


def _look_at(checkpoint: Checkpoint, name: str, box_text: str | None) -> _Looked:
    stored = checkpoint.tensor(name)
    box = Box.whole(stored.shape) if box_text is None else box_in(box_text, name, stored.shape)
    statistics = summary.statistics_of(name, checkpoint, [name], box)[name]
    whole_box = box_text is not None and box.size <= NUM_BOX_ELEMENTS
    count = NUM_BOX_ELEMENTS if whole_box else NUM_FIRST_ELEMENTS
    elements = summary.first_elements(checkpoint, name, box, count)
    return _Looked(checkpoint, name, box, statistics, elements)


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
        "box": {"offset": looked.box.offset, "shape": looked.box.shape},
        "pieces": [output.piece_document(piece) for piece in _pieces_in(looked)],
        "statistics": None if looked.statistics is None else asdict(looked.statistics),
        "elements": looked.elements,
    }


def _pieces_in(looked: _Looked) -> list[Piece]:
    """The pieces that hold something of the region."""
    pieces = looked.checkpoint.index.pieces(looked.name)
    if looked.box == Box.whole(looked.checkpoint.index[looked.name].shape):
        return pieces
    return [piece for piece in pieces if piece.box.intersect(looked.box) is not None]


def _print_tensor(looked: _Looked) -> None:
    index, box = looked.checkpoint.index, looked.box
    stored, tied_to = index[looked.name], index.aliases.get(looked.name)
    facts = [
        ("dtype", stored.dtype),
        ("shape", output.format_shape(stored.shape)),
        ("size", format_bytes(stored.num_bytes)),
    ]
    if tied_to is not None:
        facts.append(("tied to", tied_to))
    if box != Box.whole(stored.shape):
        facts.append(("box", f"{box}, {output.plural(box.size, 'element')}"))
    output.line(looked.name, style="bold")
    output.print_facts(facts)
    pieces = _pieces_in(looked)
    if pieces:
        output.line()
        output.print_table(output.PIECE_COLUMNS, pieces, output.piece_row, indent="  ")
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
    elements, box = looked.elements, looked.box
    if not elements.size:
        return
    if elements.size == box.size:
        title, shown = "elements", elements.reshape(box.shape)
    else:
        title, shown = f"first {elements.size} of {box.size} elements", elements
    text = np.array2string(shown, max_line_width=78, threshold=NUM_BOX_ELEMENTS + 1, precision=6)
    output.line("", f"  {title}", style="bold")
    output.line(*(f"  {line}" for line in text.splitlines()))
