"""What every place for a lease must do, as tests to inherit.

Subclass the suite, supply `open_leases`, and pytest runs the whole of it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from remesh.elastic.lease import Leader, Lease, LeaseConflictError, Leases

SECONDS = 15.0
"""Of the leases under test."""


class Clock:
    """A clock that stands still until a test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class LeasesConformance:
    """The suite for places of a lease; supply `open_leases`."""

    def open_leases(
        self, number: int, tmp_path: Path
    ) -> AbstractAsyncContextManager[tuple[Leases, ...]]:
        """So many views of one lease that was never written, one for each instance.

        Args:
            number: How many.
            tmp_path: An empty directory that pytest removes.
        """
        raise NotImplementedError

    def test_it_is_empty_at_first(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with self.open_leases(1, tmp_path) as (mine,):
                assert await mine.read() == Lease()

        asyncio.run(story())

    def test_a_write_is_seen_and_changes_the_version(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with self.open_leases(2, tmp_path) as (mine, other):
                versions = {(await mine.read()).version}
                for holder, term in (("first", 1), ("first", 1), ("", 1), ("second", 7)):
                    await mine.write(Lease((await mine.read()).version, holder, term))
                    found = await other.read()
                    assert (found.holder, found.term) == (holder, term)
                    versions.add(found.version)
                assert len(versions) == 5

        asyncio.run(story())

    def test_a_write_of_an_old_version_is_refused(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with self.open_leases(2, tmp_path) as (mine, other):
                assert await mine.read() == await other.read() == Lease()
                await other.write(Lease("", "other", 1))
                with pytest.raises(LeaseConflictError):
                    await mine.write(Lease("", "mine", 1))
                stale = await mine.read()
                await other.write(Lease((await other.read()).version, "other", 1))
                with pytest.raises(LeaseConflictError):
                    await mine.write(Lease(stale.version, "mine", 2))
                assert (await mine.read()).holder == "other"

        asyncio.run(story())

    def test_of_many_writes_at_once_one_succeeds(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with self.open_leases(8, tmp_path) as many:
                seen = [await each.read() for each in many]
                writes = [
                    each.write(Lease(lease.version, f"instance {number}", 1))
                    for number, (each, lease) in enumerate(zip(many, seen, strict=True))
                ]
                done = await asyncio.gather(*writes, return_exceptions=True)
                (winner,) = [number for number, error in enumerate(done) if error is None]
                rest = [error for error in done if error is not None]
                assert {type(error) for error in rest} == {LeaseConflictError}
                assert (await many[0].read()).holder == f"instance {winner}"

        asyncio.run(story())

    def test_it_passes_on(self, tmp_path: Path) -> None:
        clock = Clock()

        async def story() -> None:
            async with self.open_leases(2, tmp_path) as leases:
                first, second = (
                    Leader(each, str(number), SECONDS, clock) for number, each in enumerate(leases)
                )
                assert await first.attempt()
                assert not await second.attempt()
                clock.now = 9
                assert await first.attempt()
                clock.now = 23
                assert not first.leads()
                assert not await second.attempt(), "the first one has written meanwhile"
                clock.now = 38
                assert await second.attempt()
                assert (first.term, second.term) == (1, 2)
                assert not await first.attempt()
                await second.release()
                assert await first.attempt(), "at once"
                assert first.term == 3

        asyncio.run(story())
