"""A storage in a directory of a file system, local or mounted.

How it keeps the promises of `remesh.storage`:

* `put` writes a hidden file beside the final name, makes it durable, and then gives it its final
  name: by `rename` to replace what is there, and by a hard link, which fails if the name is taken,
  to be the only one. Where there are no hard links, a marker file that only one can make stands in
  for them. A crash may leave hidden files behind; they are never listed.
* `create` reserves the whole file, so a full disk is found before anything is written.
* `link_from` makes a hard link to a file whose content is durable. Nothing here ever writes into a
  finished file: `create` makes a new one, `put` makes one and renames it.
* Every directory that got an entry is remembered, and `sync` makes it durable. Directories that
  exist already may have been made a moment ago by a save that was killed before it could make them
  durable, so the first `sync` includes every directory above, up to the root of the mount or the
  first in which this user could not have made one.

Symbolic links to files are followed, for model hubs keep their files that way; links to
directories are not searched by `list`.

Several ranks may write into one file system, so the room they need must be added up per file
system, which needs a name that all of them give it. A network file system is named by what was
mounted, the same on every node. Any other is named by the kernel that runs (its boot id, the same
in all containers of a machine and different between machines, which host names are not) and the
device's number.

Direct I/O (`O_DIRECT`) moves bytes between the device and our buffer without the page cache: no
second copy, no memory taken from the trainer, no burst of write-back later. It wants the address,
the position and the length aligned, and not every file system knows it (tmpfs before Linux 6.6,
some network and overlay file systems refuse it when the file is opened, others only when it is
used). So each file that is written has a buffered descriptor, and a direct one if the system gives
it. A read has one descriptor, so that all its bytes come from one file even while another file
takes its name; its flag for direct I/O is cleared where a buffered part begins. A range goes:

* buffered if it is read and begins in the page cache, which is several times as fast as the device;
* directly, as far as it consists of whole units, if it begins at a unit and its buffer is aligned;
* buffered otherwise, and for what is left at the end;
* buffered altogether from the moment the file system refuses direct I/O (`EINVAL`).

A unit is a page of the system's, or `ALIGNMENT` where pages are smaller. Mixing both ways in one
file is correct here because ranges that are written at the same time are disjoint: a caller that
writes whole pages directly owns them, so no page is written in both ways.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from remesh.core.host_memory import available_memory, kernel_lines
from remesh.errors import CheckpointNotFoundError, NoSpaceError, RemeshError, StorageError
from remesh.storage.base import (
    ALIGNMENT,
    HIDDEN,
    Buffer,
    Directory,
    FileFacts,
    FileSystemSpace,
    Storage,
    check_path,
    prefix_directory,
    taken,
)

_LOGGER = logging.getLogger("remesh")
_NETWORK = frozenset({"beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3"})
IN_MEMORY = frozenset({"ramfs", "tmpfs"})
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}
_Made = TypeVar("_Made")

MAX_AT_DISK = 2
"""Reads, and writes, of a disk of this machine that are under way at a time: it is busy while one
of them ends, and other threads compute. If all waited for the disk, they would also compute at the
same time, and the disk would rest."""


class LocalStorage(Storage):
    """Files below a directory; safe to use from several threads.

    Args:
        root: The directory; `~` is the user's home. It is made when the first file is written.
        direct_io: Whether to pass by the page cache where the file system can. False suits files
            that several processes of one machine read at the same time.
    """

    shares_files = True

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool = True) -> None:
        text = os.fspath(root)
        # The text of a path is compared between ranks, and an empty one is a forgotten setting.
        if not text or "\0" in text or text.encode(errors="replace").decode() != text:
            raise StorageError(f"{text!r} is no path of a directory; give another one")
        # resolve() would follow links.
        self._root = Path(os.path.abspath(os.path.expanduser(root)))
        self._direct = direct_io
        self._lock = threading.Lock()
        self._unsynced: set[Path] = set()
        self._known: set[Path] = set()  # directories whose parents have been synced, or will be

    def __repr__(self) -> str:
        return f"LocalStorage({self.url!r})"

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def latency(self) -> float | None:
        """See `Storage.latency`; a directory that cannot be looked at counts as local."""
        try:
            device = self._root.stat().st_dev
        except OSError:
            return None  # reading it will say what is wrong
        return 0.0 if mount_of(device)[0] in _NETWORK else None

    @functools.cached_property
    def _at_disk(self) -> AbstractContextManager[object]:
        """What is entered for each read, and each write."""
        return nullcontext() if self.is_remote else threading.Semaphore(MAX_AT_DISK)

    def list(self, prefix: str = "") -> list[str]:
        def fail(error: OSError) -> None:
            # Others may remove directories while we look, and the root need not exist.
            if error.errno not in ABSENT:
                raise explain("list", Path(error.filename or self._root), error) from error

        found = []
        for directory, _, names in os.walk(self._root / prefix_directory(prefix), onerror=fail):
            below = Path(directory).relative_to(self._root)
            found += [str(below / name) for name in names if not name.startswith(HIDDEN)]
        return sorted(path for path in found if path.startswith(prefix))

    def list_directory(self, path: str = "") -> Directory:
        """See `Storage.list_directory`; links that lead nowhere are left out."""
        directory = self._file(path) if path else self._root
        directories, files = [], {}
        with (
            explained("list", directory),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(directory) as found,
        ):
            for entry in found:
                with suppress(OSError):  # it has just gone, or is a link that leads nowhere
                    if entry.is_dir():
                        directories.append(entry.name)
                    else:
                        status = entry.stat()
                        files[entry.name] = FileFacts(status.st_size, status.st_mtime)
        return Directory(tuple(sorted(directories)), files)

    def size(self, path: str) -> int:
        file = self._file(path)
        with explained("read", file):
            return file_size(file, file.stat())

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        assert start >= 0
        assert stop is None or stop >= 0
        file = self._file(path)
        with explained("read", file):
            descriptor = _open(file, _READ)
            try:
                size = file_size(file, os.fstat(descriptor))
                end = size if stop is None else min(stop, size)
                buffer = np.empty(max(end - start, 0), np.uint8)
                return buffer[: _read(descriptor, start, buffer)].tobytes()
            finally:
                os.close(descriptor)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """See `Storage.read_into`; the file is opened once, so all bytes are of one file."""
        assert start >= 0
        file = self._file(path)
        with explained("read", file), self._at_disk:
            num_direct = num_direct_bytes(start, buffer) if self._direct else 0
            descriptor = open_direct(file, _READ) if num_direct else None
            is_direct = descriptor is not None
            if descriptor is None:
                descriptor = _open(file, _READ)
            try:
                done = 0
                if is_direct:
                    if not _is_cached(file, descriptor, start):
                        done = _read(descriptor, start, buffer[:num_direct], direct=True)
                    if done < buffer.size:
                        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                return done + _read(descriptor, start + done, buffer[done:])
            finally:
                os.close(descriptor)

    def read_cached(self, path: str, start: int, parts: Sequence[Buffer]) -> bool:
        try:
            descriptor = os.open(self._file(path), _READ)
        except OSError:
            return False  # `read_into` says what is wrong
        try:
            is_cached = _is_cached(self._file(path), descriptor, start)
            return is_cached and _read_cached(descriptor, start, parts) == sum(map(len, parts))
        finally:
            os.close(descriptor)

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        file = self._file(path)
        hidden = file.with_name(f"{HIDDEN}{secrets.token_hex(8)}")
        with explained("write", file):
            self._make(file, lambda: write_file(hidden, data))
            try:
                if overwrite:
                    hidden.replace(file)
                else:
                    _rename_exclusively(hidden, file)
            finally:
                hidden.unlink(missing_ok=True)
        self.sync()

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> LocalWriter:
        assert not overwrite, "files of a directory are replaced by `rename`"
        file = self._file(path)
        with explained("write", file):
            try:
                return self._make(
                    file, lambda: LocalWriter(file, num_bytes, self._at_disk, direct=self._direct)
                )
            except FileExistsError as error:
                raise StorageError(f"{file} exists already; choose another place") from error

    def open_shared(self, path: str, num_bytes: int) -> LocalWriter:
        file = self._file(path)
        with explained("write", file):
            return self._make(
                file, lambda: LocalWriter(file, num_bytes, nullcontext(), direct=False, shared=True)
            )

    def rename(self, path: str, new: str) -> None:
        file, renamed = self._file(path), self._file(new)
        self._make_parents(renamed)
        with explained("rename", file):
            file.replace(renamed)

    def link_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:
        if not isinstance(source, LocalStorage):
            return False
        file = self._file(new)
        self._make_parents(file)
        # A link to a symbolic link would break with what it leads to.
        real = Path(os.path.realpath(source._file(path)))  # noqa: SLF001 - of the same class
        try:
            if real.stat().st_size != num_bytes:
                return False
            os.link(real, file)
        except OSError as error:
            # A file server may have made the link of which its answer got lost.
            if file.exists() and file.samefile(real):
                return True
            _LOGGER.debug("%s cannot be a link to %s: %s", file, real, error)
            return False
        return True

    def delete(self, path: str) -> None:
        """See `Storage.delete`; directories below the root that become empty go as well."""
        file = self._file(path)
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()
            for directory in file.parents[: path.count("/")]:
                with suppress(FileNotFoundError, NotADirectoryError):
                    directory.rmdir()
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise explain("remove", file, error) from error

    def sync(self) -> None:
        # The lock is held throughout: a caller that returns from here may rely on directories that
        # another thread has already taken from the set.
        with self._lock:
            while self._unsynced:
                directory = next(iter(self._unsynced))
                with explained("sync", directory):
                    sync_directory(directory)
                self._unsynced.remove(directory)

    def space(self) -> FileSystemSpace | None:
        """See `Storage.space`; the root need not exist yet."""
        directory = self._root
        try:
            while not directory.exists():
                directory = directory.parent
            room = os.statvfs(directory)
            status = directory.stat()
            if problem := _not_writable(directory, room):
                raise OSError(problem, os.strerror(problem))
        except OSError as error:
            raise explain("write in", directory, error) from error
        if not room.f_blocks:
            return None  # a file system of the kernel's, such as /proc, which has no room to count
        free_bytes = room.f_bavail * room.f_frsize
        # What is written there counts as memory of the container, which may be limited to less.
        kind, source = mount_of(status.st_dev)
        available = available_memory() if kind in IN_MEMORY else None
        if available is not None:
            free_bytes = min(free_bytes, available)
        boot = "".join(kernel_lines(Path("/proc/sys/kernel/random/boot_id"))).strip()
        machine = boot or socket.gethostname()
        room_name = f"{kind}:{source}" if kind in _NETWORK else f"{machine}:{status.st_dev}"
        place = f"{room_name}:{status.st_ino}:{self._root.relative_to(directory)}"
        return FileSystemSpace(room_name, free_bytes, place, str(directory))

    def _file(self, path: str) -> Path:
        return self._root / check_path(path)

    def _make(self, file: Path, make: Callable[[], _Made]) -> _Made:
        """Make a file, and the directory for it, which a rank that fails may remove meanwhile."""
        for _ in range(9):  # each rank does so once at most, if it leaves the directory empty
            self._make_parents(file)
            with suppress(FileNotFoundError):
                return make()
        self._make_parents(file)
        return make()

    def _make_parents(self, file: Path, tries: int = 9) -> None:
        """Make the file's directory, remembering every directory that gets or may lack an entry."""
        directory = file.parent
        changed = {directory}
        try:
            while not directory.exists():
                # Before it is made: another thread that finds it then also syncs what is above.
                self._known.discard(directory)
                directory = directory.parent
                changed.add(directory)
            file.parent.mkdir(parents=True, exist_ok=True)
            changed.update(self._not_known(file.parent))
        except OSError as error:
            if isinstance(error, FileExistsError | FileNotFoundError) and tries:
                self._make_parents(file, tries - 1)  # others may have just removed it
                return
            if isinstance(error, FileExistsError):
                raise StorageError(
                    f"cannot write {file}: {file.parent} is not a directory; choose another place"
                ) from error
            raise explain("make", file.parent, error) from error
        with self._lock:
            self._unsynced |= changed
            self._known |= changed

    def _not_known(self, directory: Path) -> Iterator[Path]:
        """The directories above one that exists whose entries may not be durable yet."""
        while directory not in self._known and not directory.is_mount():
            directory = directory.parent
            # No save of this user makes entries where the user may not write, and a directory
            # that may not be read cannot be synced.
            if not os.access(directory, os.R_OK | os.W_OK, effective_ids=True):
                return
            yield directory


def is_local(storage: Storage) -> bool:
    """True if the files lie in directories of this machine: then the storage's `url` is a path."""
    return isinstance(storage, LocalStorage)


def _not_writable(directory: Path, room: os.statvfs_result) -> int:
    """The error number of why no file can be made in a directory; 0 if one can."""
    if not directory.is_dir():
        return errno.ENOTDIR
    if os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return 0
    return errno.EROFS if room.f_flag & os.ST_RDONLY else errno.EACCES


def _rename_exclusively(hidden: Path, file: Path) -> None:
    """Give a file its final name unless the name is taken."""
    try:
        os.link(hidden, file)
    except FileExistsError as error:
        # A file server may repeat a request whose answer got lost, and then refuse our own link.
        if not file.exists() or not hidden.samefile(file):
            raise taken(file) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_with_marker(hidden, file)


def _rename_with_marker(hidden: Path, file: Path) -> None:
    """The same without hard links: the writer that makes the marker may look and rename.

    A process that dies in between leaves the marker, and the name stays taken until it is
    removed: at most one writer succeeds, even then.
    """
    marker = file.with_name(f"{HIDDEN}{file.name}")
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    except FileExistsError as error:
        raise taken(file, marker) from error
    try:
        if os.path.lexists(file):
            raise taken(file)
        hidden.rename(file)
    finally:
        marker.unlink()


def mount_of(device: int) -> tuple[str, str]:
    """The kind of the file system of a device (`st_dev`) and what was mounted; empty if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in kernel_lines(Path("/proc/self/mountinfo")):
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            kind, source = file_system.split()[:2]
            return kind, source
    return "", ""


_O_DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag for direct I/O; 0 where the system has none (macOS)."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""How files are opened for reading: a pipe in the place of a file is not waited for."""

_UNIT = max(ALIGNMENT, mmap.PAGESIZE)

ABSENT = {errno.ENOENT, errno.ENOTDIR}

_NO_ROOM = {
    errno.ENOSPC: "free some room or save to another place",
    errno.EDQUOT: "the quota is used up: raise it, or see what `remesh prune` would free",
    errno.EFBIG: "files here may not be so large: see `ulimit -f` and the file system's limits",
}
_REMEDIES = {
    errno.EROFS: "the file system is mounted read-only: mount it writable or save elsewhere",
    errno.EACCES: "give the user that runs the job the right to do this, or choose another place",
    errno.EPERM: "give the user that runs the job the right to do this, or choose another place",
    errno.EIO: "the disk or the file server failed: see the kernel's log on this machine",
    errno.ESTALE: "the file server lost the file or the mount: mount it again",
    errno.ENOTDIR: "a part of the path is a file: choose another place",
    errno.EISDIR: "it is a directory: choose another place",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine: raise `fs.file-max`",
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Raise a failed system call on a file as an error of remesh; see `explain`."""
    try:
        yield
    except RemeshError:
        raise
    except OSError as error:
        raise explain(action, path, error) from error


def explain(action: str, path: Path, error: OSError) -> RemeshError:
    """The exception to raise for a failed system call on a file; the action is a verb ("write")."""
    if action == "read" and error.errno in ABSENT:
        return CheckpointNotFoundError(f"there is no file {path}; check the path")
    what = f"cannot {action} {path}: {error.strerror or error}"
    if action == "write" and error.errno == errno.ENOENT:
        return StorageError(
            f"cannot write {path}: its directory is gone; see who removes directories there"
        )
    if error.errno in _NO_ROOM:
        return NoSpaceError(f"{what}; {_NO_ROOM[error.errno]}")
    remedy = _REMEDIES.get(error.errno or 0, "check the file system and try again")
    return StorageError(f"{what}; {remedy}")


def _open(path: Path, flags: int) -> int:
    """A descriptor; it is waited for a file that another program has a lease of."""
    try:
        return os.open(path, flags)
    except BlockingIOError:
        return os.open(path, flags & ~os.O_NONBLOCK)


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct I/O, or None where the file system has none."""
    if not _O_DIRECT:
        return None
    try:
        return _open(path, flags | _O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return None
        raise


def sync_file(descriptor: int) -> None:
    """Make a file or directory durable; macOS has a call of its own for that."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full_sync)


def num_direct_bytes(position: int, buffer: Buffer) -> int:
    """How many bytes of a range, from its begin on, may go directly."""
    if position % _UNIT or buffer.ctypes.data % ALIGNMENT:
        return 0
    return buffer.size - buffer.size % _UNIT


class LocalWriter:
    """A local file that is being written; made by `LocalStorage.create` and `open_shared`.

    Writes may run in several threads; `finish` and `abort` come when all of them have returned. If
    the file cannot be made, that is an OSError, and nothing is left of it. Of a shared file this is
    the part of one process: `abort` leaves the file, and nothing goes directly, because a page may
    belong to two processes.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        at_disk: AbstractContextManager[object],
        *,
        direct: bool,
        shared: bool = False,
    ) -> None:
        self._path = path
        self._at_disk = at_disk
        self._num_bytes = num_bytes
        self._is_shared = shared
        self._done = False
        self._direct: int | None = None
        exclusive = 0 if shared else os.O_EXCL
        flags = os.O_CREAT | exclusive | os.O_WRONLY | os.O_CLOEXEC
        self._buffered = os.open(path, flags, 0o666)
        self._open = [self._buffered]
        try:
            # This changes no byte that is there, so each process of a shared file may do it.
            _reserve(self._buffered, num_bytes)
            if direct:
                self._direct = open_direct(path, os.O_WRONLY)
            if self._direct is not None:
                self._open.append(self._direct)
        except BaseException:
            self.abort()
            raise

    def write(self, position: int, data: Buffer) -> None:
        assert self._open, f"{self._path} is closed"
        assert 0 <= position <= position + data.size <= self._num_bytes
        with explained("write", self._path), self._at_disk:
            done = self._write_directly(position, data)
            _write_all(self._buffered, position + done, data[done:])

    def finish(self, num_bytes: int | None = None) -> None:
        """See `Writer.finish`; of a shared file, other processes count on the size."""
        assert self._open, f"{self._path} is closed"
        assert not self._is_shared or num_bytes in {None, self._num_bytes}
        # A failed fsync must not be tried again, for the second may succeed without the bytes:
        # the file is closed either way, and `abort` still removes it.
        with explained("finish", self._path):
            try:
                if num_bytes is not None:
                    os.ftruncate(self._buffered, num_bytes)
                sync_file(self._buffered)
            finally:
                self._close()
        self._done = True

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        with explained("remove", self._path):
            try:
                self._close()
            finally:
                if not self._is_shared:
                    self._path.unlink(missing_ok=True)

    def _write_directly(self, position: int, data: Buffer) -> int:
        """Write what may go directly; how many bytes that were."""
        descriptor = self._direct
        if descriptor is None:
            return 0
        num_bytes = num_direct_bytes(position, data)
        done = 0
        # A short write may end inside a unit; what then remains is no longer aligned.
        while done < num_bytes and done % _UNIT == 0:
            try:
                done += os.pwrite(descriptor, data[done:num_bytes].data, position + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None
                break
        return done

    def _close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def _read_cached(descriptor: int, start: int, parts: Sequence[Buffer]) -> int:
    """Fill buffers with what the page cache holds from `start` on; how many bytes that is."""
    flags = getattr(os, "RWF_NOWAIT", 0)
    left, done = [part.data for part in parts] if flags else [], 0
    with suppress(OSError):  # not the next byte, or the file system does not say
        # A call ends early where it finds memory of a buffer that was never touched.
        while left and (num_bytes := os.preadv(descriptor, left, start + done, flags)):
            done += num_bytes
            while left and num_bytes >= len(left[0]):
                num_bytes -= len(left.pop(0))
            left[:1] = [part[num_bytes:] for part in left[:1]]
    return done


def _is_cached(path: Path, descriptor: int, start: int) -> bool:
    """True if the page cache holds the page of `start`; False where the system does not say.

    One page stands for the whole range: to ask for all of them takes as long as a tenth of copying
    them. Linux answers only users who may write the file; to others it reports every page as held.
    """
    mincore = _function_of_c("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore is None or not os.access(path, os.W_OK, effective_ids=True):
        return False
    try:
        page = start - start % mmap.PAGESIZE
        mapped = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ, offset=page)
    except (OSError, ValueError):  # it ends before, or cannot be mapped
        return False
    held = ctypes.c_ubyte()
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    return mincore(address, mmap.PAGESIZE, ctypes.addressof(held)) == 0 and bool(held.value & 1)


def file_size(path: Path, status: os.stat_result) -> int:
    """Bytes of a file; StorageError if it is something else, such as a directory."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"cannot read {path}: it is not a file; check the path")
    return status.st_size


def write_file(path: Path, data: bytes) -> None:
    """Make a new file and make its content durable; if that fails, nothing is left of it."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        try:
            _write_all(descriptor, 0, np.frombuffer(data, np.uint8))
            sync_file(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable.

    A directory that is gone has nothing to keep, and a file system that cannot do this for
    directories (some network and user-space ones say so by `EINVAL`) keeps its own promises.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_file(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, buffer: Buffer, *, direct: bool = False) -> int:
    """Fill a buffer; fewer bytes if the file ends, or if the file system refuses direct I/O."""
    done = 0
    while done < buffer.size and not (direct and done % _UNIT):
        try:
            num_bytes = os.preadv(descriptor, [buffer[done:].data], start + done)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                break
            raise
        if num_bytes == 0:
            break
        done += num_bytes
    return done


def _write_all(descriptor: int, position: int, data: Buffer) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, position + done)


@functools.cache
def _function_of_c(name: str, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library; None where it has none (macOS)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its size, and its room on the device where the file system can.

    This is the system call and not `os.posix_fallocate`: where the file system cannot reserve,
    the C library behind that writes into every block of the file, which on a network file system
    costs as much as the checkpoint itself.
    """
    if num_bytes == 0:
        return
    fallocate = _function_of_c("fallocate", *[ctypes.c_int] * 2, *[ctypes.c_long] * 2)
    if fallocate is None:
        os.ftruncate(descriptor, num_bytes)
        return
    while fallocate(descriptor, 0, 0, num_bytes) != 0:
        number = ctypes.get_errno()
        if number in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
            os.ftruncate(descriptor, num_bytes)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
