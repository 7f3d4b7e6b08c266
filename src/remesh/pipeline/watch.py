"""Reading in a thread of its own, so that somebody has an eye on the clock.

The caller's thread does what is collective. While a rank reads, its main thread waits, and once in
a while the ranks tell each other how far they are: whoever has ended says so at once and waits for
the others, who answer at the next interval at the latest. So nobody is ever delayed, a fast load
costs one small message, and of a slow one rank 0 logs which rank the others wait for. The same
messages carry the news that time is up, so that all ranks give up together.

A rank that gives up does not wait for its reading threads, which may hang in a system call. Each of
them ends with the run that it is reading. They write into the tensors of the caller only through a
`WriteGate`, which is closed before the call ends, whatever ends it: the time limit, Ctrl-C, or the
failure of another rank. Afterwards the tensors are the caller's again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from remesh.errors import ExchangeError
from remesh.exchange import Exchange

_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a load may take.

    Attributes:
        interval: Seconds after which, again and again, the slowest rank is logged.
        timeout: Seconds after which reading gives up; None for never.
    """

    interval: float = 30.0
    timeout: float | None = None


class GivenUpError(Exception):
    """Ends a thread whose work is not needed any more; it is raised and caught in that thread."""


class WriteGate:
    """Lets threads write into memory of the caller, until it is closed.

    A thread enters the gate as a context for each copy. Many threads may be inside at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise GivenUpError
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


class Reading:
    """A reading in a thread.

    Args:
        read: Reads; given what to call after each run with its size in bytes.
        on_run: Is told of each run too.
        num_bytes: How much is going to be read.
        patience: How long that may take.

    Attributes:
        gate: What `read` enters whenever it writes into memory of the caller.
        error: What ended it, if it failed.
    """

    def __init__(
        self,
        read: Callable[[Callable[[int], None]], None],
        on_run: Callable[[int], None],
        *,
        num_bytes: int,
        patience: Patience,
    ) -> None:
        self._read = read
        self._on_run = on_run
        self._num_bytes = num_bytes
        self._patience = patience
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._num_read = 0
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
        """Whether time is up."""
        timeout = self._patience.timeout
        return timeout is not None and self.seconds >= timeout

    def next_wait(self) -> float:
        """Seconds until something is to be logged or time is up."""
        timeout = self._patience.timeout
        if timeout is None:
            return self._patience.interval
        return max(min(self._patience.interval, timeout - self.seconds), 0.0)

    def too_late(self, who: str) -> ExchangeError:
        """The error of ranks that are late."""
        return ExchangeError(
            f"{who} did not finish reading within {self._patience.timeout:g} s; see whether the "
            "storage answers there, or raise the timeout"
        )

    def wait_for_all(self, exchange: Exchange) -> None:
        """Wait until every rank has read, whether well or not. Collective.

        Raises:
            ExchangeError: If time is up; it names the ranks that have not finished.
        """
        while True:
            self._finished.wait(self.next_wait())
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
            if exchange.rank == 0:
                self._log_slowest(told, slow)

    def _log_slowest(self, told: list[tuple[bool, bool, int, int]], slow: list[int]) -> None:
        slowest = min(slow, key=lambda rank: told[rank][2] / max(told[rank][3], 1))
        _, _, num_read, num_bytes = told[slowest]
        _LOGGER.warning(
            "reading for %.0f s; %d of %d ranks have not finished, the slowest is rank %d with "
            "%.1f of %.1f MB",
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
        except GivenUpError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self.error = error
        finally:
            self._finished.set()

    def _count(self, size: int) -> None:
        if self.gate.is_closed:
            raise GivenUpError
        with self._lock:
            self._num_read += size
        self._on_run(size)
