"""The agent of a node as a pure function: what it sees, and the time, give what it does next.

Its processes train until one fails, all have succeeded, or the master has another world for them.
Then there is one way into the next world. Each process is *in* the world, *out* of it or *missing*:

1. Those that can be entered again are ordered to leave the world, and are out when they say so. The
   others are ended by a signal, and are missing. What is still in at the deadline is killed, and
   missing as well.
2. As soon as all that is still in can be entered again, the node joins the next round: meanwhile
   the rest gets out. Failures are reported before, and what the master shows after that decides.
3. If none is in, those that are out enter the new world, and new processes take the place of those
   that are missing.

`step` neither waits nor reads a clock; `remesh.elastic.agent` does what it says, and waits there
for the next round.
"""

from __future__ import annotations

import math
import signal
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from remesh.elastic.failures import restart_pause
from remesh.elastic.nodes import Outcome
from remesh.elastic.process_socket import Report, Request
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import Assignment, Content, JobEnded, Rejected, Stop

EXIT_REPLACE = 75
"""How the agent ends when another node should take the place of this one."""
EXIT_JOB_FAILED = 1
"""How it ends when the job has failed on another node, or its end cannot be learned."""
EXIT_DRAINED = 143
"""How it ends after SIGTERM, as other programs do."""
EXIT_UNSAVED = 1
"""How it ends after SIGTERM when the ranks could not save in time."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has chosen for a node; all times in seconds."""

    num_processes: int
    drain: float  # for a checkpoint before the node leaves
    reentry: float  # for a process to leave a training function that is entered again
    shutdown: float  # for any other process to end after a signal
    patience: float  # for a master that does not answer


class Phase(StrEnum):
    """What an agent is about."""

    CHANGE = "change"  # processes get from one world into the next
    TRAIN = "train"
    FINISHED = "finished"  # all processes have succeeded, other nodes may not


class State(msgspec.Struct, frozen=True, kw_only=True):
    """An agent."""

    limits: Limits
    phase: Phase
    order: int = 0  # number of the newest order to processes
    deadline: float = math.inf  # when processes that are still in the old world are killed
    has_failed: bool = False  # in a change: whether it follows from failures of this node
    is_reported: bool = False  # in such a change: whether they were reported
    joins: bool = False  # in a change: whether the node has joined the next round
    num_in_vain: int = 0  # starts in a row that failed without a step
    hold: Request | None = None  # what the ranks are asked for, before they have to stop
    held_since: float = 0.0
    is_announced: bool = False  # whether the master knows that this node drains


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent sees at one moment. Processes go by their local ranks."""

    living: frozenset[int] = frozenset()
    has_failed: bool = False  # whether any has ended with an error
    reports: dict[int, Report] = {}  # of those that live and can be entered again
    progress: dict[int, RankProgress] = {}  # of those that report their steps
    content: Content | None = None  # the newest instruction
    drains: bool = False  # whether there was a SIGTERM
    silence: float = 0.0  # seconds without a session with the master

    @property
    def stop(self) -> Stop | None:
        """Why the processes should stop, by the newest instruction."""
        return self.content if isinstance(self.content, Stop) else None


# Actions ------------------------------------------------------------------------------------------


class OrderToLeave(msgspec.Struct, frozen=True):
    """Order processes to leave their world."""

    order: int
    ranks: frozenset[int]


class End(msgspec.Struct, frozen=True):
    """Send processes a signal of which they end; after SIGKILL, wait until they have ended."""

    ranks: frozenset[int]
    number: signal.Signals
    why: str = ""


class JoinRound(msgspec.Struct, frozen=True):
    """Join the next round, and wait until it begins for this node."""

    pause: float = 0.0  # seconds before that


class Enter(msgspec.Struct, frozen=True):
    """Order processes into the world that the node has joined, and start those that are missing."""

    order: int
    out: frozenset[int]


class Hold(msgspec.Struct, frozen=True):
    """Request a save or a wait of all processes; without a request, let them go on."""

    request: Request | None


class Tell(StrEnum):
    """Tell the master something."""

    FAILURES = "failures"  # the processes that have failed
    FINISH = "finish"  # that the processes have succeeded
    DRAIN = "drain"  # that the node leaves soon
    STACKS = "stacks"  # where the processes are, which hang


class Exit(msgspec.Struct, frozen=True):
    """End the processes, then the agent; with the errors of those that failed, if the job has."""

    code: int
    reason: str
    outcome: Outcome | None = None  # with which the node leaves the job, if it has to say so


Action: TypeAlias = OrderToLeave | End | JoinRound | Enter | Hold | Tell | Exit
Next: TypeAlias = tuple[State, list[Action]]


# Steps --------------------------------------------------------------------------------------------


def begin(limits: Limits) -> Next:
    """The first step of an agent."""
    return State(limits=limits, phase=Phase.CHANGE, joins=True), [JoinRound()]


def step(state: State, seen: Seen, now: float) -> Next:
    """The next step of an agent, and its state after that."""
    match state.phase:
        case Phase.CHANGE:
            return _change(state, seen, now)
        case Phase.TRAIN if seen.has_failed:
            return _leave(replace(state, has_failed=True), seen, now)
        case Phase.TRAIN if not seen.living:
            return replace(state, phase=Phase.FINISHED), [Tell.FINISH]
        case Phase.TRAIN:
            return _train(state, seen, now)
        case Phase.FINISHED:
            return _finished(state, seen, now)


def _inside(state: State, seen: Seen) -> frozenset[int]:
    """The processes that have not left the old world yet."""
    out = {
        rank
        for rank, report in seen.reports.items()
        if report.is_out and report.number >= state.order
    }
    return seen.living - out


def _leave(state: State, seen: Seen, now: float, number: signal.Signals = signal.SIGTERM) -> Next:
    """Let the processes leave their world."""
    order, able = state.order + 1, frozenset(seen.reports)
    plain = seen.living - able
    actions: list[Action] = []
    if able:
        actions.append(OrderToLeave(order, able))
        number = signal.SIGKILL  # nothing is lost that the others do not have
    if plain:
        actions.append(End(plain, number))
    deadline = now + (state.limits.reentry if able else state.limits.shutdown)
    return replace(state, phase=Phase.CHANGE, order=order, deadline=deadline), actions


def _change(state: State, seen: Seen, now: float) -> Next:
    inside = _inside(state, seen)
    if inside and now >= state.deadline:
        why = f"no end of the training function within {state.limits.reentry:g} s"
        if not seen.reports:
            why = f"no end of the process within {state.limits.shutdown:g} s"
        return state, [End(inside, signal.SIGKILL, f"{why}: killed and started again")]
    if not state.joins:
        if inside - seen.reports.keys():
            return state, []
        return _join(state, seen)
    if inside:
        return state, []
    trains = State(
        limits=state.limits,
        phase=Phase.TRAIN,
        order=state.order + 1,
        num_in_vain=state.num_in_vain,
    )
    return trains, [Enter(trains.order, seen.living)]


def _join(state: State, seen: Seen) -> Next:
    """Join the next round, if the master has nothing against it."""
    pause = 0.0
    if state.has_failed:
        if not state.is_reported:
            return replace(state, is_reported=True), [Tell.FAILURES]
        if isinstance(seen.content, JobEnded | Rejected):
            return state, [exit_of(seen.content)]
        # The master has not received the failures yet, unless it stops this world.
        if seen.stop is None and not seen.drains and not seen.silence:
            return state, []
        # Pauses grow as long as starts fail without a step.
        state = replace(state, num_in_vain=0 if seen.progress else state.num_in_vain + 1)
        pause = restart_pause(state.num_in_vain)
    if seen.drains:
        return state, [Exit(EXIT_DRAINED, "its processes had stopped already", Outcome.DRAINED)]
    return replace(state, joins=True), [JoinRound(pause)]


def _train(state: State, seen: Seen, now: float) -> Next:
    """Do what the newest instruction says, while the processes are healthy."""
    actions: list[Action] = []
    stop, content = seen.stop, seen.content
    if seen.drains:
        if not state.is_announced:
            state = replace(state, is_announced=True)
            actions.append(Tell.DRAIN)
        state = _hold(state, "save-and-hold", now, actions)
        # Ranks that report nothing have no manager that could save.
        is_late = now - state.held_since > state.limits.drain
        if not seen.progress or is_late or _all_wait(state, seen):
            return state, [*actions, _drained(state, seen, now)]
    elif stop is None:
        wanted: Request | None = None
        if isinstance(content, Assignment) and content.save:
            all_go_on = len(seen.reports) == state.limits.num_processes
            if content.grow and all_go_on:
                wanted = "hold"
            elif seen.progress or not content.grow:  # before a step, they may still say so
                wanted = "save-and-hold"
        state = _hold(state, wanted, now, actions)
    hangs = isinstance(content, JobEnded | Stop) and content.hangs
    if hangs:
        actions.append(Tell.STACKS)
    if stop is not None:
        # Processes that hang do not react to SIGTERM.
        left, more = _leave(state, seen, now, signal.SIGKILL if hangs else signal.SIGTERM)
        return left, actions + more
    if isinstance(content, JobEnded | Rejected):
        actions.append(exit_of(content))
    return state, actions


def _hold(state: State, wanted: Request | None, now: float, actions: list[Action]) -> State:
    """Have the ranks save and wait, so that no step is repeated later; or let them continue."""
    if wanted == state.hold or (wanted == "hold" and state.hold is not None):
        return state  # those that save wait as well
    actions.append(Hold(wanted))
    return replace(state, hold=wanted, held_since=now)


def has_done(wanted: Request | None, rank: RankProgress) -> bool:
    """True if a rank waits, and has saved if that was wanted; it may wait since before."""
    return rank.waits and (wanted == "hold" or rank.saved_step == rank.step)


def _all_wait(state: State, seen: Seen) -> bool:
    ranks = seen.progress.values()
    return len(ranks) == state.limits.num_processes and all(
        has_done(state.hold, rank) for rank in ranks
    )


def _drained(state: State, seen: Seen, now: float) -> Exit:
    """Leave because of SIGTERM, after a last checkpoint if there was time for one."""
    if not seen.progress:
        reason = "SIGTERM, no rank reports to a manager"
    elif _all_wait(state, seen):
        saved = next(iter(seen.progress.values())).saved_step
        reason = f"SIGTERM, saved at step {saved}"
    else:
        reason = f"SIGTERM, no checkpoint within {now - state.held_since:.0f} s"
        return Exit(EXIT_UNSAVED, reason, Outcome.DRAINED)
    return Exit(EXIT_DRAINED, reason, Outcome.DRAINED)


def exit_of(content: JobEnded | Rejected) -> Exit:
    """The end of an agent that can be in no other world."""
    if isinstance(content, Rejected):
        return Exit(EXIT_REPLACE, f"this node is not used: {content.reason}")
    has_succeeded = content.outcome is Outcome.SUCCEEDED
    code = 0 if has_succeeded else EXIT_JOB_FAILED
    return Exit(code, f"the job has {content.outcome}: {content.reason}")


def _finished(state: State, seen: Seen, now: float) -> Next:
    """Stay until the job has ended, or the processes have to start again with others."""
    if isinstance(seen.content, JobEnded | Rejected):
        return state, [exit_of(seen.content)]
    if seen.stop is not None:
        return _leave(state, seen, now)
    if seen.drains:
        return state, [Exit(EXIT_DRAINED, "the processes of this node have succeeded")]
    if seen.silence > state.limits.patience:
        reason = (
            "the processes of this node have succeeded, how the job ends is not known: the master "
            f"has not answered for {seen.silence:.0f} s\nAsk it once it answers (remesh status URL)"
        )
        return state, [Exit(EXIT_JOB_FAILED, reason)]
    return state, []
