"""Removing many files: by few requests where a storage takes them, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from remesh.errors import StorageError
from remesh.storage.protocol import Storage


@runtime_checkable
class BatchDeletion(Protocol):
    """A storage that removes many files at once.

    A checkpoint of 4,000 ranks has as many files; at 100 ms a request, removing one after the other
    takes minutes.
    """

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
