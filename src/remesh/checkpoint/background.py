"""What happens to a save on one rank after the ranks have agreed, in a thread or another process.

A rank writes the chunks that its stager hands over, makes the file durable and puts its *part*
(positions and digests) beside it; a rank that writes no file puts an empty part when it has staged
its state. Rank 0 waits until it sees the parts of all ranks, and commits. The other ranks wait
until they see the commit record. No collective is used; ranks find each other through the storage
that they write to anyway (`board`), and look at it as often as `polling` says.

A rank that fails puts a note in place of its part. Rank 0 then gives the save up and puts the note
that tells every rank why. A rank that waits longer than the deadline without seeing the end fails
by itself.

Nothing here knows of tensors or of the trainer, so that a process without torch can do it. A save
that takes long is reported: each rank notes now and then how far it is, and rank 0 logs who is
missing and who is slowest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass

from remesh.checkpoint import polling
from remesh.checkpoint.agreement import Coordination
from remesh.checkpoint.board import Board
from remesh.checkpoint.commit import commit, remove_files, write_beside
from remesh.checkpoint.saving import part_of
from remesh.errors import ExchangeError, StorageError
from remesh.events import Emit
from remesh.formats import native
from remesh.pipeline.stage import StagedWriter
from remesh.pipeline.write import ChunkWriter
from remesh.storage import Storage

_LOGGER = logging.getLogger("remesh")

GRACE_SECONDS = 2.0
"""How much longer other ranks wait than rank 0, which knows who is missing and says so."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one rank has to do.

    Attributes:
        storage: Where the save goes.
        save_id: Names the save.
        rank: This rank.
        num_ranks: Number of ranks.
        deadline: Seconds without the end of the save in sight after which it is given up.
        report_seconds: Seconds between two reports of a save that takes long.
        path: The data file that this rank writes; empty if it writes none.
        num_bytes: Its size.
        positions: The part's positions.
        coordination: On rank 0, what it knows of the save.
    """

    storage: Storage
    save_id: str
    rank: int
    num_ranks: int
    deadline: float
    report_seconds: float
    path: str
    num_bytes: int
    positions: bytes
    coordination: Coordination | None


class Background:
    """One save on one rank; `run` does it, the other methods are called meanwhile.

    Args:
        task: What to do.
        writer: Gets the chunks of the file.
        emit: Told of the moments of the save.
        stop_staging: Called if the file is given up; should make the stager end soon.
    """

    def __init__(
        self, task: Task, writer: StagedWriter, emit: Emit, stop_staging: Callable[[], None]
    ) -> None:
        self._task = task
        self._writer = writer
        self._emit = emit
        self._stop_staging = stop_staging
        self._board = Board(task.storage, task.save_id)
        self._staged = threading.Event()
        self._staging_error: BaseException | None = None
        self._given_up: BaseException | None = None
        self._wake = threading.Event()

    def end_staging(self, error: BaseException | None) -> None:
        """Say that all is staged, or why it is not."""
        self._staging_error = error
        self._writer.end()
        self._staged.set()

    def cancel(self, error: BaseException | None = None) -> None:
        """Give the save up, because the user wants it or because of an error elsewhere."""
        url = self._task.storage.url
        self._given_up = error or CancelledError(f"the save to {url} was cancelled")
        self._writer.cancel()
        self._stop_staging()
        self._wake.set()

    def run(self) -> BaseException | None:
        """Write, and see the save through to its end; returns why it failed, if it did."""
        is_first = self._task.rank == 0
        # How the other ranks learn of a failure of this one, wherever it arises.
        tell = self._give_up if is_first else self._tell_failure
        try:
            self._write()
            if is_first:
                self._wait_for_parts()
                # From here on the files stay where they are, unless `commit` removes them.
                tell = self._tell_end
                self._commit()
                tell = self._keep
                self._board.clear()
            else:
                tell = self._keep
                self._wait_for_end()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            return tell(error)
        return None

    def _write(self) -> None:
        """Write this rank's file and put its part."""
        task = self._task
        written = None
        if task.path:
            written = self._writer.write(
                self._create,
                self._counted(),
                self._stop_staging,
                self._write_beside,
            )
        else:
            self._write_beside()
        self._staged.wait()
        if self._staging_error is not None:
            raise self._staging_error
        self._check_given_up()
        part = native.NO_PART
        if written is not None:
            task.storage.sync()
            self._emit("save.file_finished", task.num_bytes)
            part = part_of(written, task.positions)
        self._board.put_part(task.rank, part)

    def _create(self) -> ChunkWriter:
        task = self._task
        self._emit("save.file_created", task.num_bytes)
        return ChunkWriter(task.storage, task.path, task.num_bytes)

    def _write_beside(self) -> None:
        write_beside(self._task.storage, self._task.coordination, self._emit)

    def _counted(self) -> Callable[[int], None]:
        """What is called after each chunk: tells of it, and notes now and then how far it is."""
        task = self._task
        lock = threading.Lock()
        done, next_note = 0, time.monotonic() + task.report_seconds

        def count(size: int) -> None:
            nonlocal done, next_note
            self._emit("save.chunk_written", size)
            # Notes are put under the lock, so that none overtakes a later one.
            with lock:
                done += size
                if time.monotonic() < next_note:
                    return
                next_note = time.monotonic() + task.report_seconds
                try:
                    self._board.put_progress(task.rank, done, task.num_bytes)
                except StorageError as error:
                    _LOGGER.warning("rank %d could not note how far it is: %s", task.rank, error)

        return count

    def _check_given_up(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def _wait_for_parts(self) -> None:
        """Rank 0: wait for the parts of all ranks."""
        task = self._task
        missing = list(range(task.num_ranks))
        next_report = task.report_seconds
        for waited in self._looks(polling.schedule_of_coordinator(task.num_ranks)):
            self._check_given_up()
            missing = self._board.missing_parts(missing)
            if not missing:
                return
            if waited > task.deadline:
                how_far = self._board.describe_progress(missing)
                what = f"ranks {missing} to finish their files ({how_far})"
                raise self._too_late(waited, what)
            if waited >= next_report:
                next_report = waited + task.report_seconds
                how_far = self._board.describe_progress(missing)
                text = "the save to %s waits since %.0f s for %d of %d ranks; %s"
                _LOGGER.warning(
                    text, task.storage.url, waited, len(missing), task.num_ranks, how_far
                )

    def _commit(self) -> None:
        """Rank 0: commit what all ranks have written."""
        task = self._task
        save = task.coordination
        assert save is not None
        commit(task.storage, save, self._board.parts(task.num_ranks), self._emit)

    def _wait_for_end(self) -> None:
        """Other ranks: wait until the save is committed or given up."""
        task = self._task
        told = False
        for waited in self._looks(polling.schedule_of_waiting(task.rank, task.num_ranks)):
            if self._board.is_committed():
                return
            failure = self._board.end()
            if failure is not None:
                raise failure
            if waited > task.deadline + GRACE_SECONDS:
                raise self._too_late(waited, "rank 0 to commit")
            if self._given_up is not None and not told:
                told = True
                self._board.put_failure(task.rank, self._given_up)

    def _looks(self, schedule: polling.Schedule) -> Iterator[float]:
        """Moments at which to look at the storage, one more after `cancel`; seconds since now."""
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
            f"rank {self._task.rank} waited {waited:.0f} s for {what} in the save to "
            f"{self._task.storage.url}. Look for the first rank that died or stopped; the previous "
            "checkpoint is untouched."
        )

    def _give_up(self, error: BaseException) -> BaseException:
        """Rank 0, before the commit: tell all ranks and remove the files.

        The note comes first, so that a rank whose directory goes away finds out why. On a full disk
        it finds room only afterwards.
        """
        storage, save_id = self._task.storage, self._task.save_id
        is_told = self._put(self._board.put_end, error) is None
        remove_files(storage, save_id, keep=self._board.end_path)
        return error if is_told else self._tell_end(error)

    def _tell_end(self, error: BaseException) -> BaseException:
        """Rank 0: tell all ranks why the save has failed, if the storage still takes a note."""
        return self._noted(error, self._put(self._board.put_end, error))

    def _tell_failure(self, error: BaseException) -> BaseException:
        """Another rank: tell rank 0 why it has failed; the error that is the cause.

        If rank 0 has given the save up, its reason is: files that it has removed are no cause.
        """
        if isinstance(error, StorageError):
            try:
                end = self._board.end()
            except StorageError:
                end = None  # the error of this rank says what is wrong with the storage
            if end is not None:
                end.__cause__ = error
                return end
        return self._noted(error, self._put(self._board.put_failure, error))

    def _keep(self, error: BaseException) -> BaseException:
        """When no rank waits for this one: a part is there, or the commit."""
        return error

    def _noted(self, error: BaseException, also: StorageError | None) -> BaseException:
        if also is not None:
            error.add_note(f"The other ranks could not be told: {also}")
        return error

    def _put(
        self, put: Callable[[int, BaseException], None], error: BaseException
    ) -> StorageError | None:
        """Leave a note; why not, if the storage refuses."""
        try:
            put(self._task.rank, error)
        except StorageError as also:
            return also
        return None


def bury(task: Task, error: BaseException) -> BaseException | None:
    """What a save has come to on this rank whose background died.

    The other ranks are told in its place. Files stay where they are, as after any death.

    Args:
        task: What it had to do.
        error: How it died.

    Returns:
        The error, or None if the checkpoint was committed before.
    """
    board = Board(task.storage, task.save_id)
    if board.is_committed():
        return None
    put = board.put_end if task.rank == 0 else board.put_failure
    try:
        put(task.rank, error)
    except StorageError as also:
        error.add_note(f"The other ranks could not be told: {also}")
    return error
