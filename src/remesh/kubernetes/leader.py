"""Which of several operators acts: the holder of a lease in the cluster.

The holder writes the lease every few seconds. Another instance takes it over when it has not seen a
write for `seconds` by its own clock: clocks of machines are not compared. A holder that could not
write for two thirds of that time stops before another begins. Should two act at the same time
nevertheless (a process may be paused anywhere), looks of jobs are safe beside each other
(`remesh.kubernetes.reconcile`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from remesh.errors import ClusterError
from remesh.kubernetes.looking import ConflictError

log = logging.getLogger(__name__)

Lease = Mapping[str, Any]


class Leases(Protocol):
    """Reads and writes the lease."""

    async def read(self) -> Lease | None:
        """The lease; None if there is none yet."""

    async def write(self, lease: Lease) -> None:
        """Create the lease, or replace it if it has not changed since it was read.

        Raises:
            ConflictError: If it has.
        """


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as it was seen first.

    Attributes:
        holder: The instance that holds it.
        renewed: When it was written, by the clock of that instance.
        at: When this was first seen, by ours.
    """

    holder: str
    renewed: str
    at: float


def observe(lease: Lease | None, seen: Seen | None, now: float) -> Seen:
    """What is known of the lease after a read."""
    spec = (lease or {}).get("spec") or {}
    holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
    if seen is not None and (seen.holder, seen.renewed) == (holder, renewed):
        return seen
    return Seen(holder, renewed, now)


def may_take(seen: Seen, me: str, now: float, seconds: float) -> bool:
    """Whether an instance may write its name into the lease."""
    return seen.holder in ("", me) or now - seen.at >= seconds


def taken(lease: Lease | None, name: str, me: str, seconds: float, now: datetime) -> Lease:
    """The lease with an instance as its holder."""
    old = dict((lease or {}).get("spec") or {})
    stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    changed = old.get("holderIdentity") != me
    spec = {
        **old,
        "holderIdentity": me,
        "leaseDurationSeconds": max(round(seconds), 1),
        "renewTime": stamp,
        "acquireTime": stamp if changed else old.get("acquireTime", stamp),
        "leaseTransitions": (old.get("leaseTransitions") or 0) + (changed and lease is not None),
    }
    meta = (lease or {}).get("metadata") or {"name": name}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": meta,
        "spec": spec,
    }


class Leader:
    """One instance's part in the election.

    Args:
        leases: Reads and writes the lease.
        name: The lease's name.
        me: The name of this instance.
        seconds: Silence of a holder after which another takes over.
        clock: Seconds that never jump.
    """

    def __init__(
        self,
        leases: Leases,
        name: str,
        me: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._name = name
        self._me = me
        self._seconds = seconds
        self._clock = clock
        self._seen: Seen | None = None
        self._renewed: float | None = None

    def leads(self) -> bool:
        """Whether this instance may act."""
        renewed = self._renewed
        return renewed is not None and self._clock() - renewed < self._seconds * 2 / 3

    async def attempt(self) -> bool:
        """Take or renew the lease if it may be; whether this instance may act."""
        began = self._clock()
        try:
            lease = await self._leases.read()
            self._seen = observe(lease, self._seen, self._clock())
            if not may_take(self._seen, self._me, self._clock(), self._seconds):
                self._renewed = None
                return False
            now = datetime.now(UTC)
            await self._leases.write(taken(lease, self._name, self._me, self._seconds, now))
        except ConflictError:
            return self.leads()
        except ClusterError as error:
            log.error("the lease is not renewed: %s", error)
            return self.leads()
        self._renewed = began
        return True

    async def acquire(self) -> None:
        """Return when this instance leads."""
        while not await self.attempt():  # noqa: ASYNC110 - the lease is read again each time
            await asyncio.sleep(self._seconds / 5)

    async def keep(self) -> None:
        """Renew the lease; return when it is lost."""
        while self.leads():
            await asyncio.sleep(self._seconds / 5)
            await self.attempt()
