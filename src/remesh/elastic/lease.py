"""Which of several instances acts: the holder of a lease that all of them can write.

The holder writes the lease every few seconds. Another instance takes it when it has not seen a
write for `seconds` by its own clock: clocks of machines are not compared. A holder that could not
write for two thirds of that time stops before another begins. A lease that is taken has a higher
term than all before.

`Election` is the state of one instance, and pure functions change it. `Leader` reads and writes
for it, through `Leases`: files on shared storage (`remesh.elastic.lease_files`) or an object of
Kubernetes (`remesh.kubernetes.leases`). A process may be paused anywhere, after its last look at
the clock too, so what a leader writes must be protected by its term besides
(`remesh.elastic.shared_journals`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from remesh.errors import RemeshError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it is stored."""

    version: str = ""  # differs after each write
    holder: str = ""  # the instance that holds it; empty if it was given back
    term: int = 0  # grows each time that the lease is taken


class LeaseConflictError(Exception):
    """The lease was written by another instance since it was read."""


class NotLeadingError(Exception):
    """This instance does not hold the lease, or not any more."""


class Leases(Protocol):
    """Reads and writes the lease."""

    async def read(self) -> Lease:
        """The lease; `Lease()` if there is none yet."""

    async def write(self, lease: Lease) -> None:
        """Write the lease, if the stored one is still of its version.

        Raises:
            LeaseConflictError: If it is not.
        """


@dataclass(frozen=True, slots=True)
class Election:
    """What one instance knows."""

    me: str  # its name, which no other instance has
    seconds: float  # silence of a holder after which another takes the lease
    seen: Lease | None = None  # the lease as it was read last
    seen_at: float = 0.0  # when that version was read first
    term: int = 0  # the term of this instance's own lease
    renewed: float | None = None
    """A time before its last successful write; None if it holds no lease."""


def leads(state: Election, now: float) -> bool:
    """Whether the instance may act."""
    return state.renewed is not None and now - state.renewed < state.seconds * 2 / 3


def after_read(state: Election, lease: Lease, now: float) -> tuple[Election, Lease | None]:
    """The state after a read, and what to write; None while another instance holds the lease."""
    if lease != state.seen:
        state = dataclasses.replace(state, seen=lease, seen_at=now)
    is_mine = lease.holder == state.me
    if not is_mine:
        state = dataclasses.replace(state, renewed=None)
        if lease.holder and now - state.seen_at < state.seconds:
            return state, None
    term = lease.term if is_mine and leads(state, now) else lease.term + 1
    return state, Lease(lease.version, state.me, term)


def after_write(state: Election, lease: Lease, began: float) -> Election:
    """The state after a write.

    Args:
        state: The state before.
        lease: What was written.
        began: A time before the read that led to it.
    """
    return dataclasses.replace(state, term=lease.term, renewed=began if lease.holder else None)


class Leader:
    """One instance's part in the election.

    Args:
        leases: Reads and writes the lease.
        me: The name of this instance.
        seconds: Silence of a holder after which another takes over.
        clock: Seconds that never jump.
    """

    def __init__(
        self,
        leases: Leases,
        me: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._clock = clock
        self._state = Election(me, seconds)
        self._seconds = seconds
        self._pause = seconds / 5

    @property
    def term(self) -> int:
        """The term of the lease that this instance has taken last."""
        return self._state.term

    def leads(self) -> bool:
        """Whether this instance may act."""
        return leads(self._state, self._clock())

    async def attempt(self) -> bool:
        """Take or renew the lease if that is possible; whether this instance may act."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._seconds * 2 / 3):  # later it would not lead anyway
                lease = await self._leases.read()
                self._state, wanted = after_read(self._state, lease, self._clock())
                if wanted is not None:
                    await self._leases.write(wanted)
                    self._state = after_write(self._state, wanted, began)
        except LeaseConflictError:
            pass  # the next attempt reads what the other has written
        except TimeoutError:
            log.error("the lease is not renewed: no reply within %.3g s", self._clock() - began)
        except RemeshError as error:
            log.error("the lease is not renewed: %s", error)
        return self.leads()

    async def acquire(self) -> None:
        """Return when this instance leads."""
        while not await self.attempt():  # noqa: ASYNC110 - the lease is read again each time
            await asyncio.sleep(self._pause)

    async def keep(self) -> None:
        """Renew the lease; return when it is lost."""
        while self.leads():
            await asyncio.sleep(self._pause)
            await self.attempt()

    def end_term(self) -> None:
        """Do not lead any more; the next attempt that succeeds begins another term."""
        self._state = dataclasses.replace(self._state, renewed=None)

    async def release(self) -> None:
        """Give the lease back, so that another instance need not wait."""
        if not self.leads():
            return
        self.end_term()
        try:
            async with asyncio.timeout(self._seconds):
                lease = await self._leases.read()
                if lease.holder == self._state.me:
                    await self._leases.write(dataclasses.replace(lease, holder=""))
        except (LeaseConflictError, RemeshError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log.warning("the lease is not given back: %s", why)
