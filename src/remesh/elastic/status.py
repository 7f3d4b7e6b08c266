"""The status of a job, which `remesh status`, the page and the metrics show.

A job of a thousand nodes has some megabytes of status, and a page asks for it every second. So the
page gets fewer nodes and ranks, those in trouble first, and of failures, stacks and history what is
newest.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from remesh._repr import short_repr
from remesh.elastic import progress
from remesh.elastic.failures import ProcessFailure, is_consequence, root_cause
from remesh.elastic.job import HistoryLine, JobState, exclusion_of
from remesh.elastic.liveness import Liveness

__all__ = ["FailureStatus", "NodeStatus", "RankStatus", "RoundFailures", "Status"]

MAX_ROWS = 2000
"""Nodes, and ranks, of a status."""
MAX_STACKS_SIZE = 8 << 20
"""Characters of the stacks of a status."""
TROUBLE = ("excluded", "gone", "draining", "ready", "finished", "active")
"""The states of nodes; of too many nodes those of the first states are shown."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of long lists and texts is shown."""

    rows: int = MAX_ROWS  # nodes, and ranks
    failures: int = sys.maxsize  # rounds with failures, failures of each, and stacks
    lines: int = sys.maxsize  # of the history
    text: int = sys.maxsize  # characters of a message, a line, a log or a stack


OF_ALL = Limits()
OF_A_PAGE = Limits(50, failures=6, lines=100, text=3000)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    id: int
    name: str
    address: str  # where it is reached
    state: str  # `active`, `ready`, `finished`, `draining`, `excluded` or `gone`
    node_rank: int | None  # its place among the nodes of the world; None if it is not active
    first_rank: int | None  # rank of its first process; None likewise
    num_processes: int  # its processes
    last_heard: float | None
    """Seconds since its last message; None if none came since the master started."""
    num_charged: int  # restarts that it was charged with
    check: str  # the result of the last check
    reason: str  # why it is excluded, or is to be

    __repr__ = short_repr


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that reports steps."""

    rank: int
    step: int  # its last step
    age: float  # seconds since it finished that
    step_seconds: float | None  # how long its own work of a step takes
    slow: float | None  # how many times the median that is, if it is slow
    behind: bool  # whether others have finished more steps

    __repr__ = short_repr


class FailureStatus(ProcessFailure, frozen=True, kw_only=True):
    """One failed process, and the decision on the failures of its node."""

    signal: str  # the name of the signal that ended it; empty if none did
    decision: str  # the consequence for its node, in a sentence

    __repr__ = short_repr


class RoundFailures(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a round."""

    round: int
    time: float  # when the master received the first failure, or lost a node
    cause: str
    """The node that was lost or left, if that explains the failures better than any of the
    processes does; otherwise empty."""
    failures: tuple[FailureStatus, ...]  # processes that failed, the likeliest root cause first

    __repr__ = short_repr


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a job."""

    time: float  # the present time, in seconds since the epoch
    began: float | None  # when the first node joined
    ended: float | None  # when the job ended; None while it runs
    phase: str  # `waiting`, `checking`, `running`, or how the job ended
    reason: str  # why, in a sentence
    round: int
    min_nodes: int  # fewest nodes of a world
    max_nodes: int  # most nodes of a world
    node_unit: int  # worlds have a multiple of this
    max_restarts: int  # restarts that each node may be charged with
    nodes: tuple[NodeStatus, ...]  # the nodes, by id; of more than `MAX_ROWS` those in trouble
    goodput: float | None
    """Share of the time since the beginning that moved the training forward; for a job that has
    ended, until its end."""
    step: int | None  # the highest step of any rank
    saved_step: int | None  # the step of the newest checkpoint
    ranks: tuple[RankStatus, ...]
    """The ranks that report steps, those in trouble first, and `MAX_ROWS` of them at most."""
    failures: tuple[RoundFailures, ...]  # the failures, newest round first
    stacks: dict[int, str]
    """The stacks of the processes when the job hung last, by rank, as far as they fit into
    `MAX_STACKS_SIZE` characters."""
    history: tuple[HistoryLine, ...]  # the events, newest first
    warnings: tuple[str, ...] = ()
    """Problems of the master itself."""
    step_age: float | None = None
    """Seconds since any rank finished a step; None before the first one of the round, and for a job
    that has ended."""
    nodes_by_state: dict[str, int] = {}  # how many nodes there are in each state
    num_ranks: int = 0  # how many ranks report steps
    step_seconds: float | None = None  # the usual duration of a step

    __repr__ = short_repr


def status_of(
    job: JobState,
    live: Liveness,
    now: float,
    warnings: tuple[str, ...] = (),
    limits: Limits = OF_ALL,
) -> Status:
    """The status of a job."""
    phase, reason = phase_of(job)
    states = _states(job)
    shown_nodes = sorted(states, key=lambda one: (TROUBLE.index(states[one]), one))[: limits.rows]
    slow, behind = progress.slow_ranks(live.ranks), set(progress.lagging_ranks(live.ranks))
    # Ranks in trouble come first.
    ranks = sorted(live.ranks, key=lambda rank: (-slow.get(rank, 0.0), rank not in behind, rank))
    runs = job.began is not None and job.ended is None
    is_of_round = runs and live.round == job.round
    return Status(
        time=now,
        began=job.began,
        ended=job.ended,
        phase=phase,
        reason=reason[: limits.text],
        round=job.round,
        min_nodes=0 if job.began is None else job.settings.min_nodes,
        max_nodes=0 if job.began is None else job.settings.max_nodes,
        node_unit=job.settings.node_unit,
        max_restarts=job.max_restarts,
        nodes=tuple(_node_rows(job, live, now, states, sorted(shown_nodes))),
        nodes_by_state=dict(Counter(states.values()).most_common()),
        goodput=progress.goodput(live.progress, now if job.ended is None else job.ended),
        step=live.progress.last_step,
        step_age=progress.pause_of(live.progress, now) if is_of_round else None,
        saved_step=job.saved_step,
        ranks=tuple(
            RankStatus(
                rank=rank,
                step=live.ranks[rank].step,
                age=max(now - live.ranks[rank].time, 0.0),
                step_seconds=live.ranks[rank].step_seconds,
                slow=slow.get(rank),
                behind=rank in behind,
            )
            for rank in ranks[: limits.rows]
        ),
        num_ranks=len(ranks),
        failures=_failures(job, limits),
        stacks=_stacks(live, limits),
        history=tuple(
            HistoryLine(line.time, line.text[: limits.text])
            for line in job.history[: -limits.lines - 1 : -1]
        ),
        step_seconds=progress.usual_step(live.progress),
        warnings=warnings,
    )


def phase_of(job: JobState) -> tuple[str, str]:
    """The phase of a job, and the reason for it, in a sentence."""
    if job.began is None:
        return "waiting", "no node has joined"
    if job.outcome is not None:
        return job.outcome.value, job.reason
    if job.check is not None:
        return "checking", f"check {job.check.number} tests {len(job.world)} nodes"
    if job.active:
        return "running", f"round {job.round} on {len(job.active)} of {len(job.world)} nodes"
    return "waiting", f"{len(job.usable)} nodes are ready, {job.settings.min_nodes} are needed"


def _states(job: JobState) -> dict[int, str]:
    draining = job.save_request.draining if job.save_request is not None else frozenset[int]()
    states = {node.id: "gone" for node in job.world} | dict.fromkeys(job.ready, "ready")
    states |= dict.fromkeys(job.finished - job.ready.keys(), "finished")
    states |= dict.fromkeys(job.active, "active")
    states |= {node_id: "draining" for node_id in draining if node_id in job.active}
    for node_id in job.excluded:
        node = job.ready.get(node_id) or job.member(node_id)
        if node is None or exclusion_of(job, node_id, node.incarnation) is not None:
            states[node_id] = "excluded"
    for node_id in job.held:
        states[node_id] = "draining" if node_id in job.active else "excluded"
    return dict(sorted(states.items()))


def _node_rows(
    job: JobState, live: Liveness, now: float, states: Mapping[int, str], ids: Iterable[int]
) -> Iterator[NodeStatus]:
    names: dict[int, str] = {}
    for node_id in ids:
        known = job.ready.get(node_id) or job.member(node_id)
        if known is None and not names:
            names = {number: name for name, number in job.names.items()}
        agent = None if known is None else live.agents.get(known.incarnation)
        place = job.place(node_id) if node_id in job.active else None
        reason = job.held.get(node_id, "")
        if not reason and states[node_id] == "excluded":
            reason = job.excluded[node_id][1]
        yield NodeStatus(
            id=node_id,
            name=names.get(node_id, "") if known is None else known.name,
            address="" if known is None else known.address,
            state=states[node_id],
            node_rank=place,
            first_rank=None if place is None else job.first_ranks[place],
            num_processes=0 if known is None else known.num_processes,
            last_heard=None if agent is None else max(now - agent.heard, 0.0),
            num_charged=job.charges.get(node_id, 0),
            check=job.check_findings.get(node_id, ""),
            reason=reason,
        )


def _stacks(live: Liveness, limits: Limits) -> dict[int, str]:
    """The stacks of the first ranks, as many as fit."""
    shown, size = {}, 0
    for rank, whole in sorted(live.stacks.items())[: limits.failures]:
        text = whole[: limits.text]
        size += len(text)
        if size > MAX_STACKS_SIZE:
            break
        shown[rank] = text
    return shown


def _failures(job: JobState, limits: Limits) -> tuple[RoundFailures, ...]:
    rounds = {each.round for each in job.incidents if each.failures or each.lost}
    newest = sorted(rounds, reverse=True)[: limits.failures]
    return tuple(_failures_of(job, number, limits) for number in newest)


def _failures_of(job: JobState, number: int, limits: Limits) -> RoundFailures:
    incidents = [each for each in job.incidents if each.round == number]
    patterns = job.policy.patterns
    decisions = {each.node_id: each.text for each in incidents if each.failures}
    ordered = root_cause([one for each in incidents for one in each.failures], patterns)
    explained = bool(ordered) and not is_consequence(ordered[0], patterns)
    # A node that was lost caused what its peers met; the first one, if several were lost.
    gone = [each for each in incidents if not each.failures]
    gone.sort(key=lambda each: (not each.lost, each.time))
    return RoundFailures(
        round=number,
        time=min(each.time for each in incidents),
        cause="" if explained or not gone else gone[0].text,
        failures=tuple(
            FailureStatus(
                **msgspec.structs.asdict(failure)
                | {
                    "message": failure.message[: limits.text],
                    "log_tail": failure.log_tail[-limits.text :],
                },
                signal=failure.signal_name,
                decision=decisions[failure.node_id],
            )
            for failure in ordered[: limits.failures]
        ),
    )
