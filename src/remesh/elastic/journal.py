"""The master's journal: the events of a job, in an SQLite file.

Events are appended in transactions, before the replies that follow from them are sent. Every
`SNAPSHOT_EVERY` events, or as many as the job has nodes, the whole job is written, and the events
before it are dropped. Loading reads the newest such snapshot and applies the events since: a master
that was killed continues where it was.

A journal detects its own losses: events are numbered without gaps, and a row says whether the
journal was closed in an orderly way, and with which number. `warnings` lists what was lost. The job
continues from what is left, since its agents report the rest again. A journal that could not be
written for a while is brought up to date by `recover`, with the whole job.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from remesh.elastic.events import Event
from remesh.elastic.job import Job, Policy, apply
from remesh.elastic.tables import decode_hook, encode_hook
from remesh.errors import StorageError

JOURNAL_VERSION = 2
SNAPSHOT_EVERY = 2000
"""Events after which the whole job is written."""

_SCHEMA = """
create table if not exists about (version integer not null);
create table if not exists events (number integer primary key, time real, event blob not null);
create table if not exists snapshots (number integer primary key, time real, state blob not null);
create table if not exists closing (clean integer not null, number integer not null);
"""

_encode = msgspec.json.Encoder(enc_hook=encode_hook).encode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_job = msgspec.json.Decoder(Job, dec_hook=decode_hook).decode


class Journal:
    """An open journal; `:memory:` keeps nothing. One thread at a time may use it."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        # SQLite puts the log beside the file that a link leads to.
        self._file = None if self._path == ":memory:" else Path(self._path).resolve()
        self._log_file = Path(f"{self._file}-wal")
        self.warnings: list[str] = []
        self._num_since_snapshot = 0
        self._number = 0
        self._is_open = self._is_loaded = self._is_marked = False
        self._identity: tuple[int, int] | None = None
        if self._file is not None:
            if self._file.is_dir():
                raise StorageError(f"{self._path} is a directory; the journal needs a file")
            if self._file.exists() and _size(self._file) == 0:
                self.warnings.append(
                    f"the journal {self._path} was empty: if it held a job's state, that is lost"
                )
        self._had_log = _size(self._log_file) > 0
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
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            self._check_version()
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
        """What tells the open file from another one under its name."""
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
            if self._database.execute(
                "select 1 from events union select 1 from snapshots"
            ).fetchone():
                self.warnings.append(f"the journal {self._path} had lost the row of its version")
            self._database.execute("insert into about values (?)", (JOURNAL_VERSION,))
        elif row[0] != JOURNAL_VERSION:
            age = "a newer" if row[0] > JOURNAL_VERSION else "an older"
            raise StorageError(
                f"{self._path}: written by {age} remesh\n"
                f"Its journal has version {row[0]}, this one reads {JOURNAL_VERSION})\n"
                "Use that for this job, or another file"
            )

    def load(self, policy: Policy) -> tuple[Job, float]:
        """The job that the journal holds, and the time of its last event.

        The policy counts from now on, whatever the journal says.
        """
        try:
            job, last = Job(policy=policy), 0.0
            self._number = self._num_since_snapshot = 0
            row = self._database.execute(
                "select number, time, state from snapshots order by number desc limit 1"
            ).fetchone()
            if row is not None:
                self._number, last = row[0], row[1]
                job = msgspec.structs.replace(_decode_job(row[2]), policy=policy)
            for number, time, event in self._database.execute(
                "select number, time, event from events where number > ? order by number",
                (self._number,),
            ):
                if number != self._number + 1:
                    self._warn_of_loss(f"events {self._number + 1} to {number - 1} are missing")
                job, last = apply(job, _decode_event(event), time), time
                self._number = number
                self._num_since_snapshot += 1
            self._check_closing()
            self._is_loaded = True
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StorageError(
                f"{self._path}: the master's journal is damaged: {error}\nMove it away to go on "
                "without it: nodes that train report again where they are"
            ) from error
        return job, last

    def _check_closing(self) -> None:
        """Compare what was loaded with what the last master left."""
        row = self._database.execute("select clean, number from closing").fetchone()
        if row is None:
            return
        clean, number = row
        if clean and number != self._number:
            self._warn_of_loss(f"it ends with event {self._number}, and ended with {number}")
        if not clean and not self._had_log:
            self._warn_of_loss(
                f"{self._log_file} is missing or empty, which held the newest events"
            )

    def _warn_of_loss(self, what: str) -> None:
        self.warnings.append(
            f"the journal {self._path} has lost events: {what}; the job goes on without them"
        )

    def _mark(self, *, clean: bool) -> None:
        """Note, in the transaction that runs, whether the journal was closed."""
        self._database.execute("delete from closing")
        self._database.execute("insert into closing values (?, ?)", (clean, self._number))

    def _check_place(self) -> None:
        """Notice that the files were removed: what is written to them then is lost at the end."""
        if self._file is None:
            return
        try:
            is_there = self._is_ours()
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be found: {error}") from error
        if not is_there or (self._is_marked and not self._log_file.exists()):
            raise StorageError(f"{self._path}: the journal was removed while the master runs")

    def append(self, events: Sequence[tuple[float, Event]]) -> None:
        """Make events durable."""
        self._check_place()
        rows = [
            (number, time, _encode(event))
            for number, (time, event) in enumerate(events, start=self._number + 1)
        ]
        with self._transaction():
            self._database.executemany("insert into events values (?, ?, ?)", rows)
            if not self._is_marked:
                self._mark(clean=False)
        self._number += len(rows)
        self._num_since_snapshot += len(rows)
        if not self._is_marked:
            # The mark must outlive the log that lies beside the file.
            self._is_marked = True
            # If this fails, it will not be noticed should the log get lost; nothing else depends
            # on it.
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("pragma wal_checkpoint(passive)")

    def recover(self, job: Job, time: float) -> None:
        """Write the whole job in place of events that could not be written."""
        try:
            self._check_place()
        except StorageError:
            if self._file is not None and self._file.exists() and not self._is_ours():
                raise  # another one's
            self._database.close()
            self._is_open = self._is_marked = False
        if not self._is_open:
            self._open()
        self._number += 1
        self.snapshot(job, time)

    def _is_ours(self) -> bool:
        return self._identify() == self._identity

    def snapshot(self, job: Job, time: float) -> None:
        """Write the whole job and drop the events before it.

        The job is the one after every event that was appended, and no other; the time is that of
        the last of them.
        """
        row = (self._number, time, _encode(job))
        with self._transaction():
            self._database.execute("insert or replace into snapshots values (?, ?, ?)", row)
            self._database.execute("delete from snapshots where number < ?", (self._number,))
            self._database.execute("delete from events where number <= ?", (self._number,))
        self._num_since_snapshot = 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing; after a failure the next one can be tried."""
        try:
            self._database.execute("begin")
            try:
                yield
                self._database.execute("commit")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise StorageError(f"{self._path}: the journal cannot be written: {error}") from error

    def wants_snapshot(self, num_nodes: int) -> bool:
        """True if many events have gathered since the last snapshot."""
        return self._num_since_snapshot >= max(SNAPSHOT_EVERY, num_nodes)

    def close(self) -> None:
        """Give the file back."""
        try:
            if self._is_loaded:
                with self._transaction():
                    self._mark(clean=True)
        finally:
            self._database.close()


def _size(file: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
