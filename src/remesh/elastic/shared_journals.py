"""The journals of several masters on shared storage, one directory for each term of their lease.

The lease decides which master leads (`remesh.elastic.lease`), but a process may be paused after it
has looked at its lease. Fencing on the storage protects the journals: the holder of a term keeps
them in `term-<term>`, beside a file `open-<term>`. The holder of the next term removes that file,
and copies the directory to one of its own after that. `check` finds the file removed if the copy
may lack what was written: it is called after a write and before the reply. The storage needs no
hard links and no locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import uuid
from pathlib import Path

from remesh.elastic.lease import Lease, Leases, NotLeadingError
from remesh.elastic.lease_files import errors_of, numbered, numbers
from remesh.errors import StorageError

_TERM, _OPEN, _HIDDEN = "term-", "open-", "."
MAX_READS = 100
"""How often journals are read that are still being written."""


class SharedJournals:
    """The journals of one master, and of those before it.

    Args:
        directory: Where they are; made if it is not there.

    Raises:
        StorageError: If the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = uuid.uuid4().hex.encode()
        with errors_of("keep the journals of several masters here", directory):
            directory.mkdir(parents=True, exist_ok=True)

    def newest(self) -> int:
        """The highest term that a master has begun; 0 if none has."""
        with errors_of("read the journals", self._directory):
            return max([0, *numbers(self._directory, _OPEN), *numbers(self._directory, _TERM)])

    def take_over(self, term: int) -> Path:
        """Begin a term; the directory for its journals, with those of the newest term before.

        Args:
            term: A term of this master's lease. It has not begun before.

        Raises:
            NotLeadingError: If a later term has begun.
            StorageError: If the journals cannot be copied.
        """
        directory, own = self._directory, numbered(self._directory, _TERM, term)
        making = directory / f"{_HIDDEN}{_TERM}{uuid.uuid4().hex}"
        with errors_of("take over the journals", directory):
            mine = numbered(directory, _OPEN, term)
            with mine.open("xb") as file:
                file.write(self._mark)
            # Of two masters that begin at the same time, at least one sees the other's file.
            if self.newest() > term:
                mine.unlink(missing_ok=True)
                raise NotLeadingError(f"{mine}: a later term has begun")
            for number in numbers(directory, _OPEN):
                if number < term:
                    numbered(directory, _OPEN, number).unlink(missing_ok=True)
            older = [number for number in numbers(directory, _TERM) if number < term]
            files = _read_stable(numbered(directory, _TERM, max(older))) if older else {}
            making.mkdir()
            for name, content in files.items():
                with (making / name).open("wb") as target:
                    target.write(content)
                    target.flush()
                    os.fsync(target.fileno())
            making.rename(own)
            for number in older:
                shutil.rmtree(numbered(directory, _TERM, number), ignore_errors=True)
        return own

    def check(self, term: int) -> None:
        """Return if the holders of later terms see what was written before this call.

        Raises:
            NotLeadingError: If a later term may have begun.
        """
        file = numbered(self._directory, _OPEN, term)
        try:
            found = file.read_bytes()
        except OSError as error:
            raise NotLeadingError(f"{file}: the term has ended: {error}") from error
        if found != self._mark:
            raise NotLeadingError(f"{file}: the term belongs to another master")


class TermsOfJournals:
    """A lease whose terms are never below those of the journals; a `remesh.elastic.lease.Leases`.

    Terms begin anew in a lease that was removed, and a master would then find no older journals.

    Args:
        leases: The lease.
        journals: The journals.
    """

    def __init__(self, leases: Leases, journals: SharedJournals) -> None:
        self._leases = leases
        self._journals = journals
        self.write = leases.write

    async def read(self) -> Lease:
        """The lease."""
        found = await self._leases.read()
        return dataclasses.replace(found, term=max(found.term, self._journals.newest()))


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
