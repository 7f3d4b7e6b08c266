"""The state of a job that survives a restart of the master, as a pure state machine.

`apply` takes a job, an event and the time, and returns the job after it, which the journal keeps.
Most events are messages of agents, applied as they came: a `Join` with the id and the name that the
master has given to the node. What changes with every heartbeat is in `remesh.elastic.liveness`, and
the master makes an event of it when a node is lost, a checkpoint is saved, or the job hangs.
`content_of` is the other direction: what a node has to do, as follows from the job.

A world that the rendezvous has formed may have to be *checked* before its processes start: its
members then get tests in place of their assignments. Faulty nodes are excluded, and the others form
a new world.

Before a world grows, or when one of its nodes has to leave, the job makes a *save request*. The
world changes when all ranks have saved and wait, or a grace time has passed, so scripts that report
no steps delay it by that time at most. If it only grows and all processes can go on, they wait
without a save: the state is in their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import TypeAlias

import msgspec

from remesh.elastic import checks, protocol, rendezvous
from remesh.elastic.checks import CheckResult, RunningCheck
from remesh.elastic.failures import FailureAction, Patterns, ProcessFailure, decide
from remesh.elastic.progress import TrainingProgress
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT, Content, Drain, Join, Leave, Sender
from remesh.elastic.rendezvous import Node, Outcome, Rendezvous

MAX_RECORDS = 500
"""Incidents, and lines of history, that are kept."""


class NodeLost(msgspec.Struct, frozen=True, kw_only=True):
    """A node is lost."""

    node_id: int
    incarnation: str  # its agent
    is_closed: bool = False
    """Whether its agent has died, by its connections; otherwise no message has come for too long.
    """


class NodeHeld(msgspec.Struct, frozen=True):
    """An operator excludes a node for a reason; without one, it may be used again."""

    node_id: int
    reason: str | None


class CheckpointSaved(msgspec.Struct, frozen=True):
    """A checkpoint of this step is committed."""

    step: int


class RanksWait(msgspec.Struct, frozen=True):
    """All ranks of the world have saved, if that is needed, and wait for the world to change."""

    round: int


class HangDetected(msgspec.Struct, frozen=True):
    """No rank has finished a step for too long."""

    round: int
    reason: str


class ProgressRecorded(msgspec.Struct, frozen=True):
    """How far the training is; recorded every few seconds."""

    progress: TrainingProgress


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


NodeEvent: TypeAlias = Join | protocol.ReportFailures | Leave | Drain | protocol.ReportTest
"""Messages of agents that are events."""
Event: TypeAlias = (
    NodeEvent
    | NodeLost
    | NodeHeld
    | CheckpointSaved
    | RanksWait
    | HangDetected
    | ProgressRecorded
    | Tick
)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the master treats a job."""

    heartbeat_timeout: float = HEARTBEAT_TIMEOUT  # seconds of silence after which a node is lost
    check: bool = False  # test nodes that have not been tested before they train
    check_timeout: float = 120.0  # seconds within which a test must be reported
    save_grace: float = 60.0  # seconds that a growing world waits for a checkpoint
    hang_timeout: float | None = None
    """Seconds without a step after which the job hangs; 0: never; None: as follows from its steps
    (`progress.hang_limit`)."""
    patterns: Patterns = Patterns()  # what distinguishes the kinds of failures


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a node in a round, or that it was lost or left before its processes ended."""

    node_id: int
    round: int
    time: float  # when the master knew it
    text: str  # what follows from the failures, or what happened, in a sentence
    failures: tuple[ProcessFailure, ...] = ()  # the processes
    lost: bool = False  # whether the node's messages stopped; otherwise it sent `Leave`


class HistoryLine(msgspec.Struct, frozen=True):
    """A line of the job's history."""

    time: float
    text: str


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the ranks should save before the world changes."""

    deadline: float  # when the world changes without it
    draining: frozenset[int] = frozenset()  # ids of the nodes that have to leave
    is_over: bool = False  # whether it is saved, overdue, or not needed any more


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job."""

    policy: Policy  # how the job is treated
    began: float | None = None  # when its first node joined
    ended: float | None = None  # when it ended; None while it runs
    rendezvous: Rendezvous = Rendezvous()  # nodes and world
    max_restarts: int = 0  # restarts that each node may be charged with
    charges: dict[int, int] = {}  # restarts that each node was charged with, by node id
    hang_charges: int = 0  # restarts after hangs
    names: dict[str, int] = {}  # node ids by name
    suspect: tuple[int, str] | None = None
    """The node whose processes failed as those of others do when one fails, and what was said of
    it, as long as nothing explains it; charged when the next round begins."""
    incidents: tuple[Incident, ...] = ()  # failures, and nodes that were lost or left, oldest first
    checked: dict[int, str] = {}  # incarnations that passed a check, by node id
    must_check: bool = False  # whether the next world is to be checked, known nodes included
    check: RunningCheck | None = None  # the check that runs
    num_checks: int = 0  # checks so far
    check_findings: dict[int, str] = {}  # what the last check found, as text by node id
    save_request: SaveRequest | None = None
    """The checkpoint that is awaited before the world changes."""
    saved_step: int | None = None  # the step of the newest checkpoint
    progress: TrainingProgress | None = None  # how far the training was when that was recorded last
    history: tuple[HistoryLine, ...] = ()  # what happened


def assign_id(
    job: JobState, name: str, wanted: int | None, has_living_agent: Callable[[int], bool | None]
) -> tuple[int, str] | None:
    """The id of a node, and the name that this id has from now on.

    It is the requested id, the one its name had, or a free one. If an agent of that name
    lives, the name gets a number. None as long as it is not known whether the id can be had
    (`has_living_agent` returns None).
    """
    labels = chain([name], (f"{name} ({number})" for number in count(2)))
    if wanted is not None:
        lives = has_living_agent(wanted)
        if lives:
            raise ValueError(
                f"node id {wanted} belongs to another agent, which lives; give each node an id of "
                "its own"
            )
        label = next(label for label in labels if job.names.get(label) in (None, wanted))
        return None if lives is None else (wanted, label)
    for label in labels:
        if label not in job.names:
            taken = job.rendezvous.newest  # of most jobs all ids below their number
            return next(number for number in count(len(taken)) if number not in taken), label
        lives = has_living_agent(job.names[label])
        if not lives:
            return None if lives is None else (job.names[label], label)
    raise AssertionError("labels never end")


def apply(job: JobState, event: Event, now: float) -> JobState:
    """The job after an event; nothing happens to it before the first node joins."""
    if job.began is None and not isinstance(event, Join):
        return job
    return _settle(_apply(job, event, job.rendezvous, now), now)


def _apply(job: JobState, event: Event, nodes: Rendezvous, now: float) -> JobState:
    """The job after an event, before what follows from it."""
    match event:
        case Join():
            return _join(job, event, now)
        case Leave():
            return _leave(job, event, nodes, now)
        case NodeLost(node_id=node_id, incarnation=incarnation, is_closed=is_closed):
            silent = "no message came within the heartbeat timeout"
            why = "its agent has died, its connections are closed" if is_closed else silent
            text = f"node {node_id} is lost: {why}"
            job = _note(_depart(job, node_id, incarnation, text, now, lost=True), now, text)
            return _advance(job, rendezvous.remove(nodes, node_id, incarnation, now), now)
        case NodeHeld(node_id=node_id, reason=reason):
            job = _hold(job, node_id, reason, now)
        case protocol.ReportFailures():
            return _fail(job, event, nodes, now)
        case Drain():
            return _drain(job, event, nodes, now)
        case protocol.ReportTest():
            return _tested(job, event, nodes)
        case CheckpointSaved(step) if job.saved_step is None or step > job.saved_step:
            return _replace(job, saved_step=step)
        case RanksWait(number) if number == nodes.round:
            job = _end_request(job)
        case HangDetected(number, reason) if number == nodes.round and nodes.broken is None:
            return _hang(_note(job, now, f"the job hangs: {reason}"), reason, nodes, now)
        case ProgressRecorded(progress):
            return _replace(job, progress=progress)
    return job


def _replace(job: JobState, **changes: object) -> JobState:
    return msgspec.structs.replace(job, **changes)


def _note(job: JobState, now: float, text: str) -> JobState:
    return _replace(job, history=(*job.history, HistoryLine(now, text))[-MAX_RECORDS:])


def _depart(
    job: JobState, node_id: int, incarnation: str, text: str, now: float, *, lost: bool
) -> JobState:
    """Record that a member of the world is gone: it explains why others fail."""
    nodes = job.rendezvous
    member = nodes.member(node_id)
    if member is None or member.incarnation != incarnation or node_id not in nodes.active:
        return job
    incident = Incident(node_id=node_id, round=nodes.round, time=now, text=text, lost=lost)
    return _replace(_record(job, incident), suspect=None)


def _record(job: JobState, incident: Incident) -> JobState:
    return _replace(job, incidents=(*job.incidents, incident)[-MAX_RECORDS:])


def _advance(job: JobState, after: Rendezvous, now: float) -> JobState:
    """Take over the next rendezvous, and begin what a new round begins."""
    before = job.rendezvous
    if after is before or before.outcome is not None:
        return job
    job = _replace(job, rendezvous=after)
    if after.world is not before.world:
        members = rendezvous.listed(node.id for node in after.world)
        job = _note(job, now, f"round {after.round}: nodes {members}")
        job = _replace(job, save_request=None, check=None)
        job = _begin_check(job, after, now)
        return _charge_suspect(job, after, now)
    if after.outcome is not None and before.outcome is None:
        job = _note(job, now, f"the job has {after.outcome}: {after.reason}")
        job = _replace(job, ended=now)
    return job


def _join(job: JobState, event: Join, now: float) -> JobState:
    if job.began is None:
        nodes = rendezvous.start(event.settings, now)
        job = _replace(job, began=now, rendezvous=nodes, max_restarts=event.max_restarts)
        job = _note(job, now, f"restart budget: {event.max_restarts} restarts per node")
    node = node_of(event)
    if event.after_round > job.rendezvous.round:
        text = (
            f"node {node.id} comes from round {event.after_round}, the journal knows only "
            f"{job.rendezvous.round} rounds: it was lost, or is an old copy"
        )
        job = _note(job, now, text)
    if job.names.get(node.name) != node.id:
        job = _replace(job, names={**job.names, node.name: node.id})
    member = job.rendezvous.member(node.id)
    if member is not None and member.incarnation != node.incarnation:
        job = _replace(job, suspect=None)  # its agent has died, as others may have noticed
    return _advance(job, rendezvous.join(job.rendezvous, node, event.after_round, now), now)


def node_of(event: Join) -> Node:
    """The node that joins, in a `Join` that has an id."""
    assert event.node_id is not None, "the master assigns an id before it applies the event"
    return Node(
        id=event.node_id,
        incarnation=event.incarnation,
        name=event.name,
        address=event.address,
        port=event.port,
        num_processes=event.num_processes,
    )


def _leave(job: JobState, event: Leave, nodes: Rendezvous, now: float) -> JobState:
    text = f"node {event.node_id} leaves, {event.outcome}: {event.reason}"
    if event.outcome is not Outcome.SUCCEEDED:
        job = _depart(job, event.node_id, event.incarnation, text, now, lost=False)
    after = rendezvous.leave(nodes, event.node_id, event.incarnation, event.outcome, now)
    return _advance(_note(job, now, text), after, now)


def _fail(job: JobState, event: protocol.ReportFailures, nodes: Rendezvous, now: float) -> JobState:
    node = nodes.known(event.node_id)
    if node is None or node.incarnation != event.incarnation:
        return job
    # A node says it again, in each new session, until it is in another world. It has joined after
    # it had said it first, and the records of long ago are gone.
    has_joined = node.id in nodes.ready or (event.round < nodes.round and node.id in nodes.active)
    known = {(each.node_id, each.round) for each in job.incidents if each.failures}
    if not event.failures or has_joined or (event.node_id, event.round) in known:
        return job
    action, text = decide(event.failures, num_ranks=nodes.num_ranks, patterns=job.policy.patterns)
    has_budget = True
    if action is FailureAction.CHARGE:
        job, text, has_budget = _charge(job, node.id, text)
    incident = Incident(
        node_id=node.id, round=event.round, time=now, text=text, failures=event.failures
    )
    job = _note(_record(job, incident), now, text)
    if action is not FailureAction.EXCUSE:
        job = _replace(job, suspect=None)
    elif stop_reason(job, node.id, event.round) is None:
        job = _replace(job, suspect=(node.id, text))
    if not has_budget:
        return _advance(job, rendezvous.end(nodes, Outcome.FAILED, text), now)
    if action is FailureAction.REPLACE:
        job = _replace(job, must_check=True)
        return _advance(job, rendezvous.exclude(nodes, node, text, now), now)
    if event.round == nodes.round and node.id in nodes.active and nodes.broken is None:
        # The others need not wait until it joins.
        return _advance(job, rendezvous.break_world(nodes, text), now)
    return job


def _charge(job: JobState, node_id: int, reason: str) -> tuple[JobState, str, bool]:
    """Charge a restart to a node; what is said of it, and whether its budget had one left."""
    charged, most = job.charges.get(node_id, 0), job.max_restarts
    if charged >= most:
        counts = f"{charged} of {most} restarts"
        return job, f"{reason}; no restart left: {counts} charged to its node", False
    job = _replace(job, charges={**job.charges, node_id: charged + 1})
    return job, f"{reason}; {charged + 1} of {most} restarts charged to its node", True


def _charge_suspect(job: JobState, nodes: Rendezvous, now: float) -> JobState:
    """Charge the failure that nothing in the round before explains, if there is one."""
    if job.suspect is None:
        return job
    (node_id, text), job = job.suspect, _replace(job, suspect=None)
    reason = f"{text}, but no other process has failed by itself"
    job, text, has_budget = _charge(job, node_id, reason)
    if not has_budget:
        return _advance(job, rendezvous.end(nodes, Outcome.FAILED, text), now)
    return _note(job, now, text)


def _drain(job: JobState, event: Drain, nodes: Rendezvous, now: float) -> JobState:
    node = nodes.known(event.node_id)
    if node is None or node.incarnation != event.incarnation or node.id not in nodes.active:
        return job
    if job.save_request is not None and node.id in job.save_request.draining:
        return job
    text = f"node {node.id} has to leave within {event.seconds:g} s: {event.reason}"
    return _note(_ask_to_save(job, [node.id], now, event.seconds), now, text)


def _ask_to_save(job: JobState, node_ids: list[int], now: float, seconds: float) -> JobState:
    """Request a checkpoint before nodes leave."""
    old = frozenset[int]() if job.save_request is None else job.save_request.draining
    request = SaveRequest(deadline=now + seconds, draining=old.union(node_ids))
    return _replace(job, save_request=request)


def _hold(job: JobState, node_id: int, reason: str | None, now: float) -> JobState:
    """Exclude a node; if it is in the world, that ends when the others can go on without it."""
    if job.rendezvous.outcome is not None:
        return job
    job = _replace(job, rendezvous=rendezvous.hold(job.rendezvous, node_id, reason, now))
    if reason is not None:
        return _note(job, now, f"node {node_id} is excluded by hand: {reason}")
    request = job.save_request
    if request is not None and node_id in request.draining:
        draining = request.draining - {node_id}
        request = msgspec.structs.replace(request, draining=draining) if draining else None
        job = _replace(job, save_request=request)
    return _note(job, now, f"node {node_id} may be used again")


def _hang(job: JobState, why: str, nodes: Rendezvous, now: float) -> JobState:
    """Let all start again, as long as the budget for hangs allows it."""
    reason, charged = f"the job hung: {why}", job.hang_charges
    nodes = rendezvous.break_world(nodes, reason, hangs=True)
    if charged < job.max_restarts:
        return _advance(_replace(job, hang_charges=charged + 1), nodes, now)
    counts = f"{charged} of {job.max_restarts} restarts"
    reason = f"{reason}; no restart left: {counts} charged to hangs"
    return _advance(job, rendezvous.end(nodes, Outcome.FAILED, reason), now)


def _settle(job: JobState, now: float) -> JobState:
    """The job after all that follows from it and the time alone."""
    job = _advance_check(job, now)
    job = _end_request_in_time(_advance(job, rendezvous.tick(job.rendezvous, now), now), now)
    nodes, asked, size = job.rendezvous, job.save_request, rendezvous.larger_size(job.rendezvous)
    if asked is not None and is_for_growth(job) and size is None:
        asked, job = None, _replace(job, save_request=None)  # the nodes that had come have gone
    if nodes.held and job.check is None:
        held = rendezvous.leaving(nodes)
        if held and (asked is None or not asked.draining.issuperset(held)):
            return _end_request_in_time(_ask_to_save(job, held, now, job.policy.save_grace), now)
        if held and not awaits_checkpoint(job):
            text = f"{rendezvous.listed_nodes(held)} excluded by hand"
            return _advance(job, rendezvous.break_world(nodes, text), now)
        if asked is not None and asked.is_over and nodes.held.keys() >= asked.draining > set():
            return _replace(job, save_request=None)  # they stay: the others have left meanwhile
    if job.check is None and job.save_request is None and nodes.active and size is not None:
        request = SaveRequest(deadline=now + job.policy.save_grace)
        text = f"the world can grow to {size} nodes: {len(nodes.usable)} more are ready"
        return _end_request_in_time(_note(_replace(job, save_request=request), now, text), now)
    return job


def stop_reason(job: JobState, node_id: int, round_of_node: int) -> str | None:
    """Why a node should stop the processes of a round now; None if it should go on."""
    nodes = job.rendezvous
    reason = rendezvous.restart_reason(nodes, node_id, round_of_node)
    if reason is None and nodes.outcome is None and not awaits_checkpoint(job):
        size = rendezvous.larger_size(nodes)
        if size is not None:
            reason = f"{rendezvous.listed_nodes(nodes.usable)} can join, the world grows to {size}"
    return reason


def is_for_growth(job: JobState) -> bool:
    """True if a checkpoint is requested only because the world can grow."""
    return job.save_request is not None and not job.save_request.draining


def awaits_checkpoint(job: JobState) -> bool:
    """True if the requested checkpoint is neither saved nor overdue."""
    return job.save_request is not None and not job.save_request.is_over


def _end_request_in_time(job: JobState, now: float) -> JobState:
    """Wait for the requested checkpoint no longer if it is overdue."""
    asked = job.save_request
    return _end_request(job) if asked is not None and now >= asked.deadline else job


def _end_request(job: JobState) -> JobState:
    request = job.save_request
    if request is None or request.is_over:
        return job
    return _replace(job, save_request=msgspec.structs.replace(request, is_over=True))


def _begin_check(job: JobState, nodes: Rendezvous, now: float) -> JobState:
    unknown = [node.id for node in nodes.world if job.checked.get(node.id) != node.incarnation]
    if not job.must_check and not (job.policy.check and unknown):
        return job
    number = job.num_checks + 1
    check = checks.begin(number, [node.id for node in nodes.world], now)
    return _replace(job, check=check, num_checks=number)


def _tested(job: JobState, event: protocol.ReportTest, nodes: Rendezvous) -> JobState:
    check = job.check
    if check is None or (event.check, event.test_round) != (check.number, len(check.results)):
        return job
    member = nodes.member(event.node_id)
    if member is None or member.incarnation != event.incarnation:
        return job
    reports = {**check.reports, event.node_id: event.result}
    return _replace(job, check=msgspec.structs.replace(check, reports=reports))


def _advance_check(job: JobState, now: float) -> JobState:
    check, nodes = job.check, job.rendezvous
    if check is None:
        return job
    if nodes.outcome is not None:
        return _replace(job, check=None)
    if len(nodes.active) != len(nodes.world):
        return _rejoin(_replace(job, check=None), now)  # a member was lost meanwhile
    after = checks.advance(check, now, job.policy.check_timeout)
    if isinstance(after, CheckResult):
        return _end_check(job, after, nodes, now)
    return job if after is check else _replace(job, check=after)


def _end_check(job: JobState, result: CheckResult, nodes: Rendezvous, now: float) -> JobState:
    out = result.faulty
    findings = dict.fromkeys(result.healthy, "healthy") | {**result.suspects, **out}
    job = _replace(
        job,
        check=None,
        must_check=False,
        check_findings=findings,
        checked={node.id: node.incarnation for node in nodes.world if node.id not in out},
    )
    said = [f"node {node_id} {text}" for node_id, text in sorted(findings.items())]
    said = [text for text in said if not text.endswith(" healthy")] or ["all nodes are healthy"]
    for group in result.connections:
        said.append(f"the connection among nodes {', '.join(map(str, group))} failed")
    job = _note(job, now, f"check {job.num_checks}: {'; '.join(said)}")
    for node in nodes.world:
        if node.id in out:
            reason = f"check {job.num_checks}: {out[node.id]}"
            job = _advance(job, rendezvous.exclude(job.rendezvous, node, reason, now), now)
    return _rejoin(job, now) if out else job


def _rejoin(job: JobState, now: float) -> JobState:
    """Let the members that are left join again: none has started processes yet."""
    before = job.rendezvous
    for node in before.world:
        if node.id in before.active:
            after = rendezvous.join(job.rendezvous, node, before.round, now)
            job = _advance(job, after, now)
    return job


def content_of(job: JobState, sender: Sender) -> Content:
    """What the node of a sender has to do now."""
    nodes, node_id, incarnation = job.rendezvous, sender["node_id"], sender["incarnation"]
    if nodes.outcome is not None:
        return protocol.JobEnded(nodes.outcome, nodes.reason, nodes.hangs)
    if incarnation in nodes.replaced:
        return protocol.Rejected(f"another agent has taken over node id {node_id}")
    excluded, reason = nodes.excluded.get(node_id, ("", ""))
    if excluded == incarnation:
        return protocol.Rejected(reason)
    ready = nodes.ready.get(node_id)
    if ready is not None and ready.incarnation == incarnation:
        return _waiting(job, node_id)
    member = nodes.member(node_id)
    if member is None or member.incarnation != incarnation:
        reason = f"round {sender['round']} is over for node {node_id}"
        return protocol.Stop(sender["round"], reason)
    if node_id in nodes.active and job.check is not None:
        return _test_of(job, job.check, nodes, node_id)
    why = stop_reason(job, node_id, nodes.round)
    if why is None:
        return _assignment(job, node_id)
    return protocol.Stop(nodes.round, why, nodes.hangs)


def _assignment(job: JobState, node_id: int) -> protocol.Assignment:
    nodes, awaits = job.rendezvous, awaits_checkpoint(job)
    place = nodes.place(node_id)
    assert place is not None
    return protocol.Assignment(
        nodes.round,
        place,
        len(nodes.world),
        nodes.first_ranks[place],
        nodes.num_ranks,
        nodes.world[0],
        save=awaits,
        grow=awaits and is_for_growth(job),
    )


def _test_of(job: JobState, check: RunningCheck, nodes: Rendezvous, node_id: int) -> Content:
    if node_id in check.reports:
        return _waiting(job, node_id)
    group = next((group for group in check.groups if node_id in group), ())
    members = tuple(member for member in map(nodes.member, group) if member is not None)
    rank = group.index(node_id)
    return protocol.NodeTest(nodes.round, check.number, len(check.results), members, rank)


def _waiting(job: JobState, node_id: int) -> protocol.Waiting:
    is_held = node_id in job.rendezvous.held and node_id in job.rendezvous.ready
    return protocol.Waiting(_wait_reason(job, node_id), is_held=is_held)


def _wait_reason(job: JobState, node_id: int) -> str:
    nodes = job.rendezvous
    if node_id in nodes.held and (node := nodes.ready.get(node_id)) is not None:
        return (
            f"an operator has excluded it: {nodes.held[node_id]}; it is used again after "
            f"`remesh node readmit {node.name}`"
        )
    runs = f"round {nodes.round} runs on {len(nodes.active)} nodes; " if nodes.active else ""
    settings = nodes.settings
    return (
        f"{runs}{len(nodes.usable)} nodes are ready, the world has {settings.min_nodes} to "
        f"{settings.max_nodes} in multiples of {settings.node_unit}"
    )


def concerns_all(before: JobState, after: JobState) -> bool:
    """True if nodes other than those that have sent something may have to do something else now."""
    return _shared(before) != _shared(after)


def _shared(job: JobState) -> tuple[object, ...]:
    """What instructions follow from that is not of one node alone."""
    nodes, check = job.rendezvous, job.check
    stage = None if check is None else (check.number, len(check.results))
    world = nodes.round, nodes.outcome, nodes.broken, rendezvous.larger_size(nodes)
    used = nodes.excluded, nodes.replaced, nodes.held
    return world, used, stage, job.save_request
