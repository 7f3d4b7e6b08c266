"""What reading a checkpoint of any format gives."""

from __future__ import annotations

from dataclasses import dataclass

from remesh.core.index import Index
from remesh.formats.native import CommitRecord, ValuesDocument


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """A checkpoint whose tensors have not been read yet."""

    format: str  # name of its format
    index: Index  # its tensors
    document: ValuesDocument  # everything else
    record: CommitRecord | None = None  # its commit record, which remesh's own format alone has
