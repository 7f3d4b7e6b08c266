"""A lease in a directory on shared storage, for `remesh.elastic.lease`.

Each write of the lease is a file of its own, `lease-<version>`, made by a hard link: of several
instances that write the same version one succeeds. The writer removes the files of lower versions.
No lock of a file is involved: a process that is stopped keeps its locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from remesh.elastic.lease import Lease, LeaseConflictError
from remesh.errors import StorageError

_LEASE, _HIDDEN = "lease-", "."


class _Content(msgspec.Struct, frozen=True):
    """What a file of the lease says."""

    holder: str
    term: int


@contextlib.contextmanager
def errors_of(what: str, directory: Path) -> Iterator[None]:
    """Turn errors of the file system into those of remesh."""
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
        with errors_of("keep the lease of several masters here", directory):
            directory.mkdir(parents=True, exist_ok=True)

    async def read(self) -> Lease:
        """The lease; `Lease()` if there is none yet."""
        return await asyncio.to_thread(self._read)

    async def write(self, lease: Lease) -> None:
        """Write the lease, if the stored one is still of its version."""
        await asyncio.to_thread(self._write, lease)

    def _read(self) -> Lease:
        with errors_of("read the lease", self._directory):
            while True:
                version = max(numbers(self._directory, _LEASE), default=None)
                if version is None:
                    return Lease()
                try:
                    text = numbered(self._directory, _LEASE, version).read_bytes()
                except FileNotFoundError:
                    continue  # there is a newer one
                try:
                    found = msgspec.json.decode(text, type=_Content)
                except msgspec.MsgspecError:  # a loss of power may leave an empty file
                    found = _Content("not readable", 0)
                return Lease(str(version), found.holder, found.term)

    def _write(self, lease: Lease) -> None:
        version = int(lease.version or 0) + 1
        file = numbered(self._directory, _LEASE, version)
        hidden = file.with_name(f"{_HIDDEN}{_LEASE}{uuid.uuid4().hex}")
        with errors_of("write the lease", self._directory):
            try:
                hidden.write_bytes(msgspec.json.encode(_Content(lease.holder, lease.term)))
                _link(hidden, file)
            finally:
                hidden.unlink(missing_ok=True)
            present = numbers(self._directory, _LEASE)
            if max(present) > version:
                file.unlink(missing_ok=True)
                raise LeaseConflictError
            for lower in present:
                if lower < version:
                    numbered(self._directory, _LEASE, lower).unlink(missing_ok=True)


def numbered(directory: Path, prefix: str, number: int) -> Path:
    """The entry of a directory with a prefix and a number."""
    return directory / f"{prefix}{number:010}"


def numbers(directory: Path, prefix: str) -> list[int]:
    """The numbers of the entries with a prefix."""
    names = [name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix)]
    return [int(name) for name in names if name.isdecimal()]


def _link(hidden: Path, file: Path) -> None:
    """Give a file a second name."""
    try:
        os.link(hidden, file)
    except FileExistsError as error:
        # A file server may repeat a request whose answer got lost, and then refuse our own link.
        if not file.exists() or not hidden.samefile(file):
            raise LeaseConflictError from error
