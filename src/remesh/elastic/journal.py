"""The master's journal: the whole job, in one file.

Each batch of events writes a new file, which then takes the place of the one before, and only then
are the instructions sent that follow from the events: a master that was killed continues where it
was. A lock on a file beside it keeps a second master from undoing what the first one writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from remesh.elastic.job import JobState, Policy
from remesh.errors import StorageError

JOURNAL_VERSION = 6
_CURE = "Move it away to go on without it: nodes that train report again where they are"

_encode = msgspec.json.Encoder().encode


class _Content(msgspec.Struct, frozen=True):
    """The content of the file."""

    version: int
    time: float = 0.0  # when it was written
    job: msgspec.Raw = msgspec.Raw(b"null")


class Journal:
    """An open journal; `:memory:` keeps nothing. One thread at a time may use it."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        # The file that a link leads to is replaced, not the link.
        self._file = None if self._path == ":memory:" else Path(self._path).resolve()
        self._content = _Content(JOURNAL_VERSION)
        self._lock: int | None = None  # the descriptor of the locked file
        self.warnings: list[str] = []
        if self._file is None:
            return
        if self._file.is_dir():
            raise StorageError(f"{self._path} is a directory; the journal needs a file")
        try:
            self._open(self._file)
        except OSError as error:
            self.close()
            if isinstance(error, StorageError):
                raise
            hint = (
                "; is another master running on it?" if isinstance(error, BlockingIOError) else ""
            )
            raise StorageError(
                f"{self._path}: cannot be used as the master's journal ({error}){hint}"
            ) from error

    def _open(self, file: Path) -> None:
        self._lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not file.exists():
            self._replace(file)
        elif data := file.read_bytes():
            self._content = self._parsed(data)
        else:
            self.warnings.append(
                f"the journal {self._path} was empty: if it held a job's state, that is lost"
            )

    def _parsed(self, data: bytes) -> _Content:
        try:
            found = msgspec.json.decode(data, type=_Content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{self._path}: is no journal of a master, or is damaged: {error}\n{_CURE}"
            ) from error
        if found.version != JOURNAL_VERSION:
            age = "a newer" if found.version > JOURNAL_VERSION else "an older"
            raise StorageError(
                f"{self._path}: written by {age} remesh\n"
                f"Its journal has version {found.version}, this one reads {JOURNAL_VERSION}.\n"
                "Use that for this job, or another file"
            )
        return found

    def load(self, policy: Policy) -> tuple[JobState, float]:
        """The job that the journal holds, and when it was written.

        The policy counts from now on, whatever the journal says.
        """
        try:
            job = msgspec.json.decode(self._content.job, type=JobState | None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{self._path}: the master's journal is damaged: {error}\n{_CURE}"
            ) from error
        if job is None:
            return JobState(policy=policy), 0.0
        if job.ended is not None:  # agents may still have to be told
            self.warnings.append(
                f"{self._path}: holds a job that has ended ({job.rendezvous.outcome})\n"
                f"{job.rendezvous.reason}\n"
                "For a new job give another file to --state, or remove this one"
            )
        return msgspec.structs.replace(job, policy=policy), self._content.time

    def write(self, job: JobState, time: float) -> None:
        """Make the job durable."""
        self._content = _Content(JOURNAL_VERSION, time, msgspec.Raw(_encode(job)))
        try:
            if self._file is not None:
                self._replace(self._file)
        except OSError as error:
            raise StorageError(f"{self._path}: the journal cannot be written: {error}") from error

    def _replace(self, file: Path) -> None:
        new = file.with_name(f"{file.name}.new")
        with new.open("wb") as out:
            out.write(_encode(self._content))
            out.flush()
            os.fsync(out.fileno())
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # some network file systems cannot do that
            os.fsync(directory)
        os.close(directory)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
