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

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.errors import ExchangeError
from remesh.exchange.lateness import LateError, Limits, Marks, SlowCall, describe_absent
from remesh.exchange.protocol import Buffers, Exchange

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
        self._limits = Limits(timeout, warn_after)
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
                else:
                    self._wait(meeting, rank)
            if not meeting.complete:
                raise ExchangeError(f"{operation} failed on rank {rank}: {self._failure}")
        return [meeting.contributions[index] for index in range(self.world_size)]

    def _wait(self, meeting: _Meeting, rank: int) -> None:
        """Wait until a meeting has ended, well or not."""
        waiting = _Waiting(meeting, rank, self.world_size)
        awaited = range(self.world_size)
        call = SlowCall(meeting.operations[rank], waiting, awaited, self._limits)
        began = time.monotonic()
        try:
            while not self._condition.wait_for(
                lambda: meeting.complete or self._failure is not None,
                call.look(time.monotonic() - began),
            ):
                pass
        except LateError as error:
            self._failure = f"{error}; see what they wait for"
            self._condition.notify_all()

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


class _Waiting(Marks):
    """The ranks that wait, as the meeting itself shows them."""

    def __init__(self, meeting: _Meeting, rank: int, world_size: int) -> None:
        super().__init__(None, rank, range(world_size))
        self._meeting = meeting

    def take_turn(self) -> bool:
        return self.rank == min(self._meeting.operations)

    def describe_absent(self, awaited: Sequence[int]) -> str:
        absent = sorted({*awaited} - {*self._meeting.operations})
        return describe_absent(absent, self.global_ranks)


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
