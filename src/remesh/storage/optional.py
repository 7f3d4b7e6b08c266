"""What storages may do besides the methods of `Storage`, and how to ask one that may not.

A listing of a bucket has sizes and times; asking for each of a thousand files takes a thousand
requests. It can stop at the next slash, which is what makes directories of common beginnings of
names: to look at one of them, nothing below it need be listed. Many objects are removed by few
requests: a checkpoint of 4,000 ranks has as many files; at 100 ms a request, removing one after the
other takes minutes.

What a file holds is read into the caller's buffer, which may be used again and again. A response of
the network lies in memory of its own; to copy it into a buffer first takes as long as to copy it to
where it goes, and twice the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from remesh.errors import CheckpointNotFoundError, StorageError
from remesh.storage.protocol import Buffer, Storage


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


@runtime_checkable
class BatchDeletion(Protocol):
    """A storage that removes many files at once."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Remove files; no error for those that do not exist.

        If some cannot be removed, that is a StorageError; all others are gone.
        """
        ...


def delete_files(storage: Storage, paths: Sequence[str]) -> None:
    """Remove files; no error for those that do not exist.

    If some could not be removed, it tells of one, and all others are gone.
    """
    if isinstance(storage, BatchDeletion):
        storage.delete_many(paths)
        return
    failure: StorageError | None = None
    for path in paths:
        try:
            storage.delete(path)
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure


@runtime_checkable
class OwnMemory(Protocol):
    """A storage that reads into memory of its own."""

    def read_own(self, path: str, start: int, stop: int) -> Buffer:
        """Bytes [start, stop) of a file, fewer if it ends before; they may be read-only."""
        ...


def buffer_bytes_for(storage: Storage, num_bytes: int) -> int:
    """Size of the buffer that `read_range` needs for ranges of at most this length."""
    return 0 if isinstance(storage, OwnMemory) else num_bytes


def read_range(storage: Storage, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:
    """Bytes of a file from `start` on, fewer if it ends before.

    The buffer is used if the storage has no memory of its own, see `buffer_bytes_for`.
    """
    if isinstance(storage, OwnMemory):
        return storage.read_own(path, start, start + num_bytes)
    target = buffer[:num_bytes]
    return target[: storage.read_into(path, start, target)]
