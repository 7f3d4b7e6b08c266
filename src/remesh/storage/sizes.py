"""Sizes of many files at once, where a storage can tell them without being asked for each.

A listing of a bucket has the sizes; asking for each of a thousand files takes a thousand requests.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from remesh.storage.protocol import Storage


@runtime_checkable
class SizedListing(Protocol):
    """What storages may have besides the methods of `Storage`."""

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """Relative path → bytes of all files below the root that begin with `prefix`."""
        ...


def list_sizes(storage: Storage) -> dict[str, int]:
    """Relative path → bytes of all files of a storage.

    Raises:
        StorageError: If the storage fails.
    """
    if isinstance(storage, SizedListing):
        return storage.list_sizes()
    return {path: storage.size(path) for path in storage.list()}
