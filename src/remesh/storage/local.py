"""A storage in a directory of a file system, local or mounted.

How it keeps the promises of `remesh.storage`:

* `put` writes a hidden file beside the final name, makes it durable, and then gives it its final
  name: by `rename` to replace what is there, and by a hard link, which fails if the name is taken,
  to be the only one. Where there are no hard links, a marker file that only one can make stands in
  for them. A crash may leave hidden files behind; they are never listed.
* `create` reserves the whole file, so a full disk is found before anything is written.
* `copy_from` makes a hard link to a file whose content is durable. Nothing here ever writes into a
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
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from remesh.core.host_memory import available_memory
from remesh.errors import CheckpointExistsError, StorageError
from remesh.storage.base import (
    HIDDEN,
    Buffer,
    Copying,
    Directory,
    FileFacts,
    FileSystemSpace,
    Storage,
    check_path,
    prefix_directory,
)
from remesh.storage.local_io import (
    ABSENT,
    LocalWriter,
    explain,
    explained,
    file_size,
    link_file,
    read_file,
    read_range,
    sync_directory,
    write_file,
)

_LOGGER = logging.getLogger("remesh")
_NETWORK = frozenset({"beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3"})
_IN_MEMORY = frozenset({"ramfs", "tmpfs"})
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}


class LocalStorage(Storage):
    """Files below a directory; safe to use from several threads.

    Args:
        root: The directory; `~` is the user's home. It is made when the first file is written.
        direct_io: Whether to pass by the page cache where the file system can. False suits files
            that several processes of one machine read at the same time.
    """

    shares_files = True
    copying: Copying = "at once"

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool = True) -> None:
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
            return 0.0 if is_network_device(self._root.stat().st_dev) else None
        except OSError:
            return None  # reading it will say what is wrong

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
            return read_file(file, start, stop)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        assert start >= 0
        file = self._file(path)
        with explained("read", file):
            return read_range(file, start, buffer, direct=self._direct)

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        file = self._file(path)
        self._make_parents(file)
        hidden = file.with_name(f"{HIDDEN}{secrets.token_hex(8)}")
        with explained("write", file):
            write_file(hidden, data)
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
        self._make_parents(file)
        with explained("write", file):
            try:
                return LocalWriter(file, num_bytes, direct=self._direct)
            except FileExistsError as error:
                raise StorageError(f"{file} exists already; choose another place") from error

    def open_shared(self, path: str, num_bytes: int) -> LocalWriter:
        file = self._file(path)
        self._make_parents(file)
        with explained("write", file):
            return LocalWriter(file, num_bytes, direct=False, shared=True)

    def rename(self, path: str, new: str) -> None:
        file, renamed = self._file(path), self._file(new)
        self._make_parents(renamed)
        with explained("rename", file):
            file.replace(renamed)

    def copy_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:
        """See `Storage.copy_from`; the copy is a hard link."""
        if not isinstance(source, LocalStorage):
            return False
        file = self._file(new)
        self._make_parents(file)
        try:
            link_file(source._file(path), file, num_bytes)  # noqa: SLF001 - of the same class
        except (OSError, StorageError) as error:
            _LOGGER.debug("%s cannot be a link to %s/%s: %s", file, source.url, path, error)
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
        available = available_memory() if is_in_memory(status.st_dev) else None
        if available is not None:
            free_bytes = min(free_bytes, available)
        room_name = room_identity(status.st_dev)
        place = f"{room_name}:{status.st_ino}:{self._root.relative_to(directory)}"
        return FileSystemSpace(room_name, free_bytes, place, str(directory))

    def _file(self, path: str) -> Path:
        return self._root / check_path(path)

    def _make_parents(self, file: Path) -> None:
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
        except FileExistsError as error:
            raise StorageError(
                f"cannot write {file}: {file.parent} is not a directory; choose another place"
            ) from error
        except OSError as error:
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
            raise _taken(file) from error
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
        raise CheckpointExistsError(
            f"{file} is being written by another process; if no such process lives, remove {marker}"
        ) from error
    try:
        if os.path.lexists(file):
            raise _taken(file)
        hidden.rename(file)
    finally:
        marker.unlink()


def _taken(file: Path) -> CheckpointExistsError:
    return CheckpointExistsError(f"{file} exists already; choose another place, or overwrite it")


def room_identity(device: int) -> str:
    """The name of the room of a device (`os.stat_result.st_dev`)."""
    mounts = _read("/proc/self/mountinfo")
    machine = _read("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    return network_mount(mounts, device) or f"{machine}:{device}"


def network_mount(mountinfo: str, device: int) -> str | None:
    """The source of a device's mount in `/proc/self/mountinfo`, if it is a network file system."""
    kind, source = _kind_and_source(mountinfo, device)
    return f"{kind}:{source}" if kind in _NETWORK else None


def _kind_and_source(mountinfo: str, device: int) -> tuple[str, str]:
    """The kind of a device's file system and what was mounted; empty if it is not mounted."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            kind, source = file_system.split()[:2]
            return kind, source
    return "", ""


def is_in_memory(device: int) -> bool:
    """True if what lies on a device, as in `os.stat_result.st_dev`, takes memory."""
    return _kind_and_source(_read("/proc/self/mountinfo"), device)[0] in _IN_MEMORY


def is_network_device(device: int) -> bool:
    """True if a device, as in `os.stat_result.st_dev`, is a network file system."""
    return network_mount(_read("/proc/self/mountinfo"), device) is not None


def _read(path: str) -> str:
    """A file that the kernel may not offer, as in some sandboxes; empty then."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
