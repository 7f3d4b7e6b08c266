"""What changes with every heartbeat: which nodes are alive, how far their ranks are.

A master that restarts begins anew here, and gives every node the full heartbeat timeout. Some
functions return events, which the job must not lose: a node is lost, a checkpoint is saved, the job
hangs.

When a process dies, its machine closes its connections at once, long before its silence is
conspicuous. So an agent whose session was closed from its side is *suspected*. It is confirmed dead
if it says nothing in another session until its next heartbeat is overdue: an agent that lives
connects again by then, whatever broke the session. If processes of its world have lost a peer,
nothing is waited for: the world is broken, and the suspected agent is where.

No suspicion follows where the master itself closes a session, nor when it begins anew: then it
knows no session of any agent. A machine that dies closes nothing, and is found by its silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from remesh.elastic import job as jobs
from remesh.elastic import progress
from remesh.elastic.failures import Kind, classify
from remesh.elastic.job import Event, JobState
from remesh.elastic.nodes import listed
from remesh.elastic.progress import RankProgress, TrainingProgress
from remesh.elastic.protocol import Beat, ReportFailures, ReportStacks

RECORD_EVERY = 10.0
"""Seconds between two records of the progress."""
CONFIRM_SECONDS = 1.0
"""How late a heartbeat may be: an agent may have to connect anew, on a busy machine."""
BEAT_SECONDS = 1.0
"""Time between two heartbeats of an agent that has not said it."""


@dataclass(slots=True)
class AgentSigns:
    """The signs of life of an agent: its messages, and the ends of its sessions."""

    heard: float  # when it said something last
    session: int | None = None  # the number of its newest one; None once that has ended
    pause: float = BEAT_SECONDS  # seconds, at most, until its next heartbeat
    suspected: float = math.inf  # since when it has no session, if that means something
    wanted: float = math.inf  # since when another agent has requested its node id

    @property
    def due(self) -> float:
        """When it must have spoken in another session, if it is suspected."""
        return max(self.suspected, self.heard + self.pause) + CONFIRM_SECONDS

    def is_dead(self, now: float, *, lost_peer: bool = False) -> bool:
        return self.suspected < math.inf and (lost_peer or now > self.due)


@dataclass(slots=True)
class Liveness:
    """The nodes as they are known now."""

    agents: dict[str, AgentSigns]
    """Those that the job knows or that have sent something, by incarnation."""
    progress: TrainingProgress  # how far the training is
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    """How far each rank is that has reported in `round`."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that wait for the world to change, and have saved if that is needed."""
    round: int = 0  # the round of the last heartbeat that counted
    recorded_at: float = 0.0  # when the progress was recorded last
    stacks: dict[int, str] = field(default_factory=dict)  # stacks of the last hang, by rank
    hung_round: int = 0  # its round
    broken_round: int = 0  # the newest round of which a process has lost a peer
    look_at: float = 0.0  # when a node may be lost, at the earliest

    @classmethod
    def after_start(cls, job: JobState, now: float) -> Liveness:
        """At the start of a master: the nodes of the job count as just heard."""
        known = {node.id: node for node in job.world} | job.ready
        known_progress = job.progress or progress.begin(now if job.began is None else job.began)
        return cls(
            agents={node.incarnation: AgentSigns(now) for node in known.values()},
            progress=progress.begin_round(known_progress, now),
            round=job.round,
            recorded_at=now,
        )


def on_message(
    live: Liveness, incarnation: str, now: float, *, session: int = 0, pause: float | None = None
) -> None:
    """An agent has said something."""
    agent = live.agents.get(incarnation)
    if agent is None:
        agent = live.agents[incarnation] = AgentSigns(now)
    agent.heard, agent.session, agent.suspected = now, session, math.inf
    agent.pause = agent.pause if pause is None else pause


def on_end_of_session(
    live: Liveness, session: int, incarnation: str, now: float, *, by_peer: bool
) -> None:
    """A session has ended: the agent may have another one already."""
    agent = live.agents.get(incarnation)
    if agent is not None and agent.session == session:
        agent.session = None
        if by_peer:
            agent.suspected, live.look_at = now, 0.0


def is_over(live: Liveness, job: JobState, now: float) -> bool:
    """True if the job has ended and its agents have stopped sending.

    An agent that has sent nothing for the heartbeat timeout has ended, or is lost.
    """
    if job.ended is None:
        return False
    last = max((agent.heard for agent in live.agents.values()), default=job.ended)
    return now - max(last, job.ended) >= job.policy.heartbeat_timeout


def has_living_agent(
    live: Liveness, job: JobState, node_id: int, incarnation: str, now: float
) -> bool | None:
    """True if another agent than the given one holds a node id and is alive.

    An agent that starts again requests the id of the one that died. Two that run under one name, or
    were given one id by mistake, must not take it from each other in turn. None if that is not
    known yet.
    """
    holder = job.known(node_id)
    if holder is None and node_id in job.finished:
        holder = job.member(node_id)
    if holder is None or incarnation == holder.incarnation or incarnation in job.replaced:
        return False
    other = live.agents.setdefault(holder.incarnation, AgentSigns(now))
    if other.session is not None:
        limit = other.pause + CONFIRM_SECONDS
        if now > other.heard + limit:
            return False
        if not 0 <= now - other.wanted <= 2 * limit:
            other.wanted = now
        # Its session may be that of a machine that is gone: it lives if it is heard from now on.
        return True if other.heard >= other.wanted else None
    # It has died just now, or begins another session.
    is_gone = other.is_dead(now) or now - other.heard > job.policy.heartbeat_timeout
    return False if is_gone else None


def extend_deadlines(live: Liveness, seconds: float) -> None:
    """Do not count seconds in which the master itself was stopped and received nothing."""
    for agent in live.agents.values():
        agent.heard += seconds
        agent.suspected += seconds
    live.progress = msgspec.structs.replace(live.progress, moved=live.progress.moved + seconds)


def on_beat(live: Liveness, job: JobState, beat: Beat, now: float) -> list[Event]:
    """Record how far the ranks of a node are; the events that follow."""
    # The save at the end of the training is told by a node that has just finished.
    is_member = beat.node_id in job.active or beat.node_id in job.finished
    if beat.round != job.round or not is_member:
        return []
    if live.round != job.round:
        live.round = job.round
        live.progress = progress.begin_round(live.progress, now)
        live.ranks, live.waiting = {}, set()
    if beat.lost_peer and live.broken_round != beat.round:
        live.broken_round, live.look_at = beat.round, 0.0
    events: list[Event] = []
    needs_save = not jobs.is_for_growth(job)
    for rank, heard in beat.ranks.items():
        known = live.ranks.get(rank)
        if known is None or heard.step != known.step or heard.saved_step != known.saved_step:
            age = max(beat.time - heard.time, 0.0)
            at = msgspec.structs.replace(heard, time=now - age)  # by the clock of the master
            live.progress = progress.report(live.progress, known, at)
            live.ranks[rank] = at
        if heard.saved_step is not None and (
            job.saved_step is None or heard.saved_step > job.saved_step
        ):
            events.append(jobs.CheckpointSaved(heard.saved_step))
        if heard.waits and not (needs_save and heard.saved_step != heard.step):
            live.waiting.add(rank)
        elif live.waiting:
            live.waiting.discard(rank)
    if len(live.waiting) == job.num_ranks and jobs.awaits_checkpoint(job):
        return [*events[-1:], jobs.RanksWait(job.round)]
    return events[-1:]


def on_failures(live: Liveness, job: JobState, request: ReportFailures) -> None:
    """Record whether the processes of a node failed because they lost a peer."""
    kinds = [classify(failure, job.policy.patterns) for failure in request.failures]
    if Kind.COLLATERAL in kinds:
        live.broken_round, live.look_at = max(live.broken_round, request.round), 0.0


def on_stacks(live: Liveness, request: ReportStacks) -> None:
    """Record the stacks of a node, if they belong to the last hang."""
    if request.round > live.hung_round:
        live.hung_round, live.stacks = request.round, {}
    if request.round == live.hung_round:
        live.stacks.update(request.stacks)


def events_of_time(live: Liveness, job: JobState, now: float) -> list[Event]:
    """The events that the passing of time causes."""
    if job.outcome is not None:
        # Once: the status of a job that has ended does not change when its master restarts.
        return [jobs.ProgressRecorded(live.progress)] if live.progress != job.progress else []
    events = _lost_nodes(live, job, now)
    if live.round == job.round and not events:
        events += _hang_events(live, job, now)
        if now - live.recorded_at >= RECORD_EVERY and live.progress != job.progress:
            live.recorded_at = now
            events.append(jobs.ProgressRecorded(live.progress))
    return events


def _lost_nodes(live: Liveness, job: JobState, now: float) -> list[Event]:
    """The nodes that are lost; all are looked at only if one of them can be."""
    if now < live.look_at:
        return []
    limit, lost_peer = job.policy.heartbeat_timeout, live.broken_round == job.round
    events: list[Event] = []
    live.look_at = now + limit / 4
    for node_id in (*job.active, *job.ready):
        known = job.known(node_id)
        assert known is not None
        agent = live.agents.setdefault(known.incarnation, AgentSigns(now))
        is_dead = agent.is_dead(now, lost_peer=lost_peer)
        if is_dead or now - agent.heard > limit:
            lost = jobs.NodeLost(node_id=node_id, incarnation=known.incarnation, is_closed=is_dead)
            events.append(lost)
        else:
            live.look_at = min(live.look_at, agent.heard + limit, agent.due)
    # The incarnation of an agent that was replaced never comes again.
    newest = set(job.newest.values())
    live.agents = {
        incarnation: agent
        for incarnation, agent in live.agents.items()
        if agent.session is not None or incarnation in newest
    }
    return events


def _hang_events(live: Liveness, job: JobState, now: float) -> list[Event]:
    limit = progress.hang_limit(live.progress, job.policy.hang_timeout, job.hang_charges)
    pause = now - live.progress.moved
    if job.broken is not None or pause <= limit:
        return []
    lagging = progress.lagging_ranks(live.ranks)
    behind = f"; ranks {listed(lagging)} are behind the others" if lagging else ""
    reason = f"no rank has finished a step for {pause:.0f} s{behind}"
    live.hung_round, live.stacks = job.round, {}
    return [jobs.HangDetected(job.round, reason)]
