"""Indexes in version 1 of the stored form, which is still read: a row for each piece."""

from __future__ import annotations

from remesh.core.index import Index
from remesh.core.tables import decode_columns, encode_columns


def version_1(index: Index) -> bytes:
    """The stored form of version 1."""
    _, metadata = decode_columns(index.encode(), "index")
    columns = index.boxes.columns() | {
        "piece.file": index.file,
        "piece.position": index.position,
        "block.digest": index.digests,
        "block.first": index.first_block,
    }
    return encode_columns(columns, metadata)
