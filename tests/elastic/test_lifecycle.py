"""The agent as a pure function: single steps, and two agents under every order of events."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from remesh.elastic import lifecycle
from remesh.elastic.lifecycle import Action, Limits, Phase, Seen, State, Tell, begin, step
from remesh.elastic.nodes import Node, Outcome
from remesh.elastic.process_socket import Order, Report, Request, pending
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import Assignment, Content, JobEnded, Rejected, Stop

LATE = 1e9
LEADER = Node(id=0, incarnation="a", name="", address="", port=0, num_processes=1)


def limits(num_processes: int = 2) -> Limits:
    return Limits(
        num_processes=num_processes,
        drain=60.0,
        reentry=10.0,
        shutdown=30.0,
        patience=3600.0,
    )


def world(number: int, **asked: bool) -> Assignment:
    return Assignment(number, 0, 1, 0, 2, LEADER, **asked)


TRAINS = State(limits=limits(), phase=Phase.TRAIN, order=4)
HEALTHY = Seen(living=frozenset({0, 1}), content=world(1))
ABLE = {0: Report(number=4), 1: Report(number=4)}


def test_ranks_wait_without_a_save_only_if_all_can_go_on() -> None:
    early = replace(HEALTHY, content=world(1, save=True, grow=True))
    assert step(TRAINS, early, 0.0) == (TRAINS, []), "none has said yet whether it can"
    grows = replace(early, progress=at_step(None, False, False))
    cases: list[tuple[dict[int, Report], Request]] = [
        (ABLE, "hold"),
        ({0: ABLE[0]}, "save-and-hold"),
        ({}, "save-and-hold"),
    ]
    for reports, asked in cases:
        state, actions = step(TRAINS, replace(grows, reports=reports), 0.0)
        assert actions[0] == lifecycle.Hold(asked)
        assert step(state, HEALTHY, 0.0)[1] == [lifecycle.Hold(None)]


def at_step(saved: int | None, *waits: bool) -> dict[int, RankProgress]:
    """Ranks that have made 7 steps."""
    return {
        rank: RankProgress(step=7, time=0.0, saved_step=saved, waits=one)
        for rank, one in enumerate(waits)
    }


def test_a_node_drains_when_all_its_ranks_wait() -> None:
    drains = replace(HEALTHY, drains=True, progress=at_step(7, True, False))
    state, actions = step(TRAINS, drains, 5.0)
    assert actions == [Tell.DRAIN, lifecycle.Hold("save-and-hold")]
    assert step(state, drains, 64.0) == (state, [])
    (left,) = step(state, replace(drains, progress=at_step(7, True, True)), 64.0)[1]
    assert left == lifecycle.Exit(143, "SIGTERM, saved at step 7", Outcome.DRAINED)
    (late,) = step(state, drains, 66.0)[1]
    assert late == lifecycle.Exit(1, "SIGTERM, no checkpoint within 61 s", Outcome.DRAINED)
    (alone,) = step(state, replace(drains, progress={}), 6.0)[1]
    assert isinstance(alone, lifecycle.Exit)
    assert alone.code == 143


def test_ranks_that_wait_for_growth_save_before_their_node_drains() -> None:
    grows = replace(HEALTHY, content=world(1, save=True, grow=True), reports=ABLE)
    waits = replace(grows, progress=at_step(4, True, True))
    state, _ = step(TRAINS, waits, 0.0)
    state, actions = step(state, replace(waits, drains=True), 1.0)
    assert actions == [Tell.DRAIN, lifecycle.Hold("save-and-hold")]
    assert step(state, replace(waits, drains=True), 2.0) == (state, [])
    saved = replace(waits, drains=True, progress=at_step(7, True, True))
    (left,) = step(state, saved, 3.0)[1]
    assert left == lifecycle.Exit(143, "SIGTERM, saved at step 7", Outcome.DRAINED)
    # Those of other nodes save as well, since the world does not only grow any more.
    leaves = replace(waits, content=world(1, save=True))
    state, _ = step(TRAINS, waits, 0.0)
    assert step(state, leaves, 1.0)[1] == [lifecycle.Hold("save-and-hold")]


def test_a_drain_of_a_node_whose_processes_get_out_ends_it() -> None:
    stop = Stop(1, "node 1 left")
    state, _ = step(TRAINS, replace(HEALTHY, content=stop), 0.0)
    (left,) = step(state, Seen(drains=True), 0.0)[1]
    assert isinstance(left, lifecycle.Exit)
    assert (left.code, left.outcome) == (143, Outcome.DRAINED)


def test_what_hangs_is_killed_and_what_can_leave_is_ordered_to() -> None:
    def leaves(reports: dict[int, Report], *, hangs: bool = False) -> list[Action]:
        stop = Stop(1, "why", hangs)
        seen = replace(HEALTHY, content=stop, reports=reports)
        return step(TRAINS, seen, 0.0)[1]

    both = frozenset({0, 1})
    assert leaves({}) == [lifecycle.End(both, signal.SIGTERM)]
    assert leaves({}, hangs=True) == [Tell.STACKS, lifecycle.End(both, signal.SIGKILL)]
    assert leaves(ABLE, hangs=True) == [Tell.STACKS, lifecycle.OrderToLeave(5, both)]
    failed = JobEnded(Outcome.FAILED, "no restart left", hangs=True)
    told, exits = step(TRAINS, replace(HEALTHY, content=failed), 0.0)[1]
    assert (told, type(exits)) == (Tell.STACKS, lifecycle.Exit)
    mixed = leaves({1: ABLE[1]})
    assert mixed == [
        lifecycle.OrderToLeave(5, frozenset({1})),
        lifecycle.End(frozenset({0}), signal.SIGKILL),
    ]


def test_pauses_grow_until_a_start_makes_a_step() -> None:
    restart = Stop(1, "rank 0 failed")
    state, pauses = TRAINS, []
    made: dict[int, RankProgress] = {0: RankProgress(step=1, time=0.0)}
    for progress in ({}, {}, {}, {}, made, {}):
        failed = Seen(living=frozenset({1}), has_failed=True, progress=progress)
        state, actions = step(replace(state, phase=Phase.TRAIN), failed, 0.0)
        assert actions == [lifecycle.End(frozenset({1}), signal.SIGTERM)]
        ended = replace(failed, living=frozenset())
        state, actions = step(state, ended, 0.0)
        assert actions == [Tell.FAILURES]
        assert step(state, ended, 0.0) == (state, [])
        state, (join,) = step(state, replace(ended, content=restart), 0.0)
        assert isinstance(join, lifecycle.JoinRound)
        pauses.append(join.pause)
        state, _ = step(state, Seen(), 0.0)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (Seen(content=Rejected("a broken machine")), lifecycle.EXIT_REPLACE),
        (Seen(content=JobEnded(Outcome.FAILED, "no restart left")), lifecycle.EXIT_JOB_FAILED),
        (Seen(content=world(1), drains=True), lifecycle.EXIT_DRAINED),
        (Seen(content=world(1), silence=0.1), None),
    ],
    ids=["rejected", "job failed", "drains", "no master"],
)
def test_what_follows_from_failures(seen: Seen, code: int | None) -> None:
    state, _ = step(TRAINS, Seen(content=world(1), has_failed=True), 0.0)
    state, actions = step(state, Seen(content=world(1)), 0.0)
    assert actions == [Tell.FAILURES]
    assert step(state, Seen(content=world(1)), LATE) == (state, [])
    (then,) = step(state, seen, LATE)[1]
    found = then.code if isinstance(then, lifecycle.Exit) else None
    assert found == code, then


# Every order of events ----------------------------------------------------------------------------


class Process(NamedTuple):
    able: bool  # whether its function can be entered again
    status: str  # starts, trains, hangs, out, done, failed, or ended by a signal
    world: int
    report: Report | None = None
    order: tuple[bool, int, int] | None = None  # whether to enter, its number, the world
    is_ending: bool = False  # by a signal that it handles

    @property
    def lives(self) -> bool:
        return self.is_inside or self.status == "out"

    @property
    def is_inside(self) -> bool:
        return self.status in {"starts", "trains", "hangs"}

    def ended(self, status: str) -> Process:
        return self._replace(status=status, report=None, is_ending=False)


class Machine(NamedTuple):
    state: State
    processes: tuple[Process, ...]
    round: int = 0
    waits: bool = False  # for the next round
    exit: int | None = None


class Job(NamedTuple):
    """Two nodes and their master."""

    nodes: tuple[Machine, ...]
    round: int = 0
    is_stopped: bool = True
    broken: int = 0  # the newest world in which a process has died or left
    finished: frozenset[int] = frozenset()
    outcome: Outcome | None = None
    num_charged: int = 0
    num_failed: int = 0

    def with_node(self, number: int, node: Machine) -> Job:
        nodes = tuple(node if place == number else one for place, one in enumerate(self.nodes))
        return self._replace(nodes=nodes)

    def with_process(self, number: int, rank: int, process: Process) -> Job:
        node = self.nodes[number]
        old = node.processes[rank]
        processes = (*node.processes[:rank], process, *node.processes[rank + 1 :])
        job = self.with_node(number, node._replace(processes=processes))
        if old.is_inside and not process.is_inside and process.status != "done":
            job = job._replace(broken=max(job.broken, old.world))
        return job


MAX_RESTARTS = 1
MAX_FAILED = 2
COST = {"failed": 1, "hangs": 2}


def seen_by(job: Job, number: int) -> Seen:
    node = job.nodes[number]
    content: Content
    if job.outcome is not None:
        content = JobEnded(job.outcome, "")
    elif node.round < job.round or job.is_stopped:
        content = Stop(node.round, "")
    else:
        content = world(node.round)
    return Seen(
        living=frozenset(rank for rank, one in enumerate(node.processes) if one.lives),
        has_failed=any(one.status == "failed" for one in node.processes),
        reports={
            rank: one.report
            for rank, one in enumerate(node.processes)
            if one.lives and one.report is not None
        },
        content=content,
    )


def do(job: Job, number: int, action: Action) -> Job:  # noqa: C901 - one case an action
    """What the shell, the processes and the master make of an action."""
    node = job.nodes[number]
    match action:
        case lifecycle.OrderToLeave(order, ranks):
            for rank in ranks:
                process = job.nodes[number].processes[rank]
                job = job.with_process(number, rank, process._replace(order=(False, order, 0)))
        case lifecycle.End(ranks, signal_number):
            for rank in ranks:
                process = job.nodes[number].processes[rank]
                now = process._replace(is_ending=True)
                if signal_number is signal.SIGKILL:
                    now = process.ended("ended")
                job = job.with_process(number, rank, now)
        case lifecycle.JoinRound():
            job = job.with_node(number, node._replace(waits=True))
        case lifecycle.Enter(order, out):
            for rank, process in enumerate(node.processes):
                if rank in out:
                    assert process.status == "out"
                    now = process._replace(order=(True, order, node.round))
                else:
                    assert not process.lives
                    now = Process(process.able, "starts", node.round)
                job = job.with_process(number, rank, now)
        case Tell.FAILURES:
            if node.round == job.round and not job.is_stopped and job.outcome is None:
                if job.num_charged == MAX_RESTARTS:
                    job = job._replace(outcome=Outcome.FAILED)
                else:
                    job = job._replace(num_charged=job.num_charged + 1)
                job = job._replace(is_stopped=True)
        case Tell.FINISH:
            if node.round == job.round and not job.is_stopped:
                job = job._replace(finished=job.finished | {number})
                if len(job.finished) == len(job.nodes):
                    job = job._replace(outcome=Outcome.SUCCEEDED)
        case lifecycle.Exit(code):
            processes = tuple(one.ended("failed") if one.lives else one for one in node.processes)
            job = job.with_node(number, node._replace(processes=processes, exit=code))
    return job


def after_step(job: Job, number: int, now: float) -> Job:
    node = job.nodes[number]
    state, actions = step(node.state, seen_by(job, number), now)
    job = job.with_node(number, node._replace(state=state))
    for action in actions:
        job = do(job, number, action)
    return job


def events(job: Job) -> Iterator[Job]:
    running = [node for node in job.nodes if node.exit is None]
    if running and all(node.waits for node in running) and job.outcome is None:
        number = job.round + 1
        nodes = tuple(node._replace(waits=False, round=number) for node in job.nodes)
        yield job._replace(nodes=nodes, round=number, is_stopped=False, finished=frozenset())
    if any(one.status == "hangs" for node in job.nodes for one in node.processes):
        yield job._replace(is_stopped=True)
    for number, node in enumerate(job.nodes):
        if node.exit is not None:
            continue
        if node.waits:
            if job.outcome is not None:  # the master refuses it
                yield job.with_node(number, node._replace(exit=1, waits=False))
            continue
        yield after_step(job, number, 0.0)
        if node.state.phase is Phase.CHANGE:
            yield after_step(job, number, LATE)
        for rank, process in enumerate(node.processes):
            for changed in lives_on(job, process):
                changed_job = job.with_process(number, rank, changed)
                cost = COST.get(changed.status, 0)
                yield changed_job._replace(num_failed=job.num_failed + cost)


def lives_on(job: Job, process: Process) -> Iterator[Process]:
    if process.status == "starts":
        report = Report() if process.able else None
        yield process._replace(status="trains", report=report)
    if process.status == "hangs":
        return
    if process.is_ending:
        yield process.ended("ended")
    if process.status == "trains":
        if process.world > job.broken:
            yield process.ended("done")
        elif process.report is not None:  # it loses a peer
            lost = replace(process.report, is_out=True, error="gone")
            yield process._replace(status="out", report=lost)
        if job.num_failed < MAX_FAILED:
            yield process.ended("failed")
        if job.num_failed == 0:
            yield process._replace(status="hangs")
    if process.report is None or process.order is None:
        return
    enters, number, world_number = process.order
    if pending(process.report, Order(number)) is None:
        return
    if not process.report.is_out:
        yield process._replace(status="out", report=replace(process.report, is_out=True))
    elif enters:
        yield process._replace(status="trains", report=Report(number=number), world=world_number)
    else:
        yield process._replace(report=replace(process.report, number=number, error=""))


def check(job: Job) -> None:
    """What must hold at any moment."""
    worlds: dict[int, int] = {}
    for node in job.nodes:
        inside = {process.world for process in node.processes if process.is_inside}
        assert len(inside) <= 1, "a node trains in two worlds"
        if node.state.phase in {Phase.TRAIN, Phase.FINISHED}:
            assert inside <= {node.round}, "a process of an older world trains"
        for process in node.processes:
            if process.is_inside:
                worlds[process.world] = worlds.get(process.world, 0) + 1
    whole = [number for number, count in worlds.items() if count == sum(map(size_of, job.nodes))]
    assert len(whole) <= 1, "two worlds train"
    if job.outcome is Outcome.SUCCEEDED:
        codes = {node.exit for node in job.nodes} - {None}
        assert codes <= {0}, "a finished job is called failed"
        assert all(one.status == "done" for node in job.nodes for one in node.processes)
    else:
        assert all(node.exit != 0 for node in job.nodes), "a failed job is called finished"


def size_of(node: Machine) -> int:
    return len(node.processes)


@pytest.mark.parametrize(
    ("first", "second"),
    [("pp", "p"), ("rr", "r"), ("rp", "r"), ("r", "p")],
    ids=["plain", "re-entrant", "mixed", "one each"],
)
def test_under_every_order_of_events_a_job_ends_as_it_should(first: str, second: str) -> None:
    nodes = []
    for kinds_of_node in (first, second):
        state, actions = begin(limits(len(kinds_of_node)))
        assert actions == [lifecycle.JoinRound()]
        processes = tuple(Process(one == "r", "ended", 0) for one in kinds_of_node)
        nodes.append(Machine(state, processes, waits=True))
    start = Job(tuple(nodes))
    numbers, left = {start: 0}, [start]  # each state has a number
    before: list[list[int]] = [[]]
    while left:
        job = left.pop()
        check(job)
        for following in events(job):
            number = numbers.setdefault(following, len(numbers))
            if number == len(before):
                before.append([])
                left.append(following)
            before[number].append(numbers[job])
    ended = [job for job in numbers if all(node.exit is not None for node in job.nodes)]
    assert {job.outcome for job in ended} == {Outcome.SUCCEEDED, Outcome.FAILED}
    reached = [numbers[job] for job in ended]
    reaches_end = set(reached)
    while reached:
        for earlier in before[reached.pop()]:
            if earlier not in reaches_end:
                reaches_end.add(earlier)
                reached.append(earlier)
    assert len(reaches_end) == len(before), "there are states in which all wait for ever"
