"""A request that is much slower than the others is sent again, and the first answer counts.

One request in a thousand that takes a minute makes every load of a thousand requests take a minute
(J. Dean, L. A. Barroso: The tail at scale, 2013). Requests that read may be sent twice. The second
one costs, and where all requests are slow it makes them slower: so it is sent late, and few of them
are.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FACTOR = 5.0
"""A request is slow if it takes this many times the median of the last ones."""

MIN_SECONDS = 1.0
"""No request is slow before."""

FIRST_SECONDS = 10.0
"""When a request is slow while nothing is known about others."""

SHARE = 0.05
"""Which part of all requests are sent again at most."""

_NUM_KEPT = 64

_Answer = TypeVar("_Answer")


class _KeptLoop:
    """An event loop that is closed when its thread has ended."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        self.loop.close()


class Hedge:
    """How long requests took, and how many were sent again; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_requests = 0
        self._of_thread = threading.local()
        self.num_repeated = 0

    def run(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Send a request, and again if it is slow; the answer that comes first.

        Args:
            ask: Sends it. It is cancelled if the other one is answered.

        Raises:
            Exception: What the request raised that failed last.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if threading.current_thread() is threading.main_thread():
                return asyncio.run(self._first(ask))  # which ends well on Ctrl-C
            return self._loop().run_until_complete(self._first(ask))
        # Notebooks run the caller in an event loop, which cannot run another one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._first(ask)).result()

    def patience(self) -> float:
        """Seconds after which a request that has no answer is slow."""
        with self._lock:
            if not self._seconds:
                return FIRST_SECONDS
            return max(MIN_SECONDS, FACTOR * statistics.median(self._seconds))

    def may_repeat(self) -> bool:
        """Whether one more request may be sent again; then it counts as sent."""
        with self._lock:
            if self.num_repeated >= 1 + SHARE * self._num_requests:
                return False
            self.num_repeated += 1
            return True

    def note(self, seconds: float) -> None:
        """Take note of a request that was answered."""
        with self._lock:
            self._num_requests += 1
            self._seconds.append(seconds)

    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of this thread: to make one takes as long as much of a request."""
        kept: _KeptLoop | None = getattr(self._of_thread, "kept", None)
        if kept is None:
            kept = self._of_thread.kept = _KeptLoop()
        return kept.loop

    async def _first(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        started = time.monotonic()
        done, pending = await asyncio.wait({asyncio.ensure_future(ask())}, timeout=self.patience())
        if pending and self.may_repeat():
            pending.add(asyncio.ensure_future(ask()))
        while pending and all(one.exception() for one in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in pending:
            one.cancel()
        if pending:  # to wait even for nothing takes a turn of the loop
            await asyncio.gather(*pending, return_exceptions=True)
        self.note(time.monotonic() - started)
        return min(done, key=lambda one: one.exception() is not None).result()
