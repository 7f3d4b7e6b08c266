"""A read in a thread of its own, which the caller's thread watches together with the other ranks.

The caller's thread does what is collective. While a rank reads, its main thread waits, and once in
an interval the ranks tell each other how far they are: a rank that has ended says so at once and
waits for the others, which answer at the next interval at the latest. The interval is half as long
as a call of the exchange waits before it warns or fails, since to read for long is no failure. So
no rank is delayed, a fast load costs one small message, and of a slow one rank 0 logs which rank
the others wait for. The same messages say that the time is up, so that all ranks give up together.

A rank that gives up does not wait for its reading threads, which may hang in a system call. Each of
them ends with the run that it is reading. They write into the tensors of the caller only through a
`WriteGate`, which is closed before the call ends, whatever ends it: the time limit, Ctrl-C, or the
failure of another rank. Afterwards no thread of the call writes into the tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import msgspec

from remesh.errors import ExchangeError
from remesh.exchange import Exchange

LOG_INTERVAL = 30.0
"""Seconds after which, again and again, the slowest rank is logged."""

FIRST_MEETING = 8
"""Turns after which the ranks meet for the first time, which takes a second at 64 MB/s."""

_LOGGER = logging.getLogger("remesh")


class WriteGate:
    """Lets threads write into memory of the caller, until it is closed.

    A thread enters the gate as a context for each copy; `CancelledError` ends it if the gate is
    closed. Many threads may be inside at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._closed

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise CancelledError
            self._num_inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let no thread in any more, and wait until those that are inside have left.

        That takes as long as the copy of a run or message: some milliseconds.
        """
        self._closed = True  # first of all, so that Ctrl-C in the wait leaves it closed
        with self._changed:
            self._changed.wait_for(lambda: not self._num_inside)


class MonitoredRead:
    """A read in a thread; gives up after `timeout` seconds.

    Attributes:
        gate: What `read` enters whenever it writes into memory of the caller.
        error: What ended it, if it failed.
    """

    def __init__(
        self,
        read: Callable[[Callable[[int], None]], None],
        on_read: Callable[[int], None],
        *,
        num_bytes: int,
        timeout: float | None,
    ) -> None:
        self._read = read
        self._on_read = on_read
        self._num_bytes = num_bytes
        self._timeout = timeout
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._num_read = 0
        self._logged = 0.0
        self.gate = WriteGate()
        self._finished = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to read."""
        # A daemon, because a thread that hangs in a read must not keep the process from ending.
        threading.Thread(target=self._work, name="remesh-read", daemon=True).start()

    def give_up(self) -> None:
        """Read no more than is being read, and write nothing into memory of the caller any more."""
        self.gate.close()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    @property
    def is_late(self) -> bool:
        """True if time is up."""
        return self._timeout is not None and self.seconds >= self._timeout

    def next_wait(self) -> float:
        """Seconds until something is to be logged or time is up."""
        return self._at_most(LOG_INTERVAL)

    def _at_most(self, seconds: float) -> float:
        """Some seconds, or fewer if time is up before."""
        if self._timeout is None:
            return seconds
        return max(min(seconds, self._timeout - self.seconds), 0.0)

    def too_late(self, who: str) -> ExchangeError:
        """The error of ranks that are late."""
        limit = self.seconds if self._timeout is None else self._timeout
        return ExchangeError(
            f"{who} did not finish reading within {limit:g} s; see whether the storage answers "
            "there, or raise the timeout"
        )

    def wait_for_all(self, exchange: Exchange) -> None:
        """Wait until every rank has read, whether well or not. Collective.

        Raises:
            ExchangeError: If time is up; it names the ranks that have not finished.
        """
        interval = min(LOG_INTERVAL, exchange.patience / 2)
        while True:
            self._finished.wait(self._at_most(interval))
            message = (self._finished.is_set(), self.is_late, self._num_read, self._num_bytes)
            told = [
                msgspec.msgpack.decode(data, type=tuple[bool, bool, int, int])
                for data in exchange.all_gather(msgspec.msgpack.encode(message))
            ]
            slow = [rank for rank, (is_finished, *_) in enumerate(told) if not is_finished]
            if not slow:
                return
            if any(is_late for _, is_late, *_ in told):
                self.give_up()
                named = ", ".join(map(str, slow[:10])) + (", ..." if len(slow) > 10 else "")
                raise self.too_late(f"rank {named}" if len(slow) == 1 else f"ranks {named}")
            if exchange.rank == 0 and self.seconds >= self._logged + LOG_INTERVAL:
                self._logged = self.seconds
                self._log_slowest(told, slow)

    def _log_slowest(self, told: list[tuple[bool, bool, int, int]], slow: list[int]) -> None:
        slowest = min(slow, key=lambda rank: told[rank][2] / max(told[rank][3], 1))
        _, _, num_read, num_bytes = told[slowest]
        _LOGGER.warning(
            "reading for %.0f s; %d of %d ranks have not finished\n"
            "The slowest is rank %d with %.1f of %.1f MB",
            self.seconds,
            len(slow),
            len(told),
            slowest,
            num_read / 1e6,
            num_bytes / 1e6,
        )

    def _work(self) -> None:
        try:
            self._read(self._count)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            # A storage may raise the same; only of a read that was given up it is not an error.
            if not (isinstance(error, CancelledError) and self.gate.is_closed):
                self.error = error
        finally:
            self._finished.set()

    def _count(self, size: int) -> None:
        if self.gate.is_closed:
            raise CancelledError
        with self._lock:
            self._num_read += size
        self._on_read(size)


class Meetings:
    """Turns after which all ranks meet, so that none that is ahead waits long for the others.

    A rank without messages goes through the turns at once, and then waits for all ranks in a call
    that fails if they do not come in time. So they meet on the way, as often as those that are busy
    may let others wait.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._num_turns = self._next = FIRST_MEETING
        self._since = time.monotonic()

    def after(self, turn: int) -> None:
        """Meet if a turn was the last before a meeting. Collective."""
        if turn + 1 < self._next:
            return
        used = (time.monotonic() - self._since) / (self._exchange.patience / 2)
        told = self._exchange.all_gather(msgspec.msgpack.encode(used))
        most = max(msgspec.msgpack.decode(reply, type=float) for reply in told)
        # Turns may become slower, so the number of turns grows in steps.
        self._num_turns = max(int(self._num_turns / max(most, 1 / 4)), 1)
        self._next += self._num_turns
        self._since = time.monotonic()
