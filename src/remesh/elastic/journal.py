"""The master's journal: the whole job, in an SQLite file.

It is written in one transaction after each batch of events, before the instructions that follow
from them are sent: a master that was killed continues where it was.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from remesh.elastic.job import Job, Policy
from remesh.errors import StorageError

JOURNAL_VERSION = 4

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Job).decode


class Journal:
    """An open journal; `:memory:` keeps nothing. One thread at a time may use it."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        # SQLite puts the log beside the file that a link leads to.
        self._file = None if self._path == ":memory:" else Path(self._path).resolve()
        self._log_file = Path(f"{self._file}-wal")
        self.warnings: list[str] = []
        self._is_open = self._has_log = False
        self._identity: tuple[int, int] | None = None
        if self._file is not None:
            if self._file.is_dir():
                raise StorageError(f"{self._path} is a directory; the journal needs a file")
            if self._file.exists() and self._file.stat().st_size == 0:
                self.warnings.append(
                    f"the journal {self._path} was empty: if it held a job's state, that is lost"
                )
        self._open()

    def _open(self) -> None:
        database = None
        try:
            database = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=1.0
            )
            self._database = database
            # A second master on the same file would undo what this one writes. Set first, this also
            # keeps SQLite from sharing memory through a file, which network file systems cannot.
            database.execute("pragma locking_mode=exclusive")
            database.execute("pragma journal_mode=wal")
            database.execute("pragma synchronous=full")
            database.execute("begin exclusive")
            database.execute("create table if not exists about (version integer not null)")
            self._check_version()
            database.execute(
                "create table if not exists job (id integer primary key, time real, state blob)"
            )
            database.execute("commit")
            self._identity = self._identify()
            self._is_open = True
        except (sqlite3.Error, OSError) as error:
            if database is not None:
                database.close()
            # Where there was no file, this is the beginning of ours.
            self._identity = self._identify()
            if isinstance(error, StorageError):
                raise
            hint = "; is another master running on it?" if "locked" in str(error) else ""
            raise StorageError(
                f"{self._path}: cannot be used as the master's journal ({error}){hint}"
            ) from error

    def _identify(self) -> tuple[int, int] | None:
        """The identity of the file under the journal's name; None if there is none."""
        if self._file is None:
            return None
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _check_version(self) -> None:
        row = self._database.execute("select version from about").fetchone()
        if row is None:
            self._database.execute("insert into about values (?)", (JOURNAL_VERSION,))
        elif row[0] != JOURNAL_VERSION:
            age = "a newer" if row[0] > JOURNAL_VERSION else "an older"
            raise StorageError(
                f"{self._path}: written by {age} remesh\n"
                f"Its journal has version {row[0]}, this one reads {JOURNAL_VERSION}.\n"
                "Use that for this job, or another file"
            )

    def load(self, policy: Policy) -> tuple[Job, float]:
        """The job that the journal holds, and when it was written.

        The policy counts from now on, whatever the journal says.
        """
        try:
            row = self._database.execute("select time, state from job").fetchone()
            if row is None:
                return Job(policy=policy), 0.0
            return msgspec.structs.replace(_decode(row[1]), policy=policy), row[0]
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StorageError(
                f"{self._path}: the master's journal is damaged: {error}\nMove it away to go on "
                "without it: nodes that train report again where they are"
            ) from error

    def write(self, job: Job, time: float) -> None:
        """Make the job durable; after a failure, the next write may make the file anew."""
        self._check_place()
        if not self._is_open:
            self._open()
        try:
            self._database.execute(
                "insert or replace into job values (1, ?, ?)", (time, _encode(job))
            )
        except sqlite3.Error as error:
            raise StorageError(f"{self._path}: the journal cannot be written: {error}") from error
        self._has_log = True

    def _check_place(self) -> None:
        """Notice that the files were removed: what is written to them then is lost at the end."""
        if self._file is None:
            return
        try:
            found = self._identify()
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be found: {error}") from error
        is_other = found not in (None, self._identity)  # another one's, which is left alone
        is_whole = found is not None and (self._log_file.exists() or not self._has_log)
        if not is_other:
            if is_whole or not self._is_open:
                return
            self._database.close()
            self._is_open = self._has_log = False
        raise StorageError(f"{self._path}: the journal was removed while the master runs")

    def close(self) -> None:
        """Give the file back."""
        self._database.close()
