"""Drawings of which rank or file holds which part of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from remesh.cli import output
from remesh.cli.meshes import Mesh, boxes_of_rank
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.demo.picture import Column, PlacedTensor


def write_page(text: str, target: str | None) -> None:
    """Write a page to a file, or to stdout."""
    if target is None:
        click.echo(text, nl=False)
    else:
        Path(target).write_text(text)
        click.echo(f"written to {output.printable(target)}", err=True)


def largest(index: Index, names: Sequence[str], count: int) -> list[str]:
    """The largest tensors of some, in the order given."""
    chosen = set(sorted(names, key=lambda name: -index[name].num_bytes)[:count])
    return [name for name in names if name in chosen]


def columns_of(index: Index, names: Sequence[str], mesh: Mesh | None) -> list[Column]:
    """The tensors as they are stored, and as they lie on the ranks of a layout if one is given."""
    numbers = {file.path: number for number, file in enumerate(index.files)}
    stored = {
        name: [(numbers[piece.path], piece.box) for piece in index.pieces(name)] for name in names
    }
    num_files = output.plural(len(index.files), "file")
    columns = [Column("as stored", num_files, _placed(index, stored), "file")]
    if mesh is not None:
        held: dict[str, list[tuple[int, Box]]] = {name: [] for name in names}
        for rank in range(mesh.num_ranks):
            boxes = boxes_of_rank(mesh, rank, index.tensors)
            rows = {boxes.tensors.names[row]: at for at, row in enumerate(boxes.tensor.tolist())}
            for name in names:
                if name in rows:
                    held[name].append((rank, boxes.box(rows[name])))
        num_ranks = output.plural(mesh.num_ranks, "rank")
        columns.append(Column(str(mesh), num_ranks, _placed(index, held)))
    return columns


def _placed(index: Index, held: Mapping[str, Sequence[tuple[int, Box]]]) -> dict[str, PlacedTensor]:
    return {name: PlacedTensor(index[name].shape, tuple(boxes)) for name, boxes in held.items()}
