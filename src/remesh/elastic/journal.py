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

JOURNAL_VERSION = 8
_CURE = "Move it away to go on without it: nodes that train report again where they are"

_encode = msgspec.json.Encoder().encode


class _Head(msgspec.Struct, frozen=True):
    """What files of all versions have."""

    version: int


class _Content(_Head, frozen=True):
    """The content of the file."""

    time: float = 0.0  # when it was written
    job: JobState | None = None


class Journal:
    """An open journal; `:memory:` keeps nothing. One thread at a time may use it.

    Raises:
        StorageError: If the file cannot be used, or another master does.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        # The file that a link leads to is replaced, not the link.
        self._file = None if self._path == ":memory:" else Path(self._path).resolve()
        self._data = _encode(_Content(JOURNAL_VERSION))
        self._lock: int | None = None  # the descriptor of the locked file
        self.warnings: list[str] = []
        if self._file is None:
            return
        try:
            self._lock = os.open(f"{self._file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._file.exists():
                self._replace(self._file)
            elif data := self._file.read_bytes():
                self._data = data
            else:
                text = f"the journal {path} was empty: if it held a job's state, that is lost"
                self.warnings.append(text)
        except OSError as error:
            self.close()
            is_locked = isinstance(error, BlockingIOError)
            hint = "; is another master running on it?" if is_locked else ""
            raise StorageError(
                f"{path}: cannot be used as the master's journal ({error}){hint}"
            ) from error

    def load(self, policy: Policy) -> tuple[JobState, float]:
        """The job that the journal holds, and when it was written.

        The policy counts from now on, whatever the journal says.

        Raises:
            StorageError: If the file is none of this version, or is damaged.
        """
        try:
            version = msgspec.json.decode(self._data, type=_Head).version
            if version != JOURNAL_VERSION:
                age = "a newer" if version > JOURNAL_VERSION else "an older"
                raise StorageError(
                    f"{self._path}: written by {age} remesh\n"
                    f"Its journal has version {version}, this one reads {JOURNAL_VERSION}.\n"
                    "Use that for this job, or another file"
                )
            content = msgspec.json.decode(self._data, type=_Content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{self._path}: is no journal of a master, or is damaged: {error}\n{_CURE}"
            ) from error
        job = content.job
        if job is None:
            return JobState(policy=policy), 0.0
        if job.ended is not None:  # agents may still have to be told
            self.warnings.append(
                f"{self._path}: holds a job that has ended ({job.outcome})\n"
                f"{job.reason}\n"
                "For a new job give another file to --state, or remove this one"
            )
        return msgspec.structs.replace(job, policy=policy), content.time

    def write(self, job: JobState, time: float) -> None:
        """Make the job durable."""
        self._data = _encode(_Content(JOURNAL_VERSION, time, job))
        try:
            if self._file is not None:
                self._replace(self._file)
        except OSError as error:
            raise StorageError(f"{self._path}: the journal cannot be written: {error}") from error

    def _replace(self, file: Path) -> None:
        new = file.with_name(f"{file.name}.new")
        with new.open("wb") as out:
            out.write(self._data)
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
