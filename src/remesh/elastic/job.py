"""The state of a job that survives a restart of the master, as a pure state machine.

`apply` takes a job, an event and the time, and returns the job after it, which the journal keeps.
Most events are messages of agents, applied as they came: a `Join` with the id and the name that the
master has given to the node. What changes with every heartbeat is in `remesh.elastic.liveness`, and
the master makes an event of it when a node is lost, a checkpoint is saved, or the job hangs.
`content_of` is the other direction: what a node has to do, as follows from the job.

Every agent *joins* before it starts processes, and again after each time they have stopped. A node
that has joined is *ready*. When enough are ready, they become the *world* of the next round:
ordered by node id, clamped to `max_nodes`, trimmed to a multiple of `node_unit`. The other nodes
stay ready, and restart nothing, until a larger world is possible.

Members of the world are *active* from its beginning until they join again, finish, leave or are
lost. A new world is formed only when no member is active any more; until then `stop_reason` tells
the active ones that they should stop, and why. A round begins at once if nothing is gained by
waiting: `max_nodes` are ready, or every member of the last world is ready or known to be gone.
Otherwise it waits until nothing has changed for `last_call` seconds.

Messages may be lost, repeated and reordered. Joining says after which round it happens, so an old
copy of it changes nothing; and it carries the agent's incarnation, so messages of an agent that was
replaced do not count for its successor.

A world may have to be *checked* before its processes start: its members then get tests in place of
their assignments. Faulty nodes are excluded, and the others form a new world.

Before a world grows, or when one of its nodes has to leave, the job makes a *save request*. The
world changes when all ranks have saved and wait, or a grace time has passed, so scripts that report
no steps delay it by that time at most. If it only grows and all processes can go on, they wait
without a save: the state is in their memory.

The times are of a clock that never jumps (`master.SteadyClock`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from itertools import accumulate, chain, count
from typing import TypeAlias, TypeVar

import msgspec

from remesh.elastic import checks, protocol
from remesh.elastic.checks import CheckResult, RunningCheck
from remesh.elastic.failures import FailureAction, Patterns, ProcessFailure, decide
from remesh.elastic.nodes import Node, Outcome, Settings, listed, listed_nodes
from remesh.elastic.progress import TrainingProgress
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT, Content, Drain, Join, Leave, Sender

V = TypeVar("V")

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
    settings: Settings = Settings(min_nodes=1, max_nodes=1)
    """Sizes and time limits of the worlds: those of the first node that joins."""
    command: str = ""  # the script of that node, and its arguments
    round: int = 0  # number of the last world that was formed; 0 before the first
    world: tuple[Node, ...] = ()  # its members, in the order of their ranks
    first_ranks: tuple[int, ...] = ()  # the rank of the first process of each
    active: dict[int, None] = {}  # ids of members that are still in it
    finished: frozenset[int] = frozenset()  # ids of members that succeeded
    ready: dict[int, Node] = {}  # nodes that have joined for the next round, by id
    excluded: dict[int, tuple[str, str]] = {}
    """Incarnation and reason of nodes that are not to be used, by id."""
    held: dict[int, str] = {}
    """Why an operator has excluded nodes, by id: they wait, also if their agents start anew."""
    newest: dict[int, str] = {}  # the incarnation that joined last, by id
    replaced: frozenset[str] = frozenset()
    """Incarnations whose node id another agent has taken over."""
    changed_at: float = 0.0  # when the set of ready nodes changed last
    without_world_since: float | None = None  # since when no member is active; None while one is
    broken: str | None = None
    """Why the members of the world should stop and join again; None while it is whole."""
    hangs: bool = False  # whether that is because it hangs
    outcome: Outcome | None = None  # how the job ended; None while it runs
    reason: str = ""  # why it ended so
    ended: float | None = None  # when
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

    @property
    def num_ranks(self) -> int:
        """Ranks of the last world."""
        return self.first_ranks[-1] + self.world[-1].num_processes if self.world else 0

    @property
    def usable(self) -> dict[int, Node]:
        """The nodes that are ready and not held."""
        if not self.held:
            return self.ready
        return {number: node for number, node in self.ready.items() if number not in self.held}

    def place(self, node_id: int) -> int | None:
        """The place of a node in the last world; None if it was not in it."""
        if node_id < len(self.world) and self.world[node_id].id == node_id:
            return node_id  # most often ids are ranks
        place = bisect_left(self.world, node_id, key=lambda node: node.id)
        return place if place < len(self.world) and self.world[place].id == node_id else None

    def member(self, node_id: int) -> Node | None:
        """The member of the last world that has this id."""
        place = self.place(node_id)
        return None if place is None else self.world[place]

    def known(self, node_id: int) -> Node | None:
        """The newest agent that spoke for this id and has not gone."""
        if node_id in self.ready:
            return self.ready[node_id]
        return self.member(node_id) if node_id in self.active else None


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
            taken = job.newest  # of most jobs all ids below their number
            return next(number for number in count(len(taken)) if number not in taken), label
        lives = has_living_agent(job.names[label])
        if not lives:
            return None if lives is None else (job.names[label], label)
    raise AssertionError("labels never end")


def apply(job: JobState, event: Event, now: float) -> JobState:
    """The job after an event; nothing happens to it before the first node joins."""
    if job.began is None and not isinstance(event, Join):
        return job
    if job.outcome is not None and not isinstance(event, _SHOWN_AFTER_END):
        return job
    return _settle(_apply(job, event, now), now)


_SHOWN_AFTER_END = (protocol.ReportFailures, CheckpointSaved, ProgressRecorded)
"""Events that a job takes when it has ended, for they are shown."""


def _apply(job: JobState, event: Event, now: float) -> JobState:
    """The job after an event, before what follows from it."""
    match event:
        case Join():
            return _join(job, event, now)
        case Leave():
            return _leave(job, event, now)
        case NodeLost(node_id=node_id, incarnation=incarnation, is_closed=is_closed):
            silent = "no message came within the heartbeat timeout"
            why = "its agent has died, its connections are closed" if is_closed else silent
            text = f"node {node_id} is lost: {why}"
            return _depart(job, (node_id, incarnation), text, now, lost=True)
        case NodeHeld(node_id=node_id, reason=reason):
            return _hold(job, node_id, reason, now)
        case protocol.ReportFailures():
            return _fail(job, event, now)
        case Drain():
            return _drain(job, event, now)
        case protocol.ReportTest():
            return _tested(job, event)
        case CheckpointSaved(step) if job.saved_step is None or step > job.saved_step:
            return _replace(job, saved_step=step)
        case RanksWait(number) if number == job.round:
            return _end_request(job)
        case HangDetected(number, reason) if number == job.round and job.broken is None:
            return _hang(_note(job, now, f"the job hangs: {reason}"), reason, now)
        case ProgressRecorded(progress):
            return _replace(job, progress=progress)
    return job


def _replace(job: JobState, **changes: object) -> JobState:
    return msgspec.structs.replace(job, **changes)


def _without(items: dict[int, V], node_id: int) -> dict[int, V]:
    if node_id not in items:
        return items
    left = items.copy()  # several times as fast as a comprehension, for each node that joins
    del left[node_id]
    return left


def _note(job: JobState, now: float, text: str) -> JobState:
    return _replace(job, history=(*job.history, HistoryLine(now, text))[-MAX_RECORDS:])


def _depart(
    job: JobState, agent: tuple[int, str], text: str, now: float, *, lost: bool | None
) -> JobState:
    """A node is gone, which explains why others fail unless `lost` is None: it has succeeded."""
    known, is_active = job.known(agent[0]), agent[0] in job.active
    if known is None or known.incarnation != agent[1]:
        return job
    if is_active and lost is not None:
        incident = Incident(node_id=known.id, round=job.round, time=now, text=text, lost=lost)
        job = _replace(_record(job, incident), suspect=None)
    job = _remove(_note(job, now, text), known.id, now)
    return _replace(job, finished=job.finished | {known.id}) if is_active and lost is None else job


def _remove(job: JobState, node_id: int, now: float) -> JobState:
    ready, active = _without(job.ready, node_id), _without(job.active, node_id)
    return _replace(job, ready=ready, active=active, changed_at=now)


def _record(job: JobState, incident: Incident) -> JobState:
    return _replace(job, incidents=(*job.incidents, incident)[-MAX_RECORDS:])


def _join(job: JobState, event: Join, now: float) -> JobState:
    if job.began is None:
        job = _replace(
            job,
            began=now,
            settings=event.settings,
            command=event.command,
            changed_at=now,
            without_world_since=now,
            max_restarts=event.max_restarts,
        )
        job = _note(job, now, f"restart budget: {event.max_restarts} restarts per node")
    node = node_of(event)
    if event.after_round > job.round:
        text = (
            f"node {node.id} comes from round {event.after_round}, the journal knows only "
            f"{job.round} rounds: it was lost, or is an old copy"
        )
        job = _note(job, now, text)
    is_new = job.newest.get(node.id) != node.incarnation
    if is_new and event.command != job.command and event.command and job.command:
        text = f"node {node.id} runs another command than the job began with: {event.command:.300}"
        job = _note(job, now, f"{text}, which was {job.command:.300}")
    if job.names.get(node.name) != node.id:
        job = _replace(job, names={**job.names, node.name: node.id})
    member = job.member(node.id)
    if member is not None and member.incarnation != node.incarnation:
        job = _replace(job, suspect=None)  # its agent has died, as others may have noticed
    return _make_ready(job, node, event.after_round, now)


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


def _make_ready(job: JobState, node: Node, after_round: int, now: float) -> JobState:
    """An agent is ready for the round after `after_round`, the last that it was in (or 0)."""
    if node.incarnation in job.replaced or exclusion_of(job, node.id, node.incarnation):
        return job
    member = job.member(node.id)
    in_world = member is not None and member.incarnation == node.incarnation
    if in_world and node.id in job.active and after_round < job.round:
        return job  # a late copy of the message that led to this world
    if after_round > job.round:
        # The master has forgotten rounds. Their numbers must not come again.
        job = _replace(job, round=after_round)
    newest = job.newest.get(node.id, node.incarnation)
    if newest != node.incarnation:
        job = _replace(job, replaced=job.replaced | {newest})
    if job.newest.get(node.id) != node.incarnation:
        job = _replace(job, newest={**job.newest, node.id: node.incarnation})
    if job.ready.get(node.id) == node:
        return job
    return _replace(
        job,
        ready={**job.ready, node.id: node},
        active=_without(job.active, node.id),
        excluded=_without(job.excluded, node.id),
        changed_at=now,
    )


def _leave(job: JobState, event: Leave, now: float) -> JobState:
    text = f"node {event.node_id} leaves, {event.outcome}: {event.reason}"
    lost = None if event.outcome is Outcome.SUCCEEDED else False
    after = _depart(job, (event.node_id, event.incarnation), text, now, lost=lost)
    if after.finished is job.finished or len(after.finished) < len(after.world):
        return after
    return _end(after, Outcome.SUCCEEDED, "the processes of all nodes succeeded", now)


def _exclude(job: JobState, node: Node, reason: str, now: float) -> JobState:
    """A node is not to be used, for as long as its agent is the same."""
    job = _replace(job, excluded={**job.excluded, node.id: (node.incarnation, reason)})
    return _remove(job, node.id, now)


def _end(job: JobState, outcome: Outcome, reason: str, now: float) -> JobState:
    """The job has ended, whatever its nodes do."""
    if job.outcome is not None:
        return job
    job = _note(job, now, f"the job has {outcome}: {reason}")
    return _replace(job, outcome=outcome, reason=reason, ended=now, check=None)


def _fail(job: JobState, event: protocol.ReportFailures, now: float) -> JobState:
    node = job.known(event.node_id)
    if node is None or node.incarnation != event.incarnation:
        return job
    # A node says it again, in each new session, until it is in another world. It has joined after
    # it had said it first, and the records of long ago are gone.
    has_joined = node.id in job.ready or (event.round < job.round and node.id in job.active)
    known = {(each.node_id, each.round) for each in job.incidents if each.failures}
    if not event.failures or has_joined or (event.node_id, event.round) in known:
        return job
    action, text = decide(event.failures, num_ranks=job.num_ranks, patterns=job.policy.patterns)
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
        return _end(job, Outcome.FAILED, text, now)
    if job.outcome is not None:
        return job
    if action is FailureAction.REPLACE:
        return _exclude(_replace(job, must_check=True), node, text, now)
    if event.round == job.round and node.id in job.active and job.broken is None:
        # The others need not wait until it joins.
        return _replace(job, broken=text)
    return job


def _charge(job: JobState, node_id: int, reason: str) -> tuple[JobState, str, bool]:
    """Charge a restart to a node; what is said of it, and whether its budget had one left."""
    charged, most = job.charges.get(node_id, 0), job.max_restarts
    if charged >= most:
        counts = f"{charged} of {most} restarts"
        return job, f"{reason}; no restart left: {counts} charged to its node", False
    job = _replace(job, charges={**job.charges, node_id: charged + 1})
    return job, f"{reason}; {charged + 1} of {most} restarts charged to its node", True


def _charge_suspect(job: JobState, now: float) -> JobState:
    """Charge the failure that nothing in the round before explains, if there is one."""
    if job.suspect is None:
        return job
    (node_id, text), job = job.suspect, _replace(job, suspect=None)
    reason = f"{text}, but no other process has failed by itself"
    job, text, has_budget = _charge(job, node_id, reason)
    return _note(job, now, text) if has_budget else _end(job, Outcome.FAILED, text, now)


def _drain(job: JobState, event: Drain, now: float) -> JobState:
    node = job.known(event.node_id)
    if node is None or node.incarnation != event.incarnation or node.id not in job.active:
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
    held = _without(job.held, node_id)
    held = held if reason is None else {**held, node_id: reason}
    job = _replace(job, held=held, changed_at=now)
    if reason is not None:
        return _note(job, now, f"node {node_id} is excluded by hand: {reason}")
    request = job.save_request
    if request is not None and node_id in request.draining:
        draining = request.draining - {node_id}
        request = msgspec.structs.replace(request, draining=draining) if draining else None
        job = _replace(job, save_request=request)
    return _note(job, now, f"node {node_id} may be used again")


def _hang(job: JobState, why: str, now: float) -> JobState:
    """Let all start again, as long as the budget for hangs allows it."""
    reason, charged = f"the job hung: {why}", job.hang_charges
    job = _replace(job, broken=reason, hangs=True)
    if charged < job.max_restarts:
        return _replace(job, hang_charges=charged + 1)
    counts = f"{charged} of {job.max_restarts} restarts"
    return _end(job, Outcome.FAILED, f"{reason}; no restart left: {counts} charged to hangs", now)


def _settle(job: JobState, now: float) -> JobState:
    """The job after all that follows from it and the time alone."""
    if job.outcome is not None:
        return job
    job = _advance_check(job, now)
    if bool(job.active) == (job.without_world_since is not None):
        job = _replace(job, without_world_since=None if job.active else now)
    job = _end_request_in_time(_form_world(_note_break(job), now), now)
    asked, size = job.save_request, larger_size(job)
    if asked is not None and is_for_growth(job) and size is None:
        asked, job = None, _replace(job, save_request=None)  # the nodes that had come have gone
    if job.held and job.check is None:
        held = leaving(job)
        if held and (asked is None or not asked.draining.issuperset(held)):
            return _end_request_in_time(_ask_to_save(job, held, now, job.policy.save_grace), now)
        if held and not awaits_checkpoint(job):
            return _replace(job, broken=f"{listed_nodes(held)} excluded by hand")
        if asked is not None and asked.is_over and job.held.keys() >= asked.draining > set():
            return _replace(job, save_request=None)  # they stay: the others have left meanwhile
    if job.check is None and job.save_request is None and job.active and size is not None:
        request = SaveRequest(deadline=now + job.policy.save_grace)
        text = f"the world can grow to {size} nodes: {len(job.usable)} more are ready"
        return _end_request_in_time(_note(_replace(job, save_request=request), now, text), now)
    return job


def _note_break(job: JobState) -> JobState:
    """Note why the world is no longer whole, once: it is asked for with every heartbeat."""
    # No member is both active and finished.
    if job.broken is not None or len(job.active) + len(job.finished) == len(job.world):
        return job
    known = job.active.keys() | job.finished
    gone = [node.id for node in job.world if node.id not in known]
    lost = [node_id for node_id in gone if node_id not in job.ready]
    if lost:
        return _replace(job, broken=f"{listed_nodes(lost)} left or died")
    return _replace(job, broken=f"{listed_nodes(gone)} stopped the processes")


def _form_world(job: JobState, now: float) -> JobState:
    """Begin the next round, if the last one is over and the nodes are there."""
    if job.active:
        return job
    settings, candidates, since = job.settings, job.usable, job.without_world_since
    size = settings.fitting(len(candidates))
    if not size:
        if since is not None and now - since >= settings.join_timeout:
            reason = (
                f"{len(candidates)} nodes have joined within {settings.join_timeout:g} s, "
                f"at least {settings.min_nodes} in multiples of {settings.node_unit} are needed"
            )
            return _end(job, Outcome.FAILED, reason, now)
        return job
    cannot_grow = size == settings.fitting(settings.max_nodes)
    # No member is active here: one that is neither ready nor finished has left or is lost. Those
    # that have finished are alive and will join.
    all_back = bool(job.world) and job.finished <= job.ready.keys()
    if not (cannot_grow or all_back or now - job.changed_at >= settings.last_call):
        return job
    chosen = sorted(candidates)[:size]
    rest = sorted(job.ready.keys() - set(chosen))
    world = tuple(job.ready[node_id] for node_id in chosen)
    counts = (node.num_processes for node in world[:-1])
    job = _replace(
        job,
        round=job.round + 1,
        world=world,
        first_ranks=tuple(accumulate(counts, initial=0)),
        active=dict.fromkeys(chosen),
        finished=frozenset(),
        ready={node_id: job.ready[node_id] for node_id in rest},
        without_world_since=None,
        broken=None,
        hangs=False,
        save_request=None,
        check=None,
    )
    job = _note(job, now, f"round {job.round}: nodes {listed(chosen)}")
    return _charge_suspect(_begin_check(job, now), now)


def exclusion_of(job: JobState, node_id: int, incarnation: str) -> str | None:
    """Why a node is not used; None if it may be used. It holds for its agent only."""
    excluded, reason = job.excluded.get(node_id, ("", ""))
    return reason if excluded == incarnation else None


def stop_reason(job: JobState, node_id: int, round_of_node: int) -> str | None:
    """Why a node should stop the processes of a round now; None if it should go on.

    A world that is whole goes on until the ranks have saved, though it could be larger. Nodes that
    have finished are asked back when others have to start again: a job ends together.
    """
    if job.outcome is not None:
        return None
    if round_of_node != job.round or not (node_id in job.active or node_id in job.finished):
        return f"round {round_of_node} is over for node {node_id}"
    size = None if awaits_checkpoint(job) else larger_size(job)
    if size is not None:
        return f"{listed_nodes(job.usable)} can join, the world grows to {size}"
    return job.broken


def larger_size(job: JobState) -> int | None:
    """How large the world could be with the nodes that are ready; None if that is no larger."""
    if job.finished or job.broken is not None or not job.usable:
        return None
    size = job.settings.fitting(len(job.active) + len(job.usable))
    return size if size > len(job.world) else None


def leaving(job: JobState) -> list[int]:
    """The members that are held, if the others can form a world without them.

    None of a world that is broken, or is ending: members that have finished start no other one.
    """
    if job.broken is not None or job.finished or job.outcome is not None:
        return []
    held = [node_id for node_id in job.held if node_id in job.active]
    return held if fits_without(job, held) else []


def fits_without(job: JobState, node_ids: Collection[int]) -> bool:
    """True if the nodes that are there form a world without some, and without those that wait."""
    left = (job.active.keys() | job.usable.keys()) - set(node_ids)
    return bool(job.settings.fitting(len(left)))


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


def _begin_check(job: JobState, now: float) -> JobState:
    unknown = [node.id for node in job.world if job.checked.get(node.id) != node.incarnation]
    if not job.must_check and not (job.policy.check and unknown):
        return job
    number = job.num_checks + 1
    check = checks.begin(number, [node.id for node in job.world], now)
    return _replace(job, check=check, num_checks=number)


def _tested(job: JobState, event: protocol.ReportTest) -> JobState:
    check = job.check
    if check is None or (event.check, event.test_round) != (check.number, len(check.results)):
        return job
    member = job.member(event.node_id)
    if member is None or member.incarnation != event.incarnation:
        return job
    reports = {**check.reports, event.node_id: event.result}
    return _replace(job, check=msgspec.structs.replace(check, reports=reports))


def _advance_check(job: JobState, now: float) -> JobState:
    check = job.check
    if check is None:
        return job
    if len(job.active) != len(job.world):
        return _rejoin(_replace(job, check=None), now)  # a member was lost meanwhile
    after = checks.advance(check, now, job.policy.check_timeout)
    if isinstance(after, CheckResult):
        return _end_check(job, after, now)
    return job if after is check else _replace(job, check=after)


def _end_check(job: JobState, result: CheckResult, now: float) -> JobState:
    out, world = result.faulty, job.world
    findings = dict.fromkeys(result.healthy, "healthy") | {**result.suspects, **out}
    job = _replace(
        job,
        check=None,
        must_check=False,
        check_findings=findings,
        checked={node.id: node.incarnation for node in world if node.id not in out},
    )
    said = [f"node {node_id} {text}" for node_id, text in sorted(findings.items())]
    said = [text for text in said if not text.endswith(" healthy")] or ["all nodes are healthy"]
    for group in result.connections:
        said.append(f"the connection among nodes {', '.join(map(str, group))} failed")
    job = _note(job, now, f"check {job.num_checks}: {'; '.join(said)}")
    for node in world:
        if node.id in out:
            job = _exclude(job, node, f"check {job.num_checks}: {out[node.id]}", now)
    return _rejoin(job, now) if out else job


def _rejoin(job: JobState, now: float) -> JobState:
    """Let the members that are left join again: none has started processes yet."""
    for node in job.world:
        if node.id in job.active:
            job = _make_ready(job, node, job.round, now)
    return job


def content_of(job: JobState, sender: Sender) -> Content:
    """What the node of a sender has to do now."""
    node_id, incarnation = sender["node_id"], sender["incarnation"]
    if job.outcome is not None:
        return protocol.JobEnded(job.outcome, job.reason, job.hangs)
    if incarnation in job.replaced:
        return protocol.Rejected(f"another agent has taken over node id {node_id}")
    excluded = exclusion_of(job, node_id, incarnation)
    if excluded is not None:
        return protocol.Rejected(excluded)
    ready = job.ready.get(node_id)
    if ready is not None and ready.incarnation == incarnation:
        return _waiting(job, node_id)
    member = job.member(node_id)
    if member is None or member.incarnation != incarnation:
        reason = f"round {sender['round']} is over for node {node_id}"
        return protocol.Stop(sender["round"], reason)
    if node_id in job.active and job.check is not None:
        return _test_of(job, job.check, node_id)
    why = stop_reason(job, node_id, job.round)
    if why is None:
        return _assignment(job, node_id)
    return protocol.Stop(job.round, why, job.hangs)


def _assignment(job: JobState, node_id: int) -> protocol.Assignment:
    awaits, place = awaits_checkpoint(job), job.place(node_id)
    assert place is not None
    return protocol.Assignment(
        job.round,
        place,
        len(job.world),
        job.first_ranks[place],
        job.num_ranks,
        job.world[0],
        save=awaits,
        grow=awaits and is_for_growth(job),
    )


def _test_of(job: JobState, check: RunningCheck, node_id: int) -> Content:
    if node_id in check.reports:
        return _waiting(job, node_id)
    group = next((group for group in check.groups if node_id in group), ())
    members = tuple(member for member in map(job.member, group) if member is not None)
    rank = group.index(node_id)
    return protocol.NodeTest(job.round, check.number, len(check.results), members, rank)


def _waiting(job: JobState, node_id: int) -> protocol.Waiting:
    node, settings = job.ready.get(node_id), job.settings
    if node is not None and node_id in job.held:
        text = (
            f"an operator has excluded it: {job.held[node_id]}; it is used again after "
            f"`remesh node readmit {node.name}`"
        )
        return protocol.Waiting(text, is_held=True)
    runs = f"round {job.round} runs on {len(job.active)} nodes; " if job.active else ""
    return protocol.Waiting(
        f"{runs}{len(job.usable)} nodes are ready, the world has {settings.min_nodes} to "
        f"{settings.max_nodes} in multiples of {settings.node_unit}"
    )


def concerns_all(before: JobState, after: JobState) -> bool:
    """True if nodes other than those that have sent something may have to do something else now."""
    return _shared(before) != _shared(after)


def _shared(job: JobState) -> tuple[object, ...]:
    """What instructions follow from that is not of one node alone."""
    check = job.check
    stage = None if check is None else (check.number, len(check.results))
    world = job.round, job.outcome, job.broken, larger_size(job)
    used = job.excluded, job.replaced, job.held
    return world, used, stage, job.save_request
