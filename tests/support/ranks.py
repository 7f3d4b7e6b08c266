"""Playing the ranks of a job as threads of this process.

Fast, debuggable, and enough for whatever does not need torch's own process groups. The ranks talk
through a `ThreadGroup`. When a rank's function ends, in whatever way, the group is aborted: by
then every other rank has all that it needs from it, unless it would wait for it for ever.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from remesh.exchange import ThreadGroup
from tests.support.outcomes import Outcome, Raised, Returned, TimedOut, returned_values

T = TypeVar("T")


def run_ranks(
    world_size: int, fn: Callable[..., T], *args: object, timeout: float = 240.0
) -> list[T]:
    """Run a function once for each rank, in threads; what it returned, in rank order.

    It is called as `fn(exchange, *args)`, the exchange being a `ThreadExchange`, with the same
    objects on every rank. The timeout, in seconds, is that of the whole job. See `returned_values`
    for what it raises.
    """
    return returned_values(run_ranks_outcomes(world_size, fn, *args, timeout=timeout))


def run_ranks_outcomes(
    world_size: int, fn: Callable[..., T], *args: object, timeout: float = 240.0
) -> list[Outcome[T]]:
    """Like `run_ranks`, but return how each rank ended."""
    group = ThreadGroup(world_size, timeout=timeout)
    outcomes: dict[int, Outcome[T]] = {}

    def play(rank: int) -> None:
        try:
            outcomes[rank] = Returned(fn(group.exchange(rank), *args))
            group.abort(f"rank {rank} has returned")
        except BaseException as error:  # noqa: BLE001 - it is the outcome of this rank
            outcomes[rank] = Raised(error, traceback.format_exc())
            group.abort(f"rank {rank} raised {type(error).__name__}: {error}")

    # Daemons, so that a rank that never ends does not keep the test run from ending.
    threads = [
        threading.Thread(target=play, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    group.abort(f"the ranks did not end within {timeout:g} seconds")
    return [
        outcomes[rank] if rank in outcomes else TimedOut(timeout, _where(thread))
        for rank, thread in enumerate(threads)
    ]


def _where(thread: threading.Thread) -> str:
    """The stack of a thread at this moment."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    return "" if frame is None else "".join(traceback.format_stack(frame))
