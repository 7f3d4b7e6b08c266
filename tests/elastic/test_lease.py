"""Several masters: one leads at a time, and what a deposed one writes is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from remesh.elastic.client import Client
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.lease import (
    Election,
    Leader,
    Lease,
    LeaseConflictError,
    NotLeadingError,
    after_read,
    after_write,
    leads,
)
from remesh.elastic.lease_files import LeaseFiles, take_over
from remesh.elastic.master import Master
from remesh.elastic.protocol import Join
from remesh.elastic.rendezvous import Settings
from remesh.errors import ClusterError, MasterError
from tests.elastic.cluster import REMESH, Cluster, kill, reserve_port

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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_in_files_passes_on(tmp_path: Path) -> None:
    clock = Clock()
    files = LeaseFiles(tmp_path), LeaseFiles(tmp_path)
    first, second = (Leader(each, str(n), 15, clock) for n, each in enumerate(files))

    async def story() -> None:
        assert await first.attempt()
        assert not await second.attempt()
        clock.now = 9
        assert await first.attempt()
        files[0].check()
        clock.now = 23
        assert not first.leads()
        assert not await second.attempt(), "the first one has written meanwhile"
        clock.now = 38
        assert await second.attempt()
        assert (first.term, second.term) == (1, 2)
        with pytest.raises(NotLeadingError):
            files[0].check()
        await second.release()
        assert await first.attempt(), "at once"
        assert first.term == 3

    asyncio.run(story())
    assert len(list(tmp_path.iterdir())) == 1, "what is old is removed"


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


def test_of_many_that_write_at_once_one_succeeds(tmp_path: Path) -> None:
    many = [LeaseFiles(tmp_path) for _ in range(8)]

    def write(number: int) -> bool:
        try:
            asyncio.run(many[number].write(Lease("", str(number), 1)))
        except LeaseConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(8))) == 1
    late = LeaseFiles(tmp_path)
    asyncio.run(late.write(Lease("1", "new", 2)))
    with pytest.raises(LeaseConflictError):  # of a process that was stopped after its read
        asyncio.run(many[0].write(Lease("", "old", 1)))
    late.check()


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


def test_what_a_deposed_master_writes_is_refused(tmp_path: Path) -> None:
    clock, policy = Clock(), Policy()
    files = LeaseFiles(tmp_path), LeaseFiles(tmp_path)
    leaders = [Leader(each, str(n), 15, clock) for n, each in enumerate(files)]

    class Paused:
        """Has looked at its clock before it was stopped."""

        def leads(self) -> bool:
            return True

        def check(self) -> None:
            files[0].check()

    async def story() -> None:
        await leaders[0].attempt()
        journal = Journal(take_over(tmp_path, 1) / "journal.sqlite")
        old = Master(policy, journal, authority=Paused())
        await old.answer(join("before"))
        await leaders[1].attempt()
        clock.now = 15
        await leaders[1].attempt()
        with pytest.raises(NotLeadingError):
            await old.answer(join("between"))
        new = Master(policy, Journal(take_over(tmp_path, 2) / "journal.sqlite"))
        with pytest.raises(NotLeadingError):
            await old.answer(join("after"))
        assert set(new.job.names) == {"before", "between"}, "the second was refused for safety"
        await old.close()
        await new.close()

    asyncio.run(story())


class Masters(Cluster):
    """A cluster whose master is not alone, and has several jobs."""

    def start_master(self) -> None:
        """Start both."""
        self.reserved = {name: reserve_port() for name in "ab"}
        self.masters: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        for name in self.reserved:
            self.start_one(name)
        self.url = ",".join(self.addresses.values())
        self.client = Client(self.url, patience=60)

    def start_one(self, name: str) -> None:
        """Start one of them, where it was."""
        options = ["--state", str(self.directory / "state"), "--lease", "3", "--jobs"]
        port = ["--port", str(self.reserved[name][0]), *self._master_options]
        with (self.directory / f"master-{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*REMESH, "master", *options, *port], stdout=subprocess.PIPE, stderr=log
            )
        assert started.stdout is not None
        with started.stdout as said:
            self.addresses[name] = f"{said.readline().decode().strip()}/jobs/train"
        self.masters[name] = started

    def kill_master(self) -> None:
        """SIGKILL both."""
        for master in self.masters.values():
            master.kill()
            master.wait()
        for _, reserved in self.reserved.values():
            reserved.close()

    def leaders(self, among: Sequence[str] = "ab") -> list[str]:
        """Those that answer."""
        found = []
        for name in among:
            with contextlib.suppress(MasterError):
                Client(self.addresses[name]).status()
                found.append(name)
        return found

    def until_leader(self, among: Sequence[str] = "ab") -> tuple[str, str]:
        """Wait until one of some leads; that and the other."""
        found: list[str] = []

        def is_one() -> bool:
            found[:] = self.leaders(among)
            return len(found) == 1

        self.until(is_one)
        return found[0], {"a": "b", "b": "a"}[found[0]]


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
