"""Status files: how the ranks of a background save learn of each other.

In the background there are no collectives: the ranks of a save find each other through the storage
that they write to, which every rank reaches, even when the process group is gone. The files lie in
the folder of the save's data files. Each has a digest of its content (`seal`). A file whose bytes
are not what was written is read again; if they stay wrong, the save fails.

* `part-<rank>`: this rank's files are durable, or it is done without any; its reply to rank 0.
* `failed-<rank>`: this rank has failed. `failed`, put by rank 0: the whole save has.

Rank 0 needs one listing to see them all. It commits, or puts `failed`. Every rank sees a commit by
the commit record, which has the save's id. The marks of other formats do not tell which save they
are of. There rank 0 puts one more file:

* `committed`: the checkpoint exists. A rank that has seen it removes its own part, and the last of
  them the file itself, so that nothing is left.

The requests of the whole job are bounded, whatever its size: the more ranks there are, the longer
the time between two looks of one, and the looks of different ranks are spread over that time. In a
small job a rank looks often at first, and less often the longer it waits. A rank that waits longer
than the deadline fails by itself. If a save takes long, rank 0 logs now and then who is missing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from remesh.checkpoint.commit import failure_path
from remesh.core.integrity import NUM_READINGS, raw_digest
from remesh.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ExchangeError,
    RemeshError,
    StorageError,
)
from remesh.exchange import Outcome, decode_failure, encode_failure
from remesh.formats.native import data_folder, read_record
from remesh.formats.table import writer_of
from remesh.storage import Storage

_LOGGER = logging.getLogger("remesh")

HIDDEN_SECONDS = 60.0
"""How long a network file system may hide a file that another node has put."""

REPORT_SECONDS = 60.0
"""Time between two reports of a save that takes long."""

GRACE_SECONDS = 2.0
"""How much longer other ranks wait than rank 0, which knows who is missing and says so."""

REQUESTS_PER_SECOND = 400.0
"""What all ranks that wait for the end ask of the storage, together."""

COORDINATOR_REQUESTS_PER_SECOND = 100.0
"""What rank 0 asks while it waits for the others."""

SHORTEST_SECONDS, LONGEST_SECONDS = 0.02, 1.0
"""Time between two looks, unless there are so many ranks that it must be longer."""

WAITED_SHARE = 0.05
"""In between, this share of the time that was waited already."""

_REQUESTS_OF_A_LOOK = 2
"""A rank that waits for the end reads the commit record and the note of a failure."""

LOOKS_PER_PART = 16
"""At one of so many looks it also looks for its own part."""

_NAMES_OF_A_REQUEST = 1000
"""Object stores list so many names at a time."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one rank looks."""

    first: float  # seconds from the moment when it begins to wait to its first look
    least: float  # seconds between two looks at least

    def pause(self, waited: float) -> float:
        """Seconds from the end of a look to the next one, when so many were waited already."""
        usual = min(max(waited * WAITED_SHARE, SHORTEST_SECONDS), LONGEST_SECONDS)
        return max(usual, self.least)


def schedule_of(rank: int, num_ranks: int) -> Schedule:
    """How rank 0 looks for the files of the others, and another rank for the end of the save."""
    if rank == 0:
        # The folder has a data file and a part of each rank.
        num_requests = 1 + 2 * num_ranks // _NAMES_OF_A_REQUEST
        return Schedule(0.0, num_requests / COORDINATOR_REQUESTS_PER_SECOND)
    least = num_ranks * _REQUESTS_OF_A_LOOK / REQUESTS_PER_SECOND
    # Ranks of a job begin to wait at about the same time.
    return Schedule(least * rank / num_ranks if least > SHORTEST_SECONDS else 0.0, least)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Participant:
    """One rank of a background save."""

    format: str  # name of the format
    save_id: str  # names the save
    rank: int
    num_ranks: int  # number of ranks
    deadline: float  # seconds that it waits for other ranks before it fails


class StatusFiles:
    """The status files of one save, as one rank uses them."""

    def __init__(self, storage: Storage, me: Participant) -> None:
        self._storage = storage
        self._me = me
        self._rank, self._num_ranks = me.rank, me.num_ranks
        self._has_record = writer_of(me.format).has_record
        self._folder = data_folder(me.save_id)
        self._found: set[str] = set()  # on rank 0, what was there when it last looked
        self._replies: dict[int, bytes] = {}  # on rank 0, those that it has read
        self._given_up: BaseException | None = None
        self._wake = threading.Event()
        self.has_begun = False  # whether `join_outcomes` tells the others if this rank fails
        self.is_counted = False  # whether rank 0 may commit this rank's files

    def join_outcomes(
        self, own: Outcome, join: Callable[[list[bytes]], object], undo: Callable[[], None]
    ) -> None:
        """As `remesh.exchange.join_outcomes`, by files; a failure of `join`, a commit, is final.

        A rank that fails puts its failure in place of its reply. Rank 0 then puts the failure of
        the save, which every rank raises, and undoes.
        """
        if self._rank == 0:
            self._lead(own, join, undo)
            if not self._has_record and self._num_ranks > 1:  # the others wait for it
                self._storage.put(self._path("committed", 0), b"", overwrite=True)
        else:
            self._follow(own)
        with suppress(StorageError):  # the checkpoint is there
            self._clear()

    def give_up(self, error: BaseException) -> None:
        """Let this rank fail with an error as soon as it can, and the save with it."""
        self._given_up = error
        self._wake.set()

    def check(self) -> None:
        """Raise what the save was given up for."""
        if self._given_up is not None:
            raise self._given_up

    def report(self, error: BaseException) -> BaseException:
        """Say that this rank has failed, or rank 0 that the save has.

        The error, with a note if the storage refuses.
        """
        try:
            self._put_failure(error)
        except StorageError as also:
            error.add_note(f"The other ranks could not be told: {also}")
        return error

    def is_committed(self) -> bool:
        """True if the save is seen to be committed."""
        try:
            if self._has_record:
                return read_record(self._storage).save_id == self._me.save_id
            return self._storage.exists(self._path("committed", 0))
        except CheckpointError:
            return False

    # -----------------------------------------------------------------------------------------
    # Rank 0
    # -----------------------------------------------------------------------------------------

    def _lead(
        self, own: Outcome, join: Callable[[list[bytes]], object], undo: Callable[[], None]
    ) -> None:
        try:
            self.has_begun = True
            if own.error is not None:
                raise own.error
            self._wait_for_replies()
        except BaseException as error:
            # The failure comes first, so that a rank whose directory goes away finds out why. On a
            # full disk there is room for it only afterwards.
            try:
                self._put_failure(error)
                is_reported = True
            except StorageError:
                is_reported = False
            undo()
            if not is_reported:
                self.report(error)
            raise
        try:
            join([own.reply, *(self._replies[rank] for rank in range(1, self._num_ranks))])
        except BaseException as error:
            self.report(error)
            raise

    def _wait_for_replies(self) -> None:
        next_report = REPORT_SECONDS
        for waited in self._looks():
            self.check()
            missing = self._missing()
            if not missing:
                return
            if waited > self._me.deadline:
                raise self._too_late(waited, f"ranks {missing} to finish their files")
            if waited >= next_report:
                next_report = waited + REPORT_SECONDS
                text = "the save to %s waits since %.0f s for %d of %d ranks: %s"
                counts = len(missing), self._num_ranks
                _LOGGER.warning(text, self._storage.url, waited, *counts, missing)

    def _missing(self) -> list[int]:
        """The ranks whose replies are not there yet. Raises what a rank says it failed with.

        A rank may fail also after it had put its reply.
        """
        missing = [rank for rank in range(1, self._num_ranks) if rank not in self._replies]
        if self._num_ranks == 1:
            return missing
        self._found = set(self._storage.list(f"{self._folder}/"))
        failures = [path for path in self._found if path.startswith(f"{self._folder}/failed-")]
        if failures:
            raise decode_failure(read_sealed(self._storage, min(failures)))
        for rank in missing:
            if self._path("part", rank) in self._found:
                self._replies[rank] = read_sealed(self._storage, self._path("part", rank))
        return [rank for rank in missing if rank not in self._replies]

    # -----------------------------------------------------------------------------------------
    # The other ranks
    # -----------------------------------------------------------------------------------------

    def _follow(self, own: Outcome) -> None:
        try:
            self.has_begun = True
            if own.error is not None:
                raise own.error
            # Rank 0 may have removed all files before this rank had written its own.
            failure = self._failure_of_save()
            if failure is None:
                self.is_counted = True
                self._put("part", own.reply)
        except BaseException as error:
            cause = self._cause_of(error)
            if cause is error:
                self.report(error)
                raise
            raise cause from error
        if failure is not None:
            raise failure
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait until the save is committed or given up.

        Rank 0 removes this rank's part after either, so it is looked at now and then: once another
        save has replaced the checkpoint, nothing else shows that this one has ended.
        """
        is_reported, part, gone_at = False, self._path("part", self._rank), math.inf
        for number, waited in enumerate(self._looks()):
            if (number + 1) % LOOKS_PER_PART == 0:
                gone_at = math.inf if self._storage.exists(part) else min(gone_at, waited)
            if self.is_committed():
                return
            failure = self._failure_of_save()
            # Rank 0 may also have given up, and say so only after it has removed the files.
            if failure is None and waited > gone_at + HIDDEN_SECONDS:
                failure = self._ended_unseen()
            if failure is not None:
                raise failure
            if waited > self._me.deadline + GRACE_SECONDS:
                raise self._too_late(waited, "rank 0 to commit")
            if self._given_up is not None and not is_reported:
                is_reported = True
                self._put_failure(self._given_up)

    def _ended_unseen(self) -> ExchangeError:
        return ExchangeError(
            f"{self._storage.url}: rank 0 ended this save, and rank {self._rank} did not see how\n"
            "Either rank 0 failed and could not put the reason there, which is then in its log, or "
            "another save has replaced this one. The checkpoint that is there now is whole."
        )

    def _cause_of(self, error: BaseException) -> BaseException:
        """Why this rank has failed, given how.

        If rank 0 has given the save up, its reason is: files that it has removed are no cause.
        """
        if not isinstance(error, StorageError):
            return error
        try:
            return self._failure_of_save() or error
        except StorageError:
            return error  # it says what is wrong with the storage

    def _failure_of_save(self) -> RemeshError | None:
        """Why rank 0 gave the save up, if it did."""
        try:
            return decode_failure(read_sealed(self._storage, failure_path(self._me.save_id)))
        except CheckpointNotFoundError:
            return None

    # -----------------------------------------------------------------------------------------
    # All ranks
    # -----------------------------------------------------------------------------------------

    def _looks(self) -> Iterator[float]:
        """The seconds waited, at each look at the storage; a look comes at once after `give_up`."""
        schedule, started = schedule_of(self._rank, self._num_ranks), time.monotonic()
        pause = schedule.first
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            waited = time.monotonic() - started
            yield waited
            pause = schedule.pause(waited)

    def _too_late(self, waited: float, what: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self._rank} waited {waited:.0f} s for {what} in the save to "
            f"{self._storage.url}. Look for the first rank that died or stopped; the previous "
            "checkpoint is untouched."
        )

    def _clear(self) -> None:
        """After the commit: remove status files that no rank needs any more."""
        if self._num_ranks == 1:
            return
        if not self._has_record:
            if self._rank:
                self._storage.delete(self._path("part", self._rank))
            found = self._storage.list(f"{self._folder}/")
            if not self._of_ranks(found, "part"):
                self._storage.delete_many(found)  # this is the last rank
        elif self._rank == 0:
            self._storage.delete_many(self._of_ranks(self._found, "part"))

    def _of_ranks(self, paths: Collection[str], kind: str) -> list[str]:
        return [path for path in paths if path.startswith(f"{self._folder}/{kind}-")]

    def _put_failure(self, error: BaseException) -> None:
        if self._num_ranks > 1:
            self._put("failed", encode_failure(self._rank, error))

    def _put(self, kind: str, data: bytes) -> None:
        self._storage.put(self._path(kind, self._rank), seal(data), overwrite=True)

    def _path(self, kind: str, rank: int) -> str:
        if kind == "failed" and rank == 0:
            return failure_path(self._me.save_id)
        return f"{self._folder}/{kind if kind == 'committed' else f'{kind}-{rank:05d}'}.msgpack"


def seal(data: bytes) -> bytes:
    """The content of a small file that `read_sealed` reads."""
    return raw_digest(data) + data


def read_sealed(storage: Storage, path: str) -> bytes:
    """The content that `seal` sealed; StorageError if its bytes are not what was written."""
    for _ in range(NUM_READINGS):
        found = storage.read(path)
        if found[:16] == raw_digest(found[16:]):
            return found[16:]
    raise StorageError(
        f"{path}: its bytes are not what was written, in each of {NUM_READINGS} readings\n"
        f"It was read from {storage.url}. Look for errors of the disk, the network or the memory "
        "there, and save again; the previous checkpoint is untouched."
    )
