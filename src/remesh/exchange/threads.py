"""The exchange of ranks that are threads of one process.

All ranks share a `ThreadGroup`. A collective call is a *meeting*: each rank lays down what it
brings, and the last one to arrive closes the meeting, opens the next, and wakes the others, who
take what they need. Each meeting is an object of its own, so a fast rank that is already at the
next one does not disturb threads that still read.

A meeting that can no longer become complete must not hang: it fails on every rank that waits as
soon as the group is aborted, which a runner of rank-threads does when one of them ends, and
at the latest when the time is up. Ranks that call different operations are told so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.errors import ExchangeError
from remesh.exchange.lateness import describe_absent
from remesh.exchange.protocol import Buffers, Exchange


@dataclass(slots=True)
class _Meeting:
    # The operation and the contribution of each rank.
    brought: dict[int, tuple[str, list[bytes]]] = field(default_factory=dict)
    complete: bool = False


class ThreadGroup:
    """The state that the ranks of one group share.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for the others in one call.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
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

    def meet(self, rank: int, operation: str, contribution: list[bytes]) -> list[list[bytes]]:
        """Bring something to the next meeting; what all ranks brought, in rank order.

        Raises:
            ExchangeError: If the group is aborted, the time is up, or the ranks do not all call
                the same operation.
        """
        with self._condition:
            meeting = self._meeting
            if self._failure is None:
                meeting.brought[rank] = operation, contribution
                if len(meeting.brought) == self.world_size:
                    self._close(meeting)
                elif not self._condition.wait_for(
                    lambda: meeting.complete or self._failure is not None, self.timeout
                ):
                    ranks = range(self.world_size)
                    late = describe_absent(sorted({*ranks} - {*meeting.brought}), ranks)
                    self.abort(f"no end within {self.timeout:g} s: {late}; see what they wait for")
            if not meeting.complete:
                raise ExchangeError(f"{operation} failed on rank {rank}: {self._failure}")
        return [meeting.brought[index][1] for index in range(self.world_size)]

    def _close(self, meeting: _Meeting) -> None:
        operations = {rank: operation for rank, (operation, _) in sorted(meeting.brought.items())}
        if len(set(operations.values())) > 1:
            calls = ", ".join(f"rank {rank}: {name}" for rank, name in operations.items())
            self.abort(
                f"the ranks call different operations ({calls}); every rank must make the same "
                "calls in the same order"
            )
        else:
            meeting.complete = True
            self._meeting = _Meeting()
            self._condition.notify_all()


class ThreadExchange(Exchange):
    """One rank's end of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self.patience = group.timeout
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


class Alone(ThreadExchange):
    """A group of one rank, which receives its own messages."""

    def __init__(self) -> None:
        super().__init__(ThreadGroup(1), 0)
