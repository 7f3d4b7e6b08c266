"""The tasks of a transfer, whose progress the ranks watch together.

The caller's thread does what is collective, and other threads perform the tasks of this rank. A
task for a turn writes when the buffer of an earlier turn is free, and is handed out no sooner,
unless tasks take ahead; a turn is sent when all its tasks are done.

While a rank waits, it and the others tell each other at times how far they are: at the end, where a
rank that has done its tasks says so at once and the others answer at the next interval at the
latest; and after some turns on the way, for a rank that has none of the messages of many turns goes
through them at once. The interval is half as long as a call of the exchange waits before it warns
or fails, since to work for long is no failure. So no rank is delayed, a fast load costs one small
message, and of a slow one rank 0 logs which rank the others wait for. The same messages say that
the time is up, so that all ranks give up together.

A rank that gives up does not wait for its threads, which may hang in a system call. Each of them
ends with the task that it performs. A thread enters `TaskPool.writing` for each copy into memory of
the caller, and that is closed before the call ends, whatever ends it: the time limit, Ctrl-C, or
the failure of another rank. Afterwards no thread of the call writes into the tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from remesh._repr import listed
from remesh.core.geometry import IntArray
from remesh.errors import ExchangeError
from remesh.exchange import Exchange
from remesh.pipeline.read import Place, Writing
from remesh.storage import Buffer, aligned_buffer

LOG_INTERVAL = 30.0
"""Seconds after which, again and again, the slowest rank is logged."""

FIRST_MEETING = 8
"""Turns after which the ranks meet for the first time, which takes a second at 64 MB/s."""

_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """How one rank takes the regions of a plan from its sources."""

    turn: IntArray
    """Turn of each task, ascending; from `TransferPlan.num_turns` on for this rank only."""
    num_bytes: int  # what all of them read
    num_threads: int  # threads that perform them; 0 if the caller's does
    buffer_bytes: int  # size of the buffer of each thread
    perform: Callable[[int, Buffer, Place, Writing], int]
    """Performs a task, given its number, the buffer, where regions go (`TransferPlan.taken`), and
    what to enter to write there; returns how much it read."""
    takes_ahead: bool = False
    """Whether tasks begin before what they write to is free, as many as there are threads."""


class DroppedError(Exception):
    """A task has become useless: another one has failed, or the call has ended."""


class TaskPool:
    """The tasks and turns of one rank; gives up after `timeout` seconds.

    There are `num_packed` buffers for what tasks write for others, each for a turn at a time.
    `on_read` is called after each task, in the thread that performed it, with what that read.

    Attributes:
        error: What ended the tasks, if they failed.
        has_failed: Whether a task has failed, or this rank has given up.
    """

    def __init__(
        self,
        exchange: Exchange,
        tasks: Tasks,
        num_turns: int = 0,
        num_packed: int = 0,
        *,
        on_read: Callable[[int], None],
        timeout: float | None = None,
    ) -> None:
        num_shared = int(np.searchsorted(tasks.turn, num_turns))
        self.error: BaseException | None = None
        self._exchange = exchange
        self._tasks = tasks
        self._turn = tasks.turn[:num_shared].tolist()
        self._left = np.bincount(tasks.turn[:num_shared], minlength=num_turns).tolist()
        self._next = 0
        self._for_this_rank = iter(range(num_shared, len(tasks.turn)))
        self._num_packed = num_packed
        self._num_free = 0
        self._num_read = 0
        self._on_read = on_read
        self._timeout = timeout
        self._num_inside = self._num_working = 0
        self.has_failed = self._is_closed = False
        self._changed = threading.Condition()
        self._started = self._met = time.monotonic()
        self._logged = 0.0
        self._between = self._next_meeting = FIRST_MEETING

    # -- the threads that perform tasks -------------------------------------------------------

    def start(self, place: Place) -> None:
        """Begin to perform the tasks; regions go to their places."""
        num_threads = min(self._tasks.num_threads, len(self._tasks.turn))
        for number in range(num_threads):
            # Daemons, because a thread that hangs in a read must not keep the process from ending.
            thread = threading.Thread(
                target=self._work, args=(place,), name="remesh-read", daemon=True
            )
            with self._changed:
                self._num_working += 1
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                # With fewer threads, fewer do the work.
                self._end_work(None if number else error)
                break

    def _work(self, place: Place) -> None:
        """Perform tasks until there is none left."""
        error: BaseException | None = None
        try:
            buffer = aligned_buffer(self._tasks.buffer_bytes)
            while (task := self._next_task()) is not None:
                with suppress(DroppedError):
                    size = self._tasks.perform(task, buffer, place, partial(self.writing, task))
                    self._has_read(task, size)
        except BaseException as caught:  # noqa: BLE001 - raised by the thread that waits
            error = caught
        self._end_work(error)

    def _end_work(self, error: BaseException | None) -> None:
        """One thread less works; after an error nothing needs the tasks that are left."""
        with self._changed:
            self._num_working -= 1
            if error is not None:
                self.error = self.error or error
                self.has_failed = True
            self._changed.notify_all()

    def _next_task(self) -> int | None:
        """The next task, or None if there is none left or a failure has made them useless."""
        with self._changed:
            while not self.has_failed:
                is_left = self._next < len(self._turn)
                if is_left and (self._tasks.takes_ahead or self._is_open(self._next)):
                    self._next += 1
                    return self._next - 1
                task = next(self._for_this_rank, None)
                if task is not None or not is_left:
                    return task
                self._changed.wait()
            return None

    def _has_read(self, task: int, size: int) -> None:
        """A task is done."""
        with self._changed:
            if self._is_closed:
                return
            self._num_read += size
        self._on_read(size)
        if task < len(self._turn):
            with self._changed:
                self._left[self._turn[task]] -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self, task: int | None = None) -> Iterator[None]:
        """Write into memory of the caller; for a task, when the buffer that it writes to is free.

        Raises DroppedError if that has become useless. Many threads may be inside at once.
        """
        with self._changed:
            if task is not None:
                self._changed.wait_for(lambda: self.has_failed or self._is_open(task))
            if self._is_closed or (task is not None and self.has_failed):
                raise DroppedError
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def _is_open(self, task: int) -> bool:
        """True if the buffer that a task writes to is free."""
        return task >= len(self._turn) or self._turn[task] < self._num_free + self._num_packed

    # -- the caller's thread ------------------------------------------------------------------

    def wait(self, turn: int) -> ExchangeError | None:
        """Wait until the tasks of a turn are done or have failed; the error if that is too late."""
        rank = self._exchange.rank
        while not self._wait_for(lambda: self.has_failed or not self._left[turn], LOG_INTERVAL):
            if self._is_late:
                self.fail()
                return self._too_late(f"rank {rank}")
            _LOGGER.warning(
                "reading for %.0f s; the others wait for rank %d, round %d of %d",
                self._seconds,
                rank,
                turn + 1,
                len(self._left),
            )
        return None

    def free(self, num_turns: int) -> None:
        """The buffers of the first turns are free."""
        with self._changed:
            self._num_free = num_turns
            self._changed.notify_all()

    def fail(self) -> None:
        """Hand out no more tasks, and let no turn wait for those that are not done."""
        with self._changed:
            self.has_failed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing write any more, and wait until what is being copied is: some milliseconds."""
        self.has_failed = self._is_closed = True  # first, so that Ctrl-C leaves it closed
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_inside)

    def meet_after(self, turn: int) -> None:
        """Meet the other ranks if a turn was the last before a meeting. Collective."""
        if turn + 1 < self._next_meeting:
            return
        used = (time.monotonic() - self._met) / (self._exchange.patience / 2)
        replies = self._exchange.all_gather(msgspec.msgpack.encode(used))
        most = max(msgspec.msgpack.decode(reply, type=float) for reply in replies)
        # Turns may become slower, so the number of turns grows in steps.
        self._between = max(int(self._between / max(most, 1 / 4)), 1)
        self._next_meeting += self._between
        self._met = time.monotonic()

    def wait_for_all(self) -> None:
        """Wait until every rank has done its tasks, whether well or not. Collective.

        Raises:
            ExchangeError: If time is up; it names the ranks that have not finished.
        """
        interval = min(LOG_INTERVAL, self._exchange.patience / 2)
        while True:
            is_finished = self._wait_for(lambda: not self._num_working, interval)
            message = (is_finished, self._is_late, self._num_read, self._tasks.num_bytes)
            replies = [
                msgspec.msgpack.decode(data, type=tuple[bool, bool, int, int])
                for data in self._exchange.all_gather(msgspec.msgpack.encode(message))
            ]
            slow = [rank for rank, (is_finished, *_) in enumerate(replies) if not is_finished]
            if not slow:
                return
            if any(is_late for _, is_late, *_ in replies):
                self.close()
                raise self._too_late(f"rank{'s' * (len(slow) > 1)} {listed(slow)}")
            if self._exchange.rank == 0 and self._seconds >= self._logged + LOG_INTERVAL:
                self._logged = self._seconds
                self._log_slowest(replies, slow)

    def _log_slowest(self, replies: list[tuple[bool, bool, int, int]], slow: list[int]) -> None:
        slowest = min(slow, key=lambda rank: replies[rank][2] / max(replies[rank][3], 1))
        _, _, num_read, num_bytes = replies[slowest]
        _LOGGER.warning(
            "reading for %.0f s; %d of %d ranks have not finished\n"
            "The slowest is rank %d with %.1f of %.1f MB",
            self._seconds,
            len(slow),
            len(replies),
            slowest,
            num_read / 1e6,
            num_bytes / 1e6,
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def _is_late(self) -> bool:
        return self._timeout is not None and self._seconds >= self._timeout

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, for some seconds or until time is up; whether it does."""
        if self._timeout is not None:
            seconds = max(min(seconds, self._timeout - self._seconds), 0.0)
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def _too_late(self, who: str) -> ExchangeError:
        """The error of ranks that are late."""
        limit = self._seconds if self._timeout is None else self._timeout
        return ExchangeError(
            f"{who} did not finish reading within {limit:g} s; see whether the storage answers "
            "there, or raise the timeout"
        )
