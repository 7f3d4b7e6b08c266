"""One of several operators leads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from remesh.errors import ClusterError
from remesh.kubernetes.leader import Leader, Lease
from remesh.kubernetes.looking import ConflictError


class Leases:
    """The lease of an API server."""

    def __init__(self) -> None:
        self.stored: Mapping[str, Any] | None = None
        self.version = 0
        self.fails = False

    async def read(self) -> Lease | None:
        if self.fails:
            raise ClusterError("not reached")
        return self.stored

    async def write(self, lease: Lease) -> None:
        if self.fails:
            raise ClusterError("not reached")
        if self.stored is not None and lease["metadata"].get("resourceVersion") != str(
            self.version
        ):
            raise ConflictError
        self.version += 1
        meta = {**lease["metadata"], "resourceVersion": str(self.version)}
        self.stored = {**lease, "metadata": meta}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_another_takes_over_when_the_leader_is_silent() -> None:
    leases, clock = Leases(), Clock()
    first, second = (Leader(leases, "lease", name, 15, clock) for name in ("first", "second"))

    async def story() -> None:
        assert await first.attempt()
        assert not await second.attempt()
        clock.now = 12
        assert await first.attempt()
        clock.now = 20
        assert not await second.attempt(), "the first one has written meanwhile"
        clock.now = 23
        assert not first.leads(), "it stops before another may begin"
        clock.now = 35
        assert await second.attempt()
        assert not await first.attempt()
        assert leases.stored is not None
        assert leases.stored["spec"]["leaseTransitions"] == 1

    asyncio.run(story())


def test_a_leader_without_an_api_server_stops_in_time() -> None:
    leases, clock = Leases(), Clock()
    leader = Leader(leases, "lease", "me", 15, clock)

    async def story() -> None:
        assert await leader.attempt()
        leases.fails = True
        clock.now = 9
        assert await leader.attempt(), "not yet"
        clock.now = 10
        assert not await leader.attempt()

    asyncio.run(story())


def test_of_two_that_write_at_once_one_leads() -> None:
    leases, clock = Leases(), Clock()
    first, second = (Leader(leases, "lease", name, 15, clock) for name in ("first", "second"))

    async def story() -> None:
        await first.attempt()
        clock.now = 30
        stale = leases.stored
        assert await first.attempt()
        fresh, leases.stored = leases.stored, stale
        await asyncio.sleep(0)
        leases.stored = fresh
        assert not await second.attempt()

    asyncio.run(story())
