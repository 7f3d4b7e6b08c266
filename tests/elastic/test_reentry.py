"""The processes of a node between two worlds: orders and reports under every schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remesh.elastic import reentry
from remesh.elastic.reentry import Act, Enter, Leave, Order, Recovery, Report, next_act

NUM = 3
PATIENCE = 10.0


def test_an_order_is_carried_out_once() -> None:
    inside = Report(pid=1)
    assert next_act(inside, None) is Act.GO_ON
    assert next_act(inside, Leave(1)) is Act.LEAVE
    out = Report(pid=1, number=1, is_out=True)
    assert next_act(out, Leave(1)) is Act.GO_ON
    assert next_act(out, Enter(1, {})) is Act.GO_ON
    assert next_act(out, Enter(2, {})) is Act.ENTER
    assert next_act(out, Leave(2)) is Act.CONFIRM
    assert next_act(Report(pid=1, number=2), Enter(2, {})) is Act.GO_ON


def test_a_process_that_missed_the_order_to_leave_leaves_before_it_enters() -> None:
    assert next_act(Report(pid=1, number=2), Enter(4, {})) is Act.LEAVE


def test_a_process_that_lost_a_peer_confirms_the_order_it_waited_for() -> None:
    assert next_act(Report(pid=1, is_out=True, error="connection closed"), Leave(1)) is Act.CONFIRM


def test_without_a_process_that_can_be_entered_there_is_no_recovery() -> None:
    def begin(living: dict[int, int], reports: dict[int, Report]) -> Recovery | None:
        return reentry.begin(1, living, reports, num_processes=1, deadline=1.0)

    assert begin({0: 10}, {}) is None
    assert begin({0: 10}, {0: Report(pid=9)}) is None  # the report of a process before
    assert begin({}, {0: Report(pid=9)}) is None
    assert begin({0: 10}, {0: Report(pid=10)}) is not None


@dataclass
class Process:
    """A training process: it reads orders late or never, and may hang."""

    report: Report
    hangs: bool = False
    entered: list[int] = field(default_factory=list)

    def look(self, order: Order | None) -> None:
        """Carry out an order."""
        act = next_act(self.report, order)
        if self.hangs and not self.report.is_out:
            return
        if act is Act.LEAVE:
            # The order is looked at again once it is out.
            self.report = Report(pid=self.report.pid, number=self.report.number, is_out=True)
            self.look(order)
        elif act is Act.CONFIRM:
            assert order is not None
            self.report = Report(pid=self.report.pid, number=order.number, is_out=True)
        elif act is Act.ENTER:
            assert order is not None
            self.entered.append(order.number)
            self.report = Report(pid=self.report.pid, number=order.number)


class Node(RuleBasedStateMachine):
    """An agent with three processes, any of which dies, hangs or is slow at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.next_pid = 100
        self.processes: dict[int, Process] = {}
        self.orders: dict[int, Order] = {}
        self.shown: dict[int, list[Report]] = {}  # reports that were written, any may be read
        self.recovery: Recovery | None = None
        self.killed: list[tuple[int, float]] = []
        for rank in range(NUM):
            self._start(rank)

    def _start(self, rank: int) -> None:
        self.next_pid += 1
        self.orders.pop(rank, None)
        self.processes[rank] = Process(Report(pid=self.next_pid))
        self.shown.setdefault(rank, []).append(self.processes[rank].report)

    @rule(rank=st.integers(0, NUM - 1))
    def process_looks(self, rank: int) -> None:
        if rank in self.processes:
            self.processes[rank].look(self.orders.get(rank))
            self.shown[rank].append(self.processes[rank].report)

    @rule(rank=st.integers(0, NUM - 1))
    def process_dies(self, rank: int) -> None:
        self.processes.pop(rank, None)

    @rule(rank=st.integers(0, NUM - 1))
    def process_hangs(self, rank: int) -> None:
        if rank in self.processes and not self.processes[rank].report.is_out:
            self.processes[rank].hangs = True

    @rule(rank=st.integers(0, NUM - 1))
    def process_loses_a_peer(self, rank: int) -> None:
        if rank in self.processes and not self.processes[rank].hangs:
            process = self.processes[rank]
            old = process.report
            if not old.is_out:
                process.report = Report(pid=old.pid, number=old.number, is_out=True, error="gone")
                self.shown[rank].append(process.report)

    @precondition(lambda self: self.recovery is None)
    @rule()
    def world_changes(self) -> None:
        self.number += 1
        living = {rank: process.report.pid for rank, process in self.processes.items()}
        reports = {rank: process.report for rank, process in self.processes.items()}
        self.recovery = reentry.begin(
            self.number, living, reports, num_processes=NUM, deadline=self.now + PATIENCE
        )
        for rank in range(NUM):
            if self.recovery is None:
                self._start(rank)
            elif rank in self.recovery.leaving:
                self.orders[rank] = Leave(self.number)

    @precondition(lambda self: self.recovery is not None)
    @rule(rank=st.integers(0, NUM - 1), dice=st.randoms(use_true_random=False))
    def agent_reads(self, rank: int, dice: object) -> None:
        assert self.recovery is not None
        report = dice.choice(self.shown[rank])  # type: ignore[attr-defined] # old ones too
        self.recovery = reentry.hear(self.recovery, rank, report)

    @precondition(lambda self: self.recovery is not None)
    @rule(seconds=st.sampled_from([0.0, 1.0, PATIENCE]))
    def agent_goes_on(self, seconds: float) -> None:
        self.now += seconds
        recovery = self.recovery
        assert recovery is not None
        for rank in (*recovery.leaving, *recovery.out):
            if rank not in self.processes:
                recovery = reentry.end(recovery, rank)
        for rank, pid in reentry.overdue(recovery, self.now).items():
            self.killed.append((pid, recovery.deadline))
            assert self.processes.pop(rank).report.pid == pid
            recovery = reentry.end(recovery, rank)
        self.recovery = recovery
        if recovery.is_settled:
            self._enter(recovery)

    def _enter(self, recovery: Recovery) -> None:
        self.recovery = None
        self.number += 1
        assert recovery.out.keys() | recovery.missing == set(range(NUM))
        assert not recovery.out.keys() & recovery.missing
        for rank in recovery.missing:
            self._start(rank)
        for rank in recovery.out:
            self.orders[rank] = Enter(self.number, {})

    @invariant()
    def only_what_is_out_is_let_in(self) -> None:
        recovery = self.recovery
        for rank, pid in {} if recovery is None else recovery.out.items():
            process = self.processes.get(rank)
            # It has confirmed this order, and cannot be inside before the next.
            assert process is None or process.report.pid != pid or process.report.is_out

    @invariant()
    def processes_enter_new_worlds_only(self) -> None:
        for process in self.processes.values():
            assert process.entered == sorted(set(process.entered))

    @invariant()
    def no_process_is_killed_before_its_time(self) -> None:
        assert all(self.now >= deadline for _, deadline in self.killed)

    def teardown(self) -> None:
        """Whatever happened: if nothing more does, the node gets all its processes into a world."""
        for _ in range(3):
            for rank in list(self.processes):
                self.process_looks(rank)
            if self.recovery is not None:
                for rank in range(NUM):
                    self.recovery = reentry.hear(self.recovery, rank, self.shown[rank][-1])
                self.agent_goes_on(PATIENCE)
        assert self.recovery is None


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNode = Node.TestCase
