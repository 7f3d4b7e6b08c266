"""The server of a background save: writes, waits for the other ranks, commits. See `protocol`.

A server writes the chunks that its client stages, makes the files durable and puts its *part*
(their positions and digests) beside them; a rank that writes no file puts an empty part when it has
staged its state. Rank 0 waits until it sees the parts of all ranks, and commits. The other ranks
wait until they see that. No collective is used; ranks see each other's `status_files`.

The requests of the whole job are bounded, whatever its size: the more ranks there are, the longer
the time between two looks of one, and the looks of different ranks are spread over that time. In a
small job a rank looks often at first, and less often the longer it waits.

A rank that fails puts its failure in place of its part. Rank 0 then gives the save up and puts the
failure of the save, which every rank sees. A rank that waits longer than the deadline without
seeing the end fails by itself.

Nothing here knows of tensors or of the trainer, so that a process without torch can do it. A save
that takes long is reported: each rank says now and then how far it is, and rank 0 logs who is
missing and who is slowest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from remesh.background.protocol import (
    Cancel,
    ChunkFilled,
    ChunkFreed,
    Ended,
    Happened,
    StagingEnded,
    StopStaging,
    ToClient,
    ToServer,
    WriteTask,
)
from remesh.background.status_files import StatusFiles
from remesh.checkpoint.commit import finish, give_up
from remesh.checkpoint.unchanged import remove_paths
from remesh.errors import ExchangeError, StorageError
from remesh.formats.framing import Part, as_written
from remesh.pipeline.arena import Chunk
from remesh.pipeline.stage import Filled, StagedWriter
from remesh.pipeline.write import ChunkWriter
from remesh.storage import Storage

_LOGGER = logging.getLogger("remesh")

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


def schedule_of_waiting(rank: int, num_ranks: int) -> Schedule:
    """How a rank other than 0 looks for the end of the save."""
    least = num_ranks * _REQUESTS_OF_A_LOOK / REQUESTS_PER_SECOND
    # Ranks of a job begin to wait at about the same time.
    first = least * rank / num_ranks if least > SHORTEST_SECONDS else 0.0
    return Schedule(first, least)


def schedule_of_coordinator(num_ranks: int) -> Schedule:
    """How rank 0 looks for the notes of the others."""
    # The folder has a file and a note of each rank.
    num_requests = 1 + 2 * num_ranks // _NAMES_OF_A_REQUEST
    return Schedule(0.0, num_requests / COORDINATOR_REQUESTS_PER_SECOND)


class SaveServer:
    """One save on one rank: `run` does it in a thread, `receive` is called meanwhile.

    Files may be copied from the checkpoint in `last`. What `send` raises for an event fails the
    save.
    """

    def __init__(
        self,
        task: WriteTask,
        storage: Storage,
        last: Storage | None,
        chunk: Callable[[int], Chunk],
        send: Callable[[ToClient], None],
    ) -> None:
        self.task = task
        self._storage = storage
        self._last = last
        self._chunk = chunk
        self._send = send
        self._status = StatusFiles(storage, task.format, task.save_id, task.rank)
        self._writer = StagedWriter(
            lambda chunk: send(ChunkFreed(chunk.slot)), at_once=task.at_once
        )
        self.staged = threading.Event()  # the client stages no more, well or not
        self._staging_error: BaseException | None = None
        self._given_up: BaseException | None = None
        self._may_count = False  # whether rank 0 may commit this rank's files
        self._parts: list[Part] = []
        self._copied: set[int] = set()
        self._wake = threading.Event()

    def receive(self, message: ToServer) -> None:
        """Follow a message of the client."""
        match message:
            case ChunkFilled(number, num_bytes, slot):
                self._writer.put(Filled(number, num_bytes, self._chunk(slot)))
            case StagingEnded(error):
                self._staging_error = error
                if error is not None:
                    self._writer.cancel()  # not all is staged
                self._writer.end()
                self.staged.set()
            case Cancel(error):
                self._given_up = error or CancelledError(
                    f"the save to {self._storage.url} was cancelled"
                )
                self._writer.cancel()
                self._send(StopStaging())
                self._wake.set()
            case WriteTask():
                pass  # this save is about it

    def run(self) -> None:
        """See the save through to its end, and tell the client of it."""
        try:
            error = self.save()
        except BaseException as also:  # noqa: BLE001 - giving it up has failed; raised by the handle
            error = also
        parts = () if error is not None else self._parts
        self._send(Ended(error, parts))

    def save(self) -> BaseException | None:
        """Write, and see the save through to its end; returns why it failed, if it did."""
        is_first = self.task.rank == 0
        # How the other ranks learn of a failure of this one; None where no rank waits for it.
        tell: Callable[[BaseException], BaseException] | None
        tell = self._abandon if is_first else self._report
        try:
            self._write()
            if is_first:
                self._wait_for_parts()
                # From here on the files stay where they are, unless `finish` removes them.
                tell = self._status.report
                save, parts = self.task.global_plan, self._status.parts(self.task.num_ranks)
                assert save is not None
                finish(self._storage, save, parts, self._emit)
                tell = None
                self._status.clear(self.task.num_ranks)
            else:
                tell = None
                self._wait_for_end()
        except BaseException as error:  # noqa: BLE001 - raised by the handle
            failure = error if tell is None else tell(error)
            if not (is_first or self._may_count):
                kept = [part.path for part in self.task.kept]
                remove_paths(self._storage, [*self.task.files.paths, *kept])
            return failure
        return None

    # -----------------------------------------------------------------------------------------
    # Writing
    # -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write this rank's file and put its part."""
        task = self.task
        written = None
        if task.files.paths:
            stop_staging = partial(self._send, StopStaging())
            written = self._writer.write(self._create, self._counted(), stop_staging)
        self.staged.wait()
        if self._staging_error is not None:
            raise self._staging_error
        self._check_given_up()
        self._storage.sync()
        self._parts.extend(task.kept)
        if written is not None:
            self._emit("save.file_finished", task.num_bytes)
            told = zip(task.parts, written, strict=True)
            for number, (part, found) in enumerate(told):
                is_kept = number in self._copied
                self._parts.append(
                    msgspec.structs.replace(as_written(part, found), is_kept=is_kept)
                )
        if task.rank > 0:
            # Rank 0 may have removed all files before this rank had written its own.
            failure = self._status.failure_of_save()
            if failure is not None:
                raise failure
        self._may_count = True
        self._status.put_parts(self._parts)

    def _create(self) -> ChunkWriter:
        task = self.task
        self._emit("save.file_created", task.num_bytes)
        copies = {
            source.number: source.copy_of(
                self._last, self._storage, task.files.paths[source.number]
            )
            for source in task.sources
            if self._last is not None
        }
        known = self._writer.copy_unchanged(task.files, copies) if copies else {}
        self._copied.update(known)
        return ChunkWriter(self._storage, task.files, task.num_bytes, known)

    def _counted(self) -> Callable[[int], None]:
        """A function for after each chunk: emits the event, and puts the progress now and then."""
        task = self.task
        lock = threading.Lock()
        done, next_time = 0, time.monotonic() + task.report_seconds

        def count(size: int) -> None:
            nonlocal done, next_time
            self._emit("save.chunk_written", size)
            # Progress is put under the lock, so that none overtakes a later one.
            with lock:
                done += size
                if time.monotonic() < next_time:
                    return
                next_time = time.monotonic() + task.report_seconds
                try:
                    self._status.put_progress(done, task.num_bytes)
                except StorageError as error:
                    _LOGGER.warning("rank %d could not note how far it is: %s", task.rank, error)

        return count

    def _emit(self, point: str, num_bytes: int = 0) -> None:
        self._send(Happened(point, num_bytes))

    def _check_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    # -----------------------------------------------------------------------------------------
    # Waiting for each other
    # -----------------------------------------------------------------------------------------

    def _wait_for_parts(self) -> None:
        """Rank 0: wait for the parts of all ranks."""
        task = self.task
        missing = list(range(task.num_ranks))
        next_report = task.report_seconds
        for waited in self._looks(schedule_of_coordinator(task.num_ranks)):
            self._check_given_up()
            missing = self._status.missing_parts(missing)
            if not missing:
                return
            if waited > task.deadline:
                how_far = self._status.describe_progress(missing)
                what = f"ranks {missing} to finish their files ({how_far})"
                raise self._too_late(waited, what)
            if waited >= next_report:
                next_report = waited + task.report_seconds
                how_far = self._status.describe_progress(missing)
                text = "the save to %s waits since %.0f s for %d of %d ranks; %s"
                url, num_missing = self._storage.url, len(missing)
                _LOGGER.warning(text, url, waited, num_missing, task.num_ranks, how_far)

    def _wait_for_end(self) -> None:
        """Other ranks: wait until the save is committed or given up."""
        task = self.task
        is_told = False
        for waited in self._looks(schedule_of_waiting(task.rank, task.num_ranks)):
            if self._status.is_committed():
                with suppress(StorageError):  # the checkpoint is there
                    self._status.clear(task.num_ranks)
                return
            failure = self._status.failure_of_save()
            if failure is not None:
                raise failure
            if waited > task.deadline + GRACE_SECONDS:
                raise self._too_late(waited, "rank 0 to commit")
            if self._given_up is not None and not is_told:
                is_told = True
                self._status.put_failure(self._given_up)

    def _looks(self, schedule: Schedule) -> Iterator[float]:
        """Wait for the next look at the storage; one comes at once after `Cancel`."""
        started = time.monotonic()
        pause = schedule.first
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            waited = time.monotonic() - started
            yield waited
            pause = schedule.pause(waited)

    def _too_late(self, waited: float, what: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self.task.rank} waited {waited:.0f} s for {what} in the save to "
            f"{self._storage.url}. Look for the first rank that died or stopped; the previous "
            "checkpoint is untouched."
        )

    # -----------------------------------------------------------------------------------------
    # Failing
    # -----------------------------------------------------------------------------------------

    def _abandon(self, error: BaseException) -> BaseException:
        """Rank 0, before the commit: tell all ranks and remove the files.

        The failure comes first, so that a rank whose directory goes away finds out why. On a full
        disk there is room for it only afterwards.
        """
        try:
            self._status.put_failure(error)
            is_told = True
        except StorageError:
            is_told = False
        save = self.task.global_plan
        assert save is not None
        give_up(self._storage, save, keep=self._status.end_path)
        return error if is_told else self._status.report(error)

    def _report(self, error: BaseException) -> BaseException:
        """Another rank: tell rank 0 why it has failed; the error that is the cause.

        If rank 0 has given the save up, its reason is: files that it has removed are no cause.
        """
        if isinstance(error, StorageError):
            try:
                failure = self._status.failure_of_save()
            except StorageError:
                failure = None  # the error of this rank says what is wrong with the storage
            if failure is not None:
                failure.__cause__ = error
                return failure
        return self._status.report(error)
