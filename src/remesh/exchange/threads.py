"""The exchange of ranks that are threads of one process.

All ranks share a `ThreadGroup`. A collective call is a *meeting*: each rank lays down what it
brings, and the last one to arrive closes the meeting, opens the next, and wakes the others, who
take what they need. Each meeting is an object of its own, so a fast rank that is already at the
next one does not disturb threads that still read.

A meeting that can no longer become complete must not hang: it fails on every rank that waits as
soon as the group is aborted, which a runner of rank-threads does when one of them ends, and
at the latest when the time is up. Before that, the lowest rank that waits warns of those that have
not come. Ranks that call different operations are told so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.errors import ExchangeError
from remesh.exchange.lateness import describe_absent
from remesh.exchange.protocol import Buffers, Exchange

_LOGGER = logging.getLogger("remesh")

_Contribution = list[bytes]


@dataclass(slots=True)
class _Meeting:
    operations: dict[int, str] = field(default_factory=dict)
    contributions: dict[int, _Contribution] = field(default_factory=dict)
    complete: bool = False


class ThreadGroup:
    """The state that the ranks of one group share.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for the others in one call.
        warn_after: Seconds after which one of the waiting ranks logs a warning with those that have
            not come; each next one comes after twice the time.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0, warn_after: float = 10.0) -> None:
        self.world_size = world_size
        self.patience = min(timeout, warn_after)
        self._timeout = timeout
        self._warn_after = warn_after
        self._condition = threading.Condition()
        self._meeting = _Meeting()
        self._failure: str | None = None

    def exchange(self, rank: int) -> ThreadExchange:
        """The exchange for the thread that is this rank."""
        assert 0 <= rank < self.world_size
        return ThreadExchange(self, rank)

    def abort(self, reason: str) -> None:
        """Fail all calls that wait and all that come; the first reason given is the one told."""
        with self._condition:
            self._failure = self._failure or reason
            self._condition.notify_all()

    def meet(self, rank: int, operation: str, contribution: _Contribution) -> list[_Contribution]:
        """Bring something to the next meeting; what all ranks brought, in rank order.

        Raises:
            ExchangeError: If the group is aborted, the time is up, or the ranks do not all call
                the same operation.
        """
        with self._condition:
            meeting = self._meeting
            if self._failure is None:
                meeting.operations[rank] = operation
                meeting.contributions[rank] = contribution
                if len(meeting.operations) == self.world_size:
                    self._close(meeting)
                elif not self._wait(meeting, rank):
                    self._failure = self._describe_absence(meeting)
                    self._condition.notify_all()
            if not meeting.complete:
                raise ExchangeError(f"{operation} failed on rank {rank}: {self._failure}")
        return [meeting.contributions[index] for index in range(self.world_size)]

    def _wait(self, meeting: _Meeting, rank: int) -> bool:
        """Wait until a meeting has ended, well or not; False if the time is up before."""
        began = time.monotonic()
        waited, next_warning = 0.0, self._warn_after
        while waited < self._timeout:
            if self._condition.wait_for(
                lambda: meeting.complete or self._failure is not None,
                min(self._timeout, next_warning) - waited,
            ):
                return True
            waited = time.monotonic() - began
            if waited >= next_warning:
                next_warning = 2 * waited
                if rank == min(meeting.operations):
                    self._warn(meeting, rank, waited)
        return False

    def _warn(self, meeting: _Meeting, rank: int, waited: float) -> None:
        _LOGGER.warning(
            "%s on rank %d has waited %.0f s: %s\n"
            "Every rank must make this call (it fails after %g s)",
            meeting.operations[rank],
            rank,
            waited,
            describe_absent(self._absent_from(meeting), range(self.world_size)),
            self._timeout,
        )

    def _absent_from(self, meeting: _Meeting) -> list[int]:
        return sorted(set(range(self.world_size)) - set(meeting.operations))

    def _close(self, meeting: _Meeting) -> None:
        if len(set(meeting.operations.values())) > 1:
            calls = ", ".join(f"rank {r}: {name}" for r, name in sorted(meeting.operations.items()))
            self._failure = (
                f"the ranks call different operations ({calls}); every rank must make the same "
                "calls in the same order"
            )
        else:
            meeting.complete = True
            self._meeting = _Meeting()
        self._condition.notify_all()

    def _describe_absence(self, meeting: _Meeting) -> str:
        return (
            f"ranks {self._absent_from(meeting)} did not come within {self._timeout:g} seconds; "
            "see what they wait for"
        )


class ThreadExchange(Exchange):
    """One rank's end of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self.patience = group.patience
        self._group = group

    def all_gather(self, data: bytes) -> list[bytes]:
        return [item for [item] in self._group.meet(self.rank, "all-gather", [data])]

    def gather(self, data: bytes) -> list[bytes] | None:
        items = [item for [item] in self._group.meet(self.rank, "gather", [data])]
        return items if self.rank == 0 else None

    def scatter(self, data: list[bytes] | None) -> bytes:
        assert (data is not None) == (self.rank == 0)
        assert data is None or len(data) == self.world_size
        return self._group.meet(self.rank, "scatter", data or [])[0][self.rank]

    def broadcast(self, data: bytes | None) -> bytes:
        assert (data is not None) == (self.rank == 0)
        return self._group.meet(self.rank, "broadcast", [] if data is None else [data])[0][0]

    def swap(self, outgoing: Sequence[Buffers], incoming: Sequence[Buffers]) -> None:
        assert len(outgoing) == len(incoming) == self.world_size
        # Copies, because a rank that has what it came for may change its buffers.
        joined = [b"".join(map(bytes, buffers)) for buffers in outgoing]
        for rank, items in enumerate(self._group.meet(self.rank, "swap", joined)):
            start = 0
            for buffer in incoming[rank]:
                buffer[:] = np.frombuffer(items[self.rank], np.uint8, len(buffer), start)
                start += len(buffer)
