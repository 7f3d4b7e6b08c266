"""Bytes in and out of one local file, directly where that works.

Direct I/O (`O_DIRECT`) moves bytes between the device and our buffer without the page cache: no
second copy, no memory taken from the trainer, no burst of write-back later. It wants the address,
the position and the length aligned, and not every file system knows it (tmpfs, some network and
overlay file systems refuse it when the file is opened, others only when it is used). So each file
that is written has a buffered descriptor, and a direct one if the system gives it. A read has one
descriptor, so that all its bytes come from one file even while another file takes its name; its
flag for direct I/O is cleared where a buffered part begins. A range goes:

* buffered if it is read and lies in the page cache, which is several times as fast as the device;
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
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from remesh.errors import CheckpointNotFoundError, NoSpaceError, RemeshError, StorageError
from remesh.storage.base import Buffer
from remesh.storage.buffers import ALIGNMENT

_O_DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag for direct I/O; 0 where the system has none (macOS)."""

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


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct I/O, or None where the file system has none."""
    if not _O_DIRECT:
        return None
    try:
        return os.open(path, flags | _O_DIRECT | os.O_CLOEXEC)
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

    def __init__(self, path: Path, num_bytes: int, *, direct: bool, shared: bool = False) -> None:
        self._path = path
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
            if direct and not shared:
                self._direct = open_direct(path, os.O_WRONLY)
            if self._direct is not None:
                self._open.append(self._direct)
        except BaseException:
            self.abort()
            raise

    def write(self, position: int, data: Buffer) -> None:
        assert self._open, f"{self._path} is closed"
        assert 0 <= position <= position + data.size <= self._num_bytes
        with explained("write", self._path):
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


def read_range(path: Path, start: int, buffer: Buffer, *, direct: bool) -> int:
    """Fill a buffer from a file, opening it once; how many bytes there were."""
    num_direct = num_direct_bytes(start, buffer) if direct else 0
    descriptor = open_direct(path, os.O_RDONLY) if num_direct else None
    is_direct = descriptor is not None
    if descriptor is None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        if is_direct:
            if not _is_cached(path, descriptor, start, num_direct):
                done = _read(descriptor, start, buffer[:num_direct], direct=True)
            if done < buffer.size:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
        return done + _read(descriptor, start + done, buffer[done:])
    finally:
        os.close(descriptor)


def _is_cached(path: Path, descriptor: int, start: int, num_bytes: int) -> bool:
    """True if the page cache holds whole pages of a file; False where the system does not say.

    Linux says this only to users who may write the file; to others it reports every page as held.
    """
    mincore = _function_of_c("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore is None or not os.access(path, os.W_OK, effective_ids=True):
        return False
    try:
        mapped = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # it ends before, or cannot be mapped
        return False
    is_there = np.zeros(num_bytes // mmap.PAGESIZE, np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data

    def holds(length: int) -> bool:
        told = mincore(address, length, is_there.ctypes.data) == 0
        return told and bool((is_there[: length // mmap.PAGESIZE] & 1).all())

    # Of most files nothing is cached, which the first page says ten times as fast.
    return holds(mmap.PAGESIZE) and holds(num_bytes)


def read_file(path: Path, start: int, stop: int | None) -> bytes:
    """Bytes [start, stop) of a file, opening it once; fewer if it ends before."""
    # A pipe is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = file_size(path, os.fstat(descriptor))
        end = size if stop is None else min(stop, size)
        buffer = np.empty(max(end - start, 0), np.uint8)
        return buffer[: _read(descriptor, start, buffer)].tobytes()
    finally:
        os.close(descriptor)


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


def link_file(source: Path, file: Path, num_bytes: int) -> None:
    """Give a durable file of a known size a second name; OSError if there is none then."""
    # A link to a symbolic link would break with what it leads to.
    real = os.path.realpath(source)
    try:
        os.link(real, file)
    except OSError:
        # A file server may have made the link of which its answer got lost.
        if not (file.exists() and file.samefile(real)):
            raise
    try:
        size = file_size(file, file.lstat())
        if size != num_bytes:
            raise OSError(errno.EIO, f"{source} has {size} bytes and not {num_bytes}")
    except BaseException:
        with suppress(OSError):
            file.unlink()
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


def _find_fallocate() -> Callable[..., int] | None:
    return _function_of_c("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its size, and its room on the device where the file system can.

    This is the system call and not `os.posix_fallocate`: where the file system cannot reserve,
    the C library behind that writes into every block of the file, which on a network file system
    costs as much as the checkpoint itself.
    """
    if num_bytes == 0:
        return
    fallocate = _find_fallocate()
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
