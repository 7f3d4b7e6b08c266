"""What the master must not forget, in an SQLite file.

Events are appended in transactions before anything that follows from them is answered. Now and
then the whole state is written, and the events before it are dropped. Loading takes the newest such
state and applies the events since: a master that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from remesh.elastic.events import Event
from remesh.elastic.job import Policy, State, apply, start
from remesh.errors import StorageError

JOURNAL_VERSION = 1
SNAPSHOT_EVERY = 2000
"""Events after which the whole state is written."""

_SCHEMA = """
create table if not exists about (version integer not null);
create table if not exists events (number integer primary key, time real, event blob not null);
create table if not exists snapshots (number integer primary key, time real, state blob not null);
"""

_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_state = msgspec.json.Decoder(State).decode


class Journal:
    """An open journal. One thread at a time may use it.

    Args:
        path: The file; made if it is not there. `:memory:` keeps nothing.

    Raises:
        StorageError: If the file cannot be used, or was written by a newer remesh.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._database = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=1.0
        )
        try:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=full")
            # A second master on the same file would undo what this one says.
            self._database.execute("pragma locking_mode=exclusive")
            self._database.execute("begin exclusive")
            for statement in _SCHEMA.split(";"):
                self._database.execute(statement)
            self._check_version()
            self._database.execute("commit")
        except sqlite3.Error as error:
            self.close()
            raise StorageError(
                f"{self._path}: cannot be used as the master's journal ({error}); is another "
                "master running on it?"
            ) from error
        self._num_since_snapshot = 0
        self._number = 0

    def _check_version(self) -> None:
        row = self._database.execute("select version from about").fetchone()
        if row is None:
            self._database.execute("insert into about values (?)", (JOURNAL_VERSION,))
        elif row[0] > JOURNAL_VERSION:
            raise StorageError(
                f"{self._path}: written by a newer remesh (journal version {row[0]}, this one "
                f"knows {JOURNAL_VERSION}); use that, or another file"
            )

    def load(self, policy: Policy) -> tuple[State, float]:
        """The state that the journal holds, and the time of its last event.

        Args:
            policy: How the job is treated from now on, whatever the journal says.

        Raises:
            StorageError: If the journal is damaged.
        """
        try:
            state, last = start(policy), 0.0
            row = self._database.execute(
                "select number, time, state from snapshots order by number desc limit 1"
            ).fetchone()
            if row is not None:
                self._number, last = row[0], row[1]
                state = msgspec.structs.replace(_decode_state(row[2]), policy=policy)
            for number, time, event in self._database.execute(
                "select number, time, event from events where number > ? order by number",
                (self._number,),
            ):
                state, last = apply(state, _decode_event(event), time), time
                self._number = number
                self._num_since_snapshot += 1
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StorageError(f"{self._path}: the master's journal is damaged: {error}") from error
        return state, last

    def append(self, events: Sequence[tuple[float, Event]]) -> None:
        """Make events durable.

        Args:
            events: Times and events, in order.

        Raises:
            StorageError: If they cannot be written.
        """
        rows = []
        for time, event in events:
            self._number += 1
            rows.append((self._number, time, _encode(event)))
        self._num_since_snapshot += len(rows)
        with self._transaction():
            self._database.executemany("insert into events values (?, ?, ?)", rows)

    def snapshot(self, state: State, time: float) -> None:
        """Write the whole state and drop the events before it.

        Args:
            state: The state after every event that was appended, and no other.
            time: The time of the last of them.

        Raises:
            StorageError: If it cannot be written.
        """
        row = (self._number, time, _encode(state))
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

    @property
    def wants_snapshot(self) -> bool:
        """Whether many events have gathered since the last snapshot."""
        return self._num_since_snapshot >= SNAPSHOT_EVERY

    def close(self) -> None:
        """Give the file back."""
        self._database.close()
