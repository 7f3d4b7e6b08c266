"""Saving beside the training: `Saver` keeps what is worth keeping between saves.

An asynchronous save has a foreground and a background.

* Foreground, collective: the ranks agree on who writes what, and each copies its share into its
  arena. Then `save_async` returns and the trainer may change everything.
* Background, on each rank alone: threads write the arena's chunks, make the file durable and put
  the rank's *part* (positions and digests) beside it. Rank 0's thread waits until it sees all
  parts, and commits. The other ranks wait until they see the commit record. No collective is used,
  so the training's own are never disturbed; ranks find each other through the storage that they
  write to anyway.

A rank that fails puts a note in place of its part. Rank 0 then gives the save up and puts the note
that tells every rank why. Whoever waits longer than `deadline` without seeing the end fails by
itself. A failure is raised by `wait` of the handle or by the saver's next save or `close`, on
every rank, and never touches the previous checkpoint.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from remesh.checkpoint.agreement import Agreement, PlanCache, SaveOptions, agree
from remesh.checkpoint.board import Board
from remesh.checkpoint.commit import commit, remove_files
from remesh.checkpoint.local import describe_local, exchange_of, tensors_to_store
from remesh.checkpoint.saving import part_of, save_agreed
from remesh.checkpoint.stopwatch import timed
from remesh.errors import ExchangeError, StorageError
from remesh.events import Emit, OnEvent, emitter, ignore
from remesh.pipeline.arena import Arena
from remesh.pipeline.stage import StagedFile
from remesh.pipeline.write import CHUNK_SIZE
from remesh.run_info import run_info
from remesh.storage import Storage, open_storage

POLL_SECONDS = (0.02, 1.0)
"""Shortest and longest time between two looks at the storage."""

ARENA_SHARE = 0.5
"""Part of the free host memory that the arenas of a machine take at most, if nothing is said."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank's part of a save is.

    Attributes:
        num_bytes: Bytes that this rank writes.
        staged_bytes: Bytes that are copied out of the trainer's memory.
        written_bytes: Bytes that are written.
        phase: `staging`, `writing`, `committing`, `done` or `failed`.
    """

    num_bytes: int
    staged_bytes: int
    written_bytes: int
    phase: str


class _Status:
    """How a save stands on this rank; written by its background, read through its handle."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self.url = url
        self.num_bytes = num_bytes
        self.staged = threading.Event()
        self.ended = threading.Event()
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._staged_bytes = 0
        self._written_bytes = 0
        self._phase = "staging"

    def count(self, *, staged: int = 0, written: int = 0) -> None:
        with self._lock:
            self._staged_bytes += staged
            self._written_bytes += written

    def enter(self, phase: str) -> None:
        with self._lock:
            self._phase = phase

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self.enter("done" if error is None else "failed")
        self.ended.set()

    def progress(self) -> Progress:
        with self._lock:
            return Progress(self.num_bytes, self._staged_bytes, self._written_bytes, self._phase)


class SaveHandle:
    """A save that is under way; made by `Saver.save_async`."""

    def __init__(self, status: _Status, cancel: Callable[[], None]) -> None:
        self._status = status
        self._cancel = cancel

    def __repr__(self) -> str:
        return f"SaveHandle({self._status.url!r}, {self.progress().phase})"

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the trainer may change its state; False if `timeout` seconds pass before."""
        return self._status.staged.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed and durable.

        Raises:
            TimeoutError: If `timeout` seconds pass before.
            concurrent.futures.CancelledError: If the save was cancelled on this rank.
            RemeshError: Why it failed; the previous checkpoint is untouched.
        """
        if not self._status.ended.wait(timeout):
            raise TimeoutError(f"the save to {self._status.url} has not ended: {self.progress()}")
        if self._status.error is not None:
            raise self._status.error

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._status.ended.is_set()

    def exception(self) -> BaseException | None:
        """Why the save failed, or None if it has not ended or ended well."""
        return self._status.error

    def cancel(self) -> bool:
        """Give the save up on all ranks, unless it has ended; returns whether it had not.

        The save may still be committed if every rank had finished its part by then.
        """
        if self._status.ended.is_set():
            return False
        self._cancel()
        return True

    def progress(self) -> Progress:
        """How far this rank's part is."""
        return self._status.progress()


class Saver:
    """Saves a job's state again and again, beside the training.

    It keeps host memory for staging and the plan of the last layout. At most one save is in flight:
    a new one first waits for the one before, and raises its failure.

    Args:
        group: See `remesh.save`.
        arena_bytes: Host memory for staging on this rank; by default as much as its share of the
            state, but all ranks of a machine together at most half of the memory that is free.
            With less than the rank's share, staging waits for the disk.
        deadline: Seconds without the end of a save in sight after which its background gives up.
        at_exit: What happens to a save in flight if the interpreter ends without `close`: it waits
            for its end, or aborts it.
        on_event: See `remesh.save`. Also called from background threads.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        arena_bytes: int | None = None,
        deadline: float = 1800.0,
        at_exit: Literal["wait", "abort"] = "wait",
        on_event: OnEvent = ignore,
    ) -> None:
        self._group = group
        self._arena_bytes = arena_bytes
        self._deadline = deadline
        self._at_exit = at_exit
        self._on_event = on_event
        self._arena = Arena(arena_bytes or CHUNK_SIZE, CHUNK_SIZE)
        self._cache = PlanCache()
        self._current: SaveHandle | None = None
        self._warming: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The error on its way out matters more than how the last save ends.
            with suppress(Exception):
                self.close()

    @property
    def num_plans_reused(self) -> int:
        """How many saves used the plan of an earlier one."""
        return self._cache.hits

    @property
    def num_arena_bytes(self) -> int:
        """Host memory that is allocated for staging on this rank."""
        return self._arena.num_bytes

    def warm(self, state: Any) -> None:
        """Get the memory that saving `state` needs ready, in the background. Not collective.

        Call it when the state has its final size and the first steps run; the first save then
        finds memory that is touched already.
        """
        num_bytes = int(tensors_to_store(describe_local(state)).boxes.num_bytes.sum())
        self._set_budget(num_bytes + CHUNK_SIZE)
        self._warming = threading.Thread(
            target=self._arena.warm, args=(num_bytes,), name="remesh-warm", daemon=True
        )
        self._warming.start()

    def save(
        self,
        state: Any,
        path: Any,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Like `remesh.save`, with the plan of earlier saves. Collective."""
        self.wait()
        options = SaveOptions(overwrite, dict(metadata or {}))
        save_agreed(
            state,
            path,
            options,
            group=self._group,
            cache=self._cache,
            on_event=self._on_event,
        )

    def save_async(
        self,
        state: Any,
        path: Any,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Save beside the training. Collective until it returns.

        Returns when the state is staged: it may be changed from then on. What fails before is
        raised here, on every rank; what fails afterwards by the handle's `wait`, or by the next
        call of `save`, `save_async`, `wait` or `close`.

        Args are those of `remesh.save`.

        Raises:
            RemeshError: As `remesh.save`; also why the save before this one failed.
        """
        self.wait()
        exchange = exchange_of(self._group)
        storage = open_storage(path)
        emit = timed(emitter(self._on_event, exchange.rank), "save", exchange.rank, storage.url)
        options = SaveOptions(overwrite, dict(metadata or {}))
        mine = agree(exchange, storage, state, options, cache=self._cache, emit=emit)
        self._set_budget(mine.layout.num_bytes)
        background = _Background(
            storage,
            mine,
            self._arena,
            rank=exchange.rank,
            num_ranks=exchange.world_size,
            deadline=self._deadline,
            emit=emit,
        )
        self._current = background.handle
        daemon = self._at_exit == "abort"
        threading.Thread(target=background.run, name="remesh-save", daemon=daemon).start()
        background.stage()
        return background.handle

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, and raise its failure, once."""
        current, self._current = self._current, None
        if current is not None:
            current.wait()

    def close(self) -> None:
        """Wait for the save in flight and give memory back. Raises its failure."""
        try:
            self.wait()
        finally:
            if self._warming is not None:
                self._warming.join()
            self._arena = Arena(CHUNK_SIZE, CHUNK_SIZE)

    def _set_budget(self, num_bytes: int) -> None:
        """Let the arena hold a rank's share, if the machine has room for it."""
        if self._arena_bytes is None:
            rounded = -(-num_bytes // CHUNK_SIZE) * CHUNK_SIZE
            self._arena.grow(min(rounded, self._arena.budget + free_host_bytes()))


def free_host_bytes() -> int:
    """Host memory that this rank may take for staging."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages * ARENA_SHARE) // max(run_info().local_world_size, 1)


class _Background:
    """What happens to one save on one rank after the ranks have agreed."""

    def __init__(
        self,
        storage: Storage,
        mine: Agreement,
        arena: Arena,
        *,
        rank: int,
        num_ranks: int,
        deadline: float,
        emit: Emit,
    ) -> None:
        self._storage = storage
        self._mine = mine
        self._rank = rank
        self._num_ranks = num_ranks
        self._deadline = deadline
        self._emit = emit
        self._board = Board(storage, mine.save_id)
        self._staged = StagedFile(mine.layout, arena)
        self._status = _Status(storage.url, mine.layout.num_bytes if mine.path else 0)
        self._staging_error: Exception | None = None
        self.handle = SaveHandle(self._status, self._cancel)

    def _cancel(self) -> None:
        self._status.cancelled.set()
        self._staged.cancel()

    def stage(self) -> None:
        """Copy this rank's share out of the trainer's memory. A failure is kept for `run`."""

        def count(size: int) -> None:
            self._status.count(staged=size)
            self._emit("save.chunk_staged", size)

        try:
            if self._mine.path:
                self._staged.stage(count)
            self._emit("save.staged", self._status.num_bytes)
        except Exception as error:  # noqa: BLE001 - every rank raises it when it waits
            self._staging_error = error
        finally:
            self._status.enter("writing")
            self._status.staged.set()

    def run(self) -> None:
        """Write, and see the save through to its end."""
        error: BaseException | None = None
        try:
            self._write()
            self._status.enter("committing")
            if self._rank == 0:
                self._coordinate()
            else:
                self._wait_for_end()
            self._emit("save.done")
        except BaseException as caught:  # noqa: BLE001 - raised by whoever waits
            error = caught
        self._status.end(error)

    def _write(self) -> None:
        """Write this rank's file and put its part, or put why that failed."""
        mine = self._mine

        def count(size: int) -> None:
            self._status.count(written=size)
            self._emit("save.chunk_written", size)

        try:
            written = None
            if mine.path:
                self._emit("save.file_created", mine.layout.num_bytes)
                written = self._staged.write(self._storage, mine.path, count)
            self._status.staged.wait()
            if self._staging_error is not None:
                raise self._staging_error
            self._check_cancelled()
            if written is not None:
                self._storage.sync()
                self._emit("save.file_finished", mine.layout.num_bytes)
                self._board.put_part(self._rank, part_of(mine, written))
        except BaseException as error:
            if self._rank == 0:
                self._give_up(error)
            else:
                self._tell(self._board.put_failure, error)
            raise

    def _check_cancelled(self) -> None:
        if self._status.cancelled.is_set():
            raise CancelledError(f"the save to {self._storage.url} was cancelled")

    def _coordinate(self) -> None:
        """Rank 0: wait for all parts and commit, or give up for all."""
        save = self._mine.coordinator
        writers = [rank for rank, rows in enumerate(save.assignments) if len(rows)]
        missing = writers
        try:
            for waited in self._looks():
                self._check_cancelled()
                missing = self._board.missing_parts(missing)
                if not missing:
                    break
                if waited > self._deadline:
                    raise self._too_late(waited, f"ranks {missing} to finish their files")
        except BaseException as error:
            self._give_up(error)
            raise
        try:
            commit(self._storage, save, self._board.parts(self._num_ranks), self._emit)
        except BaseException as error:
            # The files stay where they are unless `commit` has removed them: see there.
            self._tell(self._board.put_end, error)
            raise
        self._board.clear()

    def _wait_for_end(self) -> None:
        """Other ranks: wait until the save is committed or given up."""
        told = False
        for waited in self._looks():
            if self._board.is_committed():
                return
            failure = self._board.end()
            if failure is not None:
                raise failure
            if waited > self._deadline:
                raise self._too_late(waited, "rank 0 to commit")
            if self._status.cancelled.is_set() and not told:
                told = True
                self._board.put_failure(self._rank, CancelledError("cancelled"))

    def _looks(self) -> Iterator[float]:
        """Moments at which to look at the storage, ever further apart; seconds since the first."""
        started = time.monotonic()
        pause, longest = POLL_SECONDS
        while True:
            yield time.monotonic() - started
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _too_late(self, waited: float, what: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self._rank} waited {waited:.0f} s for {what} in the save to "
            f"{self._storage.url}. Look for the first rank that died or stopped; the previous "
            "checkpoint is untouched."
        )

    def _give_up(self, error: BaseException) -> None:
        """Rank 0, before the commit: remove the files and tell everybody."""
        remove_files(self._storage, self._mine.save_id)
        self._tell(self._board.put_end, error)

    def _tell(self, put: Callable[[int, BaseException], None], error: BaseException) -> None:
        """Leave a note of a failure, if the storage still takes one; the failure is raised."""
        try:
            put(self._rank, error)
        except StorageError as also:
            error.add_note(f"The other ranks could not be told: {also}")


@functools.cache
def _saver_of_this_process() -> Saver:
    """What `save_async` keeps between calls: the one object that this process shares."""
    return Saver()


def save_async(
    state: Any,
    path: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> SaveHandle:
    """Save beside the training, with torch's default group if it is initialised.

    A convenience for scripts: the same as `save_async` of one `Saver` that lives as long as the
    process. Whoever wants to choose the group, the memory or what happens at exit makes a `Saver`.

    Args and errors are those of `Saver.save_async`.
    """
    return _saver_of_this_process().save_async(state, path, overwrite=overwrite, metadata=metadata)
