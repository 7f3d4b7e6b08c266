"""The place of a checkpoint of any format, and what reading it gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from remesh.core.index import Index
from remesh.formats.building import IndexBuilder, Listing
from remesh.formats.native import CommitRecord, ValuesDocument
from remesh.storage import Storage


@dataclass(frozen=True)
class Place:
    """A source that has been opened, to be read once."""

    storage: Storage  # where the checkpoint is
    format: str | None = None  # name of its format, or None to look
    allow: tuple[str, ...] = ()  # see `remesh.formats.table.Source`
    file: str = ""  # the file, if the source is a single one
    known: Listing | None = None
    """The files that count, if the caller has listed them; else all below the place."""

    @property
    def url(self) -> str:
        """Where it is, for messages."""
        return f"{self.storage.url}/{self.file}" if self.file else self.storage.url

    @cached_property
    def listing(self) -> Listing:
        """The files below the place; listed once, when they are first needed."""
        if self.known is not None:
            return self.known
        if self.storage.lists_sizes:
            return dict(sorted(self.storage.list_sizes().items()))
        return dict.fromkeys(self.storage.list())

    @property
    def listing_beside(self) -> Listing:
        """The same; nothing if the source is a single file, whose neighbours are not needed."""
        return {} if self.file else self.listing


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """A checkpoint whose tensors have not been read yet."""

    format: str  # name of its format
    index: Index  # its tensors
    document: ValuesDocument  # everything else
    record: CommitRecord | None = None  # its commit record, which remesh's own format alone has

    @classmethod
    def of(cls, name: str, builder: IndexBuilder) -> Contents:
        """All that a reader of a format has added."""
        return cls(name, builder.build(), builder.document)
