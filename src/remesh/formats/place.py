"""The place of a checkpoint of any format, and the files that are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from remesh.storage import Storage

Listing = Mapping[str, int | None]
"""Relative path → bytes of files, sorted; None where the listing did not tell the size."""


@dataclass(frozen=True)
class Place:
    """A source that has been opened, to be read once."""

    storage: Storage  # where the checkpoint is
    format: str | None = None  # name of its format, or None to look
    allow: tuple[str, ...] = ()  # qualified names that its pickles may import and call
    file: str = ""  # the file, if the source is a single one
    known: Listing | None = None
    """The files that count, if the caller has listed them; else all below the place."""

    def __str__(self) -> str:
        return self.url

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

    def size_of(self, path: str) -> int:
        """Bytes of a file, asked for only if the listing does not tell."""
        size = self.listing_beside.get(path)
        return self.storage.size(path) if size is None else size
