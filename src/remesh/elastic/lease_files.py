"""A lease, and the journals of its holder, in a directory on shared storage.

Each write of the lease is a file of its own, `lease-<version>`, made by a hard link: of several
instances that write the same version one succeeds. The writer removes the files of lower versions.

A holder of the lease keeps its journals in `term-<term>`. The next one copies that directory to one
of its own, after the lease of the old holder is removed. `check` refuses what a deposed holder has
written: it is called after the write and before the reply, and finds the lease removed if the copy
may lack the write. No lock of a file is involved: a process that is stopped keeps its locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from remesh.elastic.lease import Lease, LeaseConflictError, NotLeadingError
from remesh.errors import StorageError

log = logging.getLogger(__name__)

_LEASE, _TERM, _HIDDEN = "lease-", "term-", "."
MAX_READS = 100
"""How often journals are read that are still being written."""


class _Content(msgspec.Struct, frozen=True):
    """What a file of the lease says."""

    holder: str
    term: int


@contextlib.contextmanager
def _errors_of(what: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{directory}: cannot {what}: {error}") from error


class LeaseFiles:
    """The lease in a directory; a `remesh.elastic.lease.Leases`.

    Args:
        directory: Where it is; made if it is not there.

    Raises:
        StorageError: If the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._own: tuple[Path, bytes] | None = None
        with _errors_of("keep the lease of several masters here", directory):
            directory.mkdir(parents=True, exist_ok=True)

    async def read(self) -> Lease:
        """The lease; its term is at least that of the newest journals."""
        return await asyncio.to_thread(self._read)

    async def write(self, lease: Lease) -> None:
        """Write the lease, if the stored one is still of its version."""
        await asyncio.to_thread(self._write, lease)

    def _read(self) -> Lease:
        with _errors_of("read the lease", self._directory):
            while True:
                newest = max(_numbers(self._directory, _TERM), default=0)
                version = max(_numbers(self._directory, _LEASE), default=None)
                if version is None:
                    return Lease("", "", newest)
                try:
                    text = _path(self._directory, _LEASE, version).read_bytes()
                except FileNotFoundError:
                    continue  # there is a newer one
                try:
                    found = msgspec.json.decode(text, type=_Content)
                except msgspec.MsgspecError:  # a loss of power may leave an empty file
                    found = _Content("not readable", newest)
                return Lease(str(version), found.holder, max(found.term, newest))

    def _write(self, lease: Lease) -> None:
        version = int(lease.version or 0) + 1
        file = _path(self._directory, _LEASE, version)
        text = msgspec.json.encode(_Content(lease.holder, lease.term))
        hidden = file.with_name(f"{_HIDDEN}{_LEASE}{uuid.uuid4().hex}")
        with self._lock, _errors_of("write the lease", self._directory):
            try:
                hidden.write_bytes(text)
                _link(hidden, file)
            finally:
                hidden.unlink(missing_ok=True)
            present = _numbers(self._directory, _LEASE)
            if max(present) > version:
                file.unlink(missing_ok=True)
                raise LeaseConflictError
            for lower in present:
                if lower < version:
                    _path(self._directory, _LEASE, lower).unlink(missing_ok=True)
            self._own = (file, text)

    def check(self) -> None:
        """Return if what was written before this call is seen by all later holders.

        Raises:
            NotLeadingError: If another instance may have taken the lease.
        """
        with self._lock:
            assert self._own is not None, "the lease was taken"
            file, text = self._own
            try:
                found = file.read_bytes()
            except OSError as error:
                raise NotLeadingError(f"{file}: the lease is lost: {error}") from error
        if found != text:
            raise NotLeadingError(f"{file}: the lease is lost; another instance leads")


def take_over(directory: Path, term: int) -> Path:
    """The directory for the journals of a term, with those of the newest term before.

    Args:
        directory: Where the lease is, which has been taken.
        term: Its term.

    Raises:
        StorageError: If they cannot be copied.
    """
    own = _path(directory, _TERM, term)
    making = directory / f"{_HIDDEN}{_TERM}{uuid.uuid4().hex}"
    with _errors_of("take over the journals", directory):
        older = [number for number in _numbers(directory, _TERM) if number < term]
        files = _read_stable(_path(directory, _TERM, max(older))) if older else {}
        making.mkdir()
        for name, content in files.items():
            with (making / name).open("wb") as target:
                target.write(content)
                target.flush()
                os.fsync(target.fileno())
        making.rename(own)
        for number in older:
            shutil.rmtree(_path(directory, _TERM, number), ignore_errors=True)
    return own


def _read_stable(directory: Path) -> dict[str, bytes]:
    """The files of a directory, which a deposed master may still write once."""
    before = _read_all(directory)
    for _ in range(MAX_READS):
        now = _read_all(directory)
        if now == before:
            return now
        before = now
    raise StorageError(f"{directory}: another master still writes; stop it, and start this again")


def _read_all(directory: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[file.name] = file.read_bytes()
    return found


def _path(directory: Path, prefix: str, number: int) -> Path:
    return directory / f"{prefix}{number:010}"


def _numbers(directory: Path, prefix: str) -> list[int]:
    """The numbers of the entries with a prefix."""
    names = [name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix)]
    return [int(name) for name in names if name.isdecimal()]


def _link(hidden: Path, file: Path) -> None:
    """Give a file a second name.

    Raises:
        LeaseConflictError: If the name is taken.
    """
    try:
        os.link(hidden, file)
    except FileExistsError as error:
        # A file server may repeat a request whose answer got lost, and then refuse our own link.
        if not file.exists() or not hidden.samefile(file):
            raise LeaseConflictError from error
