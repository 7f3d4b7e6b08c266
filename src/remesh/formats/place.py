"""The place of a checkpoint of any format, and the files that are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from remesh._repr import shown
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.storage import Storage

Listing = Mapping[str, int | None]
"""Relative path → bytes of files, sorted; None where the listing did not tell the size."""


def file_size(storage: Storage, listing: Listing, path: str) -> int:
    """Bytes of a file, asked for only if the listing does not tell."""
    size = listing.get(path)
    return storage.size(path) if size is None else size


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


_MAX_TRACKER_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Trackers:
    """Files of systems that keep each checkpoint in a folder, and name the newest one."""

    names: tuple[str, ...]  # the files, the first that is there counts
    is_mark: Callable[[str], object]  # whether a file of such a folder marks a checkpoint
    folder_of: Callable[[str], str] = str  # the name of the folder, from the text of the file

    def is_at(self, paths: Collection[str]) -> bool:
        """True if the place with these files is such a folder, or names one."""
        is_named = any(name in paths for name in self.names)
        return any(map(self.is_mark, paths)) or (
            is_named and any(self.is_mark(path.partition("/")[2]) for path in paths)
        )

    def folder(self, place: Place) -> str:
        """The folder of the checkpoint, with a slash at its end; empty for the place itself."""
        storage, files = place.storage, place.listing
        if any(map(self.is_mark, files)):
            return ""
        name = next((name for name in self.names if name in files), None)
        if name is None:
            raise CheckpointNotFoundError(f"{storage.url}: no checkpoint, and no {self.names[0]}")
        text = storage.read(name, 0, _MAX_TRACKER_BYTES).decode(errors="replace").strip()
        base = f"{self.folder_of(text)}/"
        if not any(path.startswith(base) and self.is_mark(path[len(base) :]) for path in files):
            raise CorruptCheckpointError(
                f"{storage.url}/{name}: names {shown(text)}, and there is no such checkpoint\n"
                "Name the folder of another one"
            )
        return base
