"""Several masters: one leads at a time, and what a deposed one writes is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.lease import (
    Election,
    Leader,
    Lease,
    Leases,
    NotLeadingError,
    after_read,
    after_write,
    leads,
)
from remesh.elastic.lease_files import LeaseFiles, numbered
from remesh.elastic.master import Master
from remesh.elastic.protocol import Join
from remesh.elastic.rendezvous import Settings
from remesh.elastic.shared_journals import SharedJournals, TermsOfJournals
from remesh.errors import ClusterError
from remesh.testing.lease_conformance import Clock, LeasesConformance
from tests.elastic.cluster import kill
from tests.elastic.masters import Masters

INSTANCES = st.sampled_from(range(3))


class Elections(RuleBasedStateMachine):
    """Instances that read, pause, and write what they decided; clocks that begin anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stored = Lease()
        self.num_writes = 0
        self.states = [Election(f"instance {number}", 10.0) for number in range(3)]
        self.waiting: list[tuple[Lease, float] | None] = [None] * 3
        self.holders: dict[int, str] = {}

    def clock(self, number: int) -> float:
        return self.now + 1000.0 * number

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.0, 7.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=INSTANCES)
    def read(self, number: int) -> None:
        now = self.clock(number)
        self.states[number], wanted = after_read(self.states[number], self.stored, now)
        self.waiting[number] = None if wanted is None else (wanted, now)

    @rule(number=INSTANCES)
    def write(self, number: int) -> None:
        waiting, self.waiting[number] = self.waiting[number], None
        if waiting is None or waiting[0].version != self.stored.version:
            return
        lease, began = waiting
        self.num_writes += 1
        assert lease.term >= self.stored.term
        self.stored = dataclasses.replace(lease, version=str(self.num_writes))
        self.states[number] = after_write(self.states[number], lease, began)
        assert self.holders.setdefault(lease.term, lease.holder) == lease.holder

    @rule(number=INSTANCES)
    def restart(self, number: int) -> None:
        name = f"{self.states[number].me}'"
        self.states[number], self.waiting[number] = Election(name, 10.0), None

    @invariant()
    def one_leads(self) -> None:
        leaders = [n for n, state in enumerate(self.states) if leads(state, self.clock(n))]
        assert len(leaders) <= 1
        assert all(self.states[number].term == self.stored.term for number in leaders)

    def teardown(self) -> None:
        """After some silence any instance gets the lease."""
        for _ in range(2):
            self.read(0)
            self.now += 10.0
        self.read(0)
        self.write(0)
        assert leads(self.states[0], self.clock(0))


TestElections = Elections.TestCase
TestElections.settings = settings(max_examples=40, stateful_step_count=40)


class TestLeaseFiles(LeasesConformance):
    def open_leases(
        self, number: int, tmp_path: Path
    ) -> contextlib.AbstractAsyncContextManager[tuple[Leases, ...]]:
        return contextlib.nullcontext(tuple(LeaseFiles(tmp_path) for _ in range(number)))

    def test_what_is_old_is_removed(self, tmp_path: Path) -> None:
        async def story() -> None:
            for version in ("", "1", "2"):
                await LeaseFiles(tmp_path).write(Lease(version, "me", 1))

        asyncio.run(story())
        assert [file.name for file in tmp_path.iterdir()] == ["lease-0000000003"]


def test_a_leader_that_cannot_write_stops_in_time() -> None:
    clock = Clock()

    class Unreachable:
        fails = False

        async def read(self) -> Lease:
            if self.fails:
                raise ClusterError("not reached")
            return Lease()

        async def write(self, lease: Lease) -> None:
            assert not self.fails

    leases = Unreachable()
    leader = Leader(leases, "me", 15, clock)

    async def story() -> None:
        assert await leader.attempt()
        leases.fails = True
        clock.now = 9
        assert await leader.attempt(), "not yet"
        clock.now = 10
        assert not await leader.attempt()

    asyncio.run(story())


def join(name: str) -> Join:
    """The first request of a node."""
    return Join(
        name=name,
        node_id=None,
        incarnation=name,
        address="x",
        num_processes=1,
        settings=Settings(min_nodes=9, max_nodes=9),
        wait=0.0,
    )


def test_an_attempt_that_hangs_is_given_up() -> None:
    class Hanging:
        hangs = True

        async def read(self) -> Lease:
            if self.hangs:
                await asyncio.Event().wait()
            return Lease()

        async def write(self, lease: Lease) -> None:
            pass

    leases = Hanging()
    leader = Leader(leases, "me", 0.05)

    async def story() -> None:
        assert not await leader.attempt()
        leases.hangs = False
        await leader.acquire()

    asyncio.run(story())


def test_what_a_deposed_master_writes_is_refused(tmp_path: Path) -> None:
    policy = Policy()
    journals = SharedJournals(tmp_path), SharedJournals(tmp_path)

    class Paused:
        """Has looked at its clock before it was stopped."""

        def leads(self) -> bool:
            return True

        def check(self) -> None:
            journals[0].check(1)

    async def story() -> None:
        journal = Journal(journals[0].take_over(1) / "journal.sqlite")
        old = Master(policy, journal, authority=Paused())
        await old.answer(join("before"))
        numbered(tmp_path, "open-", 1).unlink()  # as the next one begins
        with pytest.raises(NotLeadingError):
            await old.answer(join("between"))
        new = Master(policy, Journal(journals[1].take_over(2) / "journal.sqlite"))
        with pytest.raises(NotLeadingError):
            await old.answer(join("after"))
        assert set(new.job.names) == {"before", "between"}, "the second was refused for safety"
        journals[1].check(2)
        await old.close()
        await new.close()

    asyncio.run(story())


def test_a_master_that_was_overtaken_does_not_begin(tmp_path: Path) -> None:
    first, second = SharedJournals(tmp_path), SharedJournals(tmp_path)
    (second.take_over(2) / "journal").write_bytes(b"kept")
    with pytest.raises(NotLeadingError, match="a later term"):
        first.take_over(1)
    second.check(2)
    assert (first.take_over(3) / "journal").read_bytes() == b"kept"
    with pytest.raises(NotLeadingError, match="has ended"):
        second.check(2)
    with pytest.raises(NotLeadingError, match="another master"):
        second.check(3)


def test_terms_go_on_where_a_lease_was_removed(tmp_path: Path) -> None:
    journals = SharedJournals(tmp_path / "journals")
    journals.take_over(4)
    leader = Leader(TermsOfJournals(LeaseFiles(tmp_path), journals), "me", 15)
    assert asyncio.run(leader.attempt())
    assert leader.term == 5


@pytest.mark.slow
def test_a_job_outlives_its_masters(tmp_path: Path) -> None:
    with Masters(tmp_path, "2:2") as cluster:
        cluster.start(0, 1)
        cluster.until_leader()  # has the job when the first node has joined
        cluster.until_trained(0, 1)
        first, other = cluster.until_leader()
        cluster.masters[first].kill()
        cluster.masters[first].wait()
        cluster.until_leader([other])
        cluster.until_trained(0, 1)
        cluster.start_one(first)
        second, spare = cluster.until_leader()
        kill(cluster.masters[second].pid, signal.SIGSTOP)
        cluster.until_leader([spare])
        kill(cluster.masters[second].pid, signal.SIGCONT)
        log = tmp_path / f"master-{second}.log"
        cluster.until(lambda: "stands by" in log.read_text())
        cluster.until_leader()
        cluster.until_trained(0, 1)
        assert cluster.status().num_restarts == 0
        cluster.stop(0, 1)
