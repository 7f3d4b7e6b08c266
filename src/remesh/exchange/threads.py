"""The exchange of ranks that are threads of one process.

All ranks share a `ThreadGroup`. A collective call is a *meeting*: each rank lays down what it
brings, and the last one to arrive closes the meeting, opens the next, and wakes the others, who
take what they need. Each meeting is an object of its own, so a fast rank that is already at the
next one disturbs nobody who still reads.

A meeting that can no longer become complete must not hang: it fails on every rank that waits as
soon as somebody aborts the group, which a runner of rank-threads does when one of them ends, and
at the latest when the time is up. Ranks that call different operations are told so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.errors import ExchangeError
from remesh.exchange.protocol import Bytes

_Contribution = list[bytes]


@dataclass(slots=True)
class _Meeting:
    operations: dict[int, str] = field(default_factory=dict)
    contributions: dict[int, _Contribution] = field(default_factory=dict)
    complete: bool = False


class ThreadGroup:
    """What the ranks of one group share.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for the others in one call.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self._timeout = timeout
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
        """Bring something to the next meeting; what everybody brought, in rank order.

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
                elif not self._condition.wait_for(
                    lambda: meeting.complete or self._failure is not None, self._timeout
                ):
                    self._failure = self._describe_absence(meeting)
                    self._condition.notify_all()
            if not meeting.complete:
                raise ExchangeError(f"{operation} failed on rank {rank}: {self._failure}")
        return [meeting.contributions[index] for index in range(self.world_size)]

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
        absent = sorted(set(range(self.world_size)) - set(meeting.operations))
        return (
            f"ranks {absent} did not come within {self._timeout:g} seconds; see what they wait for"
        )


class ThreadExchange:
    """One rank's end of a `ThreadGroup`.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Exchange.all_gather`."""
        return [item for [item] in self._group.meet(self.rank, "all-gather", [data])]

    def gather(self, data: bytes) -> list[bytes] | None:
        """See `Exchange.gather`."""
        items = [item for [item] in self._group.meet(self.rank, "gather", [data])]
        return items if self.rank == 0 else None

    def scatter(self, data: list[bytes] | None) -> bytes:
        """See `Exchange.scatter`."""
        assert (data is not None) == (self.rank == 0)
        assert data is None or len(data) == self.world_size
        return self._group.meet(self.rank, "scatter", data or [])[0][self.rank]

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Exchange.broadcast`."""
        assert (data is not None) == (self.rank == 0)
        return self._group.meet(self.rank, "broadcast", [] if data is None else [data])[0][0]

    def swap(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes]) -> None:
        """See `Exchange.swap`."""
        assert len(outgoing) == len(incoming) == self.world_size
        # Copies, because a rank that has what it came for may change its buffers.
        sent = self._group.meet(self.rank, "swap", [bytes(item) for item in outgoing])
        for rank, items in enumerate(sent):
            incoming[rank][:] = np.frombuffer(items[self.rank], np.uint8)
