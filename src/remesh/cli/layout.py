"""`remesh layout`: a drawing of which rank holds which part of each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click

from remesh.cli import output, places
from remesh.cli.meshes import Mesh, boxes_of_rank, parse_mesh
from remesh.cli.plan import layout_option, rules_option
from remesh.demo import picture
from remesh.demo.picture import Column, PlacedTensor
from remesh.errors import StateError
from remesh.geometry import Box
from remesh.index import Index
from remesh.storage import shown_url

MAX_DRAWN = 12
"""Tensors that are drawn if no names are given: the largest ones."""
MAX_LEGEND = 16

target_option = click.option(
    "-o", "--output", "target", metavar="FILE", help="Write the page here instead of to stdout."
)


@click.command(
    epilog=output.example(
        "remesh layout runs/step_00001000 -o layout.html",
        "remesh layout hf_model 'model.layers.0.*' --layout tp=2,fsdp=2 -o layout.html",
    )
)
@click.argument("path", metavar="CKPT")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@layout_option
@rules_option
@target_option
@places.format_option()
@output.json_option
def layout(
    *,
    path: str,
    patterns: tuple[str, ...],
    layout_text: str | None,
    rules: tuple[str, ...],
    target: str | None,
    as_json: bool,
) -> None:
    """Draw who holds what: an HTML page with a drawing in SVG, in one file.

    As stored, each file is drawn as one holder; with --layout (see `remesh plan`), the ranks of
    that layout stand beside it. PATTERNs choose tensors, by default the 12 largest.
    """
    index = places.open_checkpoint(path).index
    names = _chosen(index, patterns)
    if not names:
        raise StateError(f"no tensor in {shown_url(path)} matches {' '.join(patterns)}")
    columns = columns_of(
        index, names, None if layout_text is None else parse_mesh(layout_text, rules)
    )
    if as_json:
        output.print_json(
            {"kind": "layout", "path": shown_url(path), "columns": _document(columns)}
        )
        return
    text = picture.page(f"Layout of {shown_url(path)}", [("", drawing(columns))])
    write_page(text, target)


def write_page(text: str, target: str | None) -> None:
    """Write a page to a file, or to stdout."""
    if target is None:
        click.echo(text, nl=False)
    else:
        Path(target).write_text(text)
        click.echo(f"written to {output.printable(target)}", err=True)


def _chosen(index: Index, patterns: Sequence[str]) -> list[str]:
    tensors = index.tensors
    drawn = [name for name, ndim in zip(tensors.names, tensors.ndims, strict=True) if ndim > 0]
    if patterns:
        return [n for n in drawn if any(fnmatchcase(n, pattern) for pattern in patterns)]
    return largest(index, drawn)


def largest(index: Index, names: Sequence[str], count: int = MAX_DRAWN) -> list[str]:
    """The largest tensors of some, in the order given."""
    chosen = set(sorted(names, key=lambda name: -index[name].num_bytes)[:count])
    return [name for name in names if name in chosen]


def columns_of(index: Index, names: Sequence[str], mesh: Mesh | None) -> list[Column]:
    """The tensors as they are stored, and as they lie on the ranks of a layout if one is given."""
    numbers = {file.path: number for number, file in enumerate(index.files)}
    stored = {
        name: [(numbers[piece.path], piece.box) for piece in index.pieces(name)] for name in names
    }
    columns = [_column("as stored", output.plural(len(index.files), "file"), index, stored, "file")]
    if mesh is not None:
        held: dict[str, list[tuple[int, Box]]] = {name: [] for name in names}
        for rank in range(mesh.num_ranks):
            boxes = boxes_of_rank(mesh, rank, index.tensors)
            rows = {boxes.tensors.names[row]: at for at, row in enumerate(boxes.tensor.tolist())}
            for name in names:
                if name in rows:
                    held[name].append((rank, boxes.box(rows[name])))
        columns.append(_column(str(mesh), output.plural(mesh.num_ranks, "rank"), index, held))
    return columns


def _column(
    title: str,
    subtitle: str,
    index: Index,
    held: dict[str, list[tuple[int, Box]]],
    holder: str = "rank",
) -> Column:
    tensors = {}
    for name, boxes in held.items():
        shape = index[name].shape
        tensors[name] = PlacedTensor(
            _flat_shape(shape),
            tuple((rank, part) for rank, box in boxes for part in _flat_boxes(shape, box)),
        )
    return Column(title, subtitle, tensors, holder)


def _flat_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of at most two dims: the first, and all others together."""
    return shape if len(shape) < 3 else (shape[0], math.prod(shape[1:]))


def _flat_boxes(shape: tuple[int, ...], box: Box) -> list[Box]:
    """A box in the shape of at most two dims; one that is cut further in is drawn as its hull."""
    if len(shape) < 3:
        return [box]
    start, stop = 0, 0
    for extent, offset, length in zip(shape[1:], box.offset[1:], box.shape[1:], strict=True):
        start, stop = start * extent + offset, stop * extent + offset + length - 1
    return [Box((box.offset[0], start), (box.shape[0], stop + 1 - start))]


def drawing(columns: Sequence[Column]) -> list[str]:
    """The pieces of HTML that show a layout."""
    ranks = {rank for column in columns for t in column.tensors.values() for rank, _ in t.boxes}
    pieces = [picture.layout_svg(columns, fit=True)]
    if len(ranks) > MAX_LEGEND:
        pieces.append(picture.paragraph("Colours repeat; point at a box to see who holds it."))
    return pieces


def _document(columns: Sequence[Column]) -> list[dict[str, object]]:
    return [
        {
            "title": column.title,
            "tensors": [
                {
                    "name": name,
                    "shape": placed.shape,
                    "boxes": [
                        {"holder": rank, "offset": box.offset, "shape": box.shape}
                        for rank, box in placed.boxes
                    ],
                }
                for name, placed in column.tensors.items()
            ],
        }
        for column in columns
    ]
