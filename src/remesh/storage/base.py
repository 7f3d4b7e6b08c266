"""What a storage must do, and what it may do; the promises are in the package's docstring.

What a storage need not do has a default that uses the rest. A listing of a bucket has sizes and
times; asking for each of a thousand files takes a thousand requests. It can stop at the next slash,
which is what makes directories of common beginnings of names: to look at one of them, nothing below
it need be listed. Many objects are removed by few requests: a checkpoint of 4,000 ranks has as many
files; at 100 ms a request, removing one after the other takes minutes.

Names of files are relative paths that stay below the root. They come out of checkpoint files, which
any program may have written, so each is checked before it is used. A path has components that are
not empty and not `.` or `..`, joined by forward slashes; that alone keeps it below the root.

Buffers are such that direct I/O and device copies like them: page-aligned, and already backed by
memory. The memory is a mapping of its own: anonymous and private, or a part of a file in memory
that several processes share. It starts at a page boundary, goes back to the system as soon as the
last view of it is gone, and is asked for in huge pages where the system offers them, which makes
touching it, and later pinning it for a device, several times cheaper. `aligned_buffer` touches
every page, so that running out of memory shows up now and not in the middle of a copy, and so
that the first copy into the buffer runs at full speed.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr
from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError

Buffer = npt.NDArray[np.uint8]
"""One-dim writable bytes, usually from `aligned_buffer`."""

HIDDEN = ".remesh-put-"
"""How the names of files begin that a writer makes beside the final one; they are never listed."""


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


class Storage(ABC):
    """Files under one root.

    A storage of your own is a subclass. It must have `url`, `list`, `size`, `read`, `read_into`,
    `put`, `create`, `delete` and `sync`; the other methods and the attributes have defaults.

    Every method raises `StorageError`, naming the file and the remedy, if the storage fails;
    reading a file that does not exist raises `CheckpointNotFoundError`.
    """

    lists_sizes: bool = False
    """True if `list_sizes` costs no more than `list`."""

    shares_files: bool = False
    """True if several processes may write one file, and files can be renamed and have several
    names: then there are `open_shared`, `rename` and `link_from`. Object stores have none of them:
    an object is written by one process, from its beginning to its end."""

    reads_own_memory: bool = False
    """True if `read_range` does not use the buffer that it is given, which may be empty then.

    To copy a response of the network into a buffer first takes as long as to copy it to where it
    goes, and twice the memory.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """How a user would name the root."""

    @property
    def latency(self) -> float | None:
        """Seconds of the fastest small request so far, 0 if that is not known; None if it is local.

        Ranks that plan together use what one of them has found, because each measures another
        value.
        """
        return 0.0

    @property
    def is_remote(self) -> bool:
        """True if every byte that is read crosses a network: `latency` is not None."""
        return self.latency is not None

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Relative paths of all files below the root that begin with `prefix`, sorted."""

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """Relative path → bytes of all files below the root that begin with `prefix`."""
        sizes = {}
        for path in self.list(prefix):
            with suppress(CheckpointNotFoundError):  # it was removed after it was listed
                sizes[path] = self.size(path)
        return sizes

    def list_directory(self, path: str = "") -> Directory:
        """The entries of a directory, "" for the root; none if it is not there.

        A storage that says when files were changed also lists hidden ones.
        """
        directories, files = set(), {}
        prefix = f"{path}/" if path else ""
        for file, size in self.list_sizes(prefix).items():
            name, slash, _ = file.removeprefix(prefix).partition("/")
            if slash:
                directories.add(name)
            else:
                files[name] = FileFacts(size, None)
        return Directory(tuple(sorted(directories)), files)

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file."""

    def exists(self, path: str) -> bool:
        """True if there is a file of this name."""
        try:
            self.size(path)
        except CheckpointNotFoundError:
            return False
        return True

    @abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file; fewer if it ends before."""

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """Fill `buffer` from byte `start` on; returns how many bytes there were."""

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:
        """Bytes of a file from `start` on, fewer if it ends before; they may be read-only.

        They lie in `buffer`, or in memory of their own if `reads_own_memory`.
        """
        target = buffer[:num_bytes]
        return target[: self.read_into(path, start, target)]

    def read_cached(self, path: str, start: int, parts: Sequence[Buffer]) -> bool:  # noqa: ARG002
        """Fill some buffers, one after the other, if the bytes lie in memory of the system.

        If this returns false, as it does by default, they may be partly filled.
        """
        return False

    @abstractmethod
    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """Write a whole small file atomically and durably.

        Raises:
            CheckpointExistsError: If the file exists and `overwrite` is false.
        """

    @abstractmethod
    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Writer:
        """Begin a file of this size, or of at most this size, reserving its room where possible.

        With `overwrite`, a file of this name stays as it is until the new one is finished, and then
        is replaced in one step. A storage that `shares_files` need not do that: `rename` does.

        Raises:
            NoSpaceError: If there is no room.
            StorageError: If the file exists already and `overwrite` is false. A storage that is a
                network away, and no other, may find that out meanwhile, and raise it when the file
                is written or finished.
        """

    def open_shared(self, path: str, num_bytes: int) -> Writer:
        """Begin, or take part in, a file of known size that other processes write as well.

        What one of them wrote is durable when its `finish` returns. `abort` leaves the file. Only
        where `shares_files`.
        """
        raise NotImplementedError

    def rename(self, path: str, new: str) -> None:
        """Give a file another name in one step; a file that has the name is replaced.

        Only where `shares_files`.
        """
        raise NotImplementedError

    def link_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:  # noqa: ARG002
        """Give a finished file of another storage a name here, which stays if the first one goes.

        Both share their content, so neither file may be written to afterwards. It is durable; the
        existence of the new file is as that of any finished file. If this returns false, as it does
        by default, there is no new file: it is not possible here, or the file has another size.
        """
        return False

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; no error if there is none."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Remove files; no error for those that do not exist.

        If some could not be removed, the error tells of one, and all others are gone.
        """
        failure: StorageError | None = None
        for path in paths:
            try:
                self.delete(path)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @abstractmethod
    def sync(self) -> None:
        """Make the existence of all finished files durable."""

    def space(self) -> FileSystemSpace | None:
        """Room that is left, or None if the storage has no such limit or does not tell."""
        return None


class StorageView(Storage):
    """A storage as it is; subclasses show some of its files in another form."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def latency(self) -> float | None:
        return self._storage.latency

    def list(self, prefix: str = "") -> list[str]:
        """See `Storage.list`; of stored files."""
        return self._storage.list(prefix)

    def size(self, path: str) -> int:
        return self._storage.size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._storage.read(path, start, stop)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        return self._storage.read_into(path, start, buffer)

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        self._storage.put(path, data, overwrite=overwrite)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Writer:
        return self._storage.create(path, num_bytes, overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._storage.delete(path)

    def sync(self) -> None:
        self._storage.sync()

    def space(self) -> FileSystemSpace | None:
        return self._storage.space()


def check_path(path: str) -> str:
    """The path itself; StorageError if it does not name a file below the root."""
    if "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise StorageError(
            f"{path!r} is not a path inside a storage: use names joined by single slashes, without "
            "'.' or '..'\nIf it came out of a checkpoint, that checkpoint is damaged or hostile; "
            "do not load it"
        )
    return path


def taken(name: object, marker: object = "") -> CheckpointExistsError:
    """The error of a `put` to a name that is taken, or that the marker of another writer holds."""
    if marker:
        return CheckpointExistsError(
            f"{name} is being written by another process; if no such process lives, remove {marker}"
        )
    return CheckpointExistsError(f"{name} exists already; choose another place, or overwrite it")


def is_hidden(path: str) -> bool:
    """True if a path is not that of a file: of a writer's mark, or of a folder that a console made.

    Consoles make empty objects for folders; that of the root itself has no relative path.
    """
    return not path or path.rpartition("/")[2].startswith(HIDDEN)


def prefix_directory(prefix: str) -> str:
    """The directory, "" for the root, that holds every path that begins with `prefix`."""
    directory = prefix.rpartition("/")[0]
    return check_path(directory) if "/" in prefix else ""


ALIGNMENT = 4096
"""Bytes. Addresses and ranges at multiples of this may use direct I/O."""


def aligned_buffer(num_bytes: int) -> Buffer:
    """A zeroed buffer whose address is a multiple of `ALIGNMENT`.

    Args:
        num_bytes: Its length; zero is allowed.

    Raises:
        MemoryError: If the system refuses the memory.
    """
    buffer = map_memory(num_bytes)
    touch(buffer)
    return buffer


def map_memory(num_bytes: int, file: int | None = None, start: int = 0) -> Buffer:
    """A buffer of zeros at a page boundary that takes no memory yet; private, unless of a file.

    A file in memory is shared from byte `start` on, a multiple of the page size. MemoryError if the
    system refuses the memory.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        if file is None:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, offset=start)
    except OSError as error:
        raise MemoryError(
            f"no memory for a buffer of {num_bytes} bytes ({error}); lower the memory budget"
        ) from error
    # Systems without transparent huge pages refuse the advice; ordinary pages do as well.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def touch(buffer: Buffer) -> None:
    """Let the system find memory for every page of a buffer; sets a byte of each to zero."""
    buffer[:: mmap.PAGESIZE] = 0
