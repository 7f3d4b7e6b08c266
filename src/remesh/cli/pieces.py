"""Pieces of tensors, for people and in JSON."""

from __future__ import annotations

from collections.abc import Sequence

from remesh._repr import format_bytes
from remesh.cli import output
from remesh.core.index import Piece


def piece_document(piece: Piece) -> dict[str, object]:
    """A piece in JSON."""
    return {
        "offset": piece.box.offset,
        "shape": piece.box.shape,
        "file": piece.path,
        "start": piece.position,
        "num_bytes": piece.num_bytes,
    }


def piece_lines(pieces: Sequence[Piece], indent: str) -> list[str]:
    """A line of titles and one for each piece."""
    rows = [
        (
            str(piece.box),
            format_bytes(piece.num_bytes),
            f"{piece.position}:{piece.position + piece.num_bytes}",
            output.printable(piece.path),
        )
        for piece in pieces
    ]
    return output.table_lines(("<box", ">size", "<bytes", "<file"), rows, indent)
