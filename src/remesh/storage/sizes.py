"""What storages can tell of many files at once, without being asked for each.

A listing of a bucket has sizes and times; asking for each of a thousand files takes a thousand
requests. And it can stop at the next slash, which is what makes directories of common beginnings of
names: to look at one of them, nothing below it need be listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from remesh.errors import CheckpointNotFoundError
from remesh.storage.protocol import Storage


@runtime_checkable
class SizedListing(Protocol):
    """A storage whose listings have sizes."""

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """Relative path → bytes of all files below the root that begin with `prefix`."""
        ...


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts about a file in a listing."""

    num_bytes: int  # its size
    modified: float | None
    """When it was last changed, in seconds since the epoch; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The entries of a directory, by name."""

    directories: tuple[str, ...]
    files: Mapping[str, FileFacts]


@runtime_checkable
class DirectoryListing(Protocol):
    """A storage that lists a directory alone."""

    def list_directory(self, path: str = "") -> Directory:
        """What lies directly in a directory, hidden files included; nothing if there is none."""
        ...


def list_sizes(storage: Storage, prefix: str = "") -> dict[str, int]:
    """Relative path → bytes of all files of a storage that begin with `prefix`."""
    if isinstance(storage, SizedListing):
        return storage.list_sizes(prefix)
    sizes = {}
    for path in storage.list(prefix):
        with suppress(CheckpointNotFoundError):  # it was removed after it was listed
            sizes[path] = storage.size(path)
    return sizes


def list_with_sizes(storage: Storage) -> dict[str, int | None]:
    """Relative path → bytes of all files of a storage, by one listing.

    A size is None where the storage lists without sizes; then ask for that of the file.
    """
    if isinstance(storage, SizedListing):
        return dict(sorted(storage.list_sizes().items()))
    return dict.fromkeys(storage.list())


def list_directory(storage: Storage, path: str = "") -> Directory:
    """What lies directly in a directory of any storage; nothing if there is none."""
    if isinstance(storage, DirectoryListing):
        return storage.list_directory(path)
    directories, files = set(), {}
    prefix = f"{path}/" if path else ""
    for file, size in list_sizes(storage, prefix).items():
        name, slash, _ = file.removeprefix(prefix).partition("/")
        if slash:
            directories.add(name)
        else:
            files[name] = FileFacts(size, None)
    return Directory(tuple(sorted(directories)), files)
