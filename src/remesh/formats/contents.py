"""What reading a checkpoint of any format gives."""

from __future__ import annotations

from dataclasses import dataclass

from remesh.formats.native import CommitRecord, ValuesDocument
from remesh.index import Index


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """A checkpoint whose tensors have not been read yet.

    Attributes:
        format: Name of its format.
        index: Its tensors.
        document: Everything else.
        record: Its commit record, which remesh's own format alone has.
    """

    format: str
    index: Index
    document: ValuesDocument
    record: CommitRecord | None = None
