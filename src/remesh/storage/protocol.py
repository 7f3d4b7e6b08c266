"""What a storage must do; the promises are in the package's docstring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr

Buffer = npt.NDArray[np.uint8]
"""One-dim writable bytes, usually from `aligned_buffer`."""


@dataclass(frozen=True, slots=True)
class FileSystemSpace:
    """The free space in the file system of a storage."""

    identity: str
    """Equal for storages, on any rank, that share this space."""
    free_bytes: int
    """Bytes that may still be written."""
    directory: str = ""
    """Equal on ranks that reach the same directory under the name of the root; empty if that is not
    known."""
    existing: str = ""
    """The nearest directory that exists at or above the root; empty if that is not known."""

    __repr__ = short_repr


class Writer(Protocol):
    """A file that is being written."""

    def write(self, position: int, data: Buffer) -> None:
        """Write a range; thread-safe for disjoint ranges.

        Write nearly in order: a storage that takes a file as a stream lets who is far ahead wait
        for the ranges before, and fails if they do not come.

        Raises:
            NoSpaceError: If there is no room.
            StorageError: If the storage fails.
        """
        ...

    def finish(self, num_bytes: int | None = None) -> None:
        """Make the content durable and close; the file now exists.

        Args:
            num_bytes: Its size, where that turned out to be less than `create` was given; by
                default the whole.
        """
        ...

    def abort(self) -> None:
        """Give the file up and remove what is there of it; does nothing after `finish`."""
        ...


@runtime_checkable
class Storage(Protocol):
    """Files under one root.

    Every method raises `StorageError`, naming the file and the remedy, if the storage fails;
    reading a file that does not exist raises `CheckpointNotFoundError`.
    """

    @property
    def url(self) -> str:
        """How a user would name the root."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Relative paths of all files below the root that begin with `prefix`, sorted."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file; fewer if it ends before."""
        ...

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """Fill `buffer` from byte `start` on; returns how many bytes there were."""
        ...

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """Write a whole small file atomically and durably.

        Raises:
            CheckpointExistsError: If the file exists and `overwrite` is false.
        """
        ...

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Writer:
        """Begin a file of this size, or of at most this size, reserving its room where possible.

        With `overwrite`, a file of this name stays as it is until the new one is finished, and then
        is replaced in one step. A storage with `SharedFiles` cannot do that: `rename` does.

        Raises:
            NoSpaceError: If there is no room.
            StorageError: If the file exists already and `overwrite` is false. A storage that is a
                network away, and no other, may find that out meanwhile, and raise it when the file
                is written or finished.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove a file; no error if there is none."""
        ...

    def sync(self) -> None:
        """Make the existence of all finished files durable."""
        ...

    def space(self) -> FileSystemSpace | None:
        """Room that is left, or None if the storage has no such limit."""
        ...


@runtime_checkable
class SharedFiles(Protocol):
    """What storages may have besides the methods of `Storage`: files that several processes write.

    Object stores have not: an object is written by one process, from its beginning to its end.
    """

    def open_shared(self, path: str, num_bytes: int) -> Writer:
        """Begin, or take part in, a file of known size that other processes write as well.

        What one of them wrote is durable when its `finish` returns. `abort` leaves the file.
        """
        ...

    def rename(self, path: str, new: str) -> None:
        """Give a file another name in one step; a file that has the name is replaced."""
        ...


@runtime_checkable
class CopiedFiles(Protocol):
    """What storages may have besides the methods of `Storage`: copies that move no bytes here."""

    @property
    def copies_at_once(self) -> bool:
        """True if a copy takes no time, however large the file is."""
        ...

    def copy_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:
        """Give the content of a finished file a new name, which stays if the first one goes.

        The content may be shared, so neither file may be written to afterwards. It is durable; the
        existence of the new file is as that of any finished file. If this returns false, there is
        no new file, and writing the bytes says what is wrong, if anything is.
        """
        ...
