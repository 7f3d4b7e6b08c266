"""Everything that the master must not forget, as a pure machine.

`apply` takes the state of a job, an event and the time, and gives the next state. Events are few
and small; the journal keeps them, and replaying them gives the same state. What changes with every
heartbeat is not here but in `remesh.elastic.live`; the master turns it into an event only when it
means something: a node is lost, a checkpoint was made, the job hangs.

A world that the rendezvous has formed may have to be *checked* before its processes start: members
are then given tests in place of their places. Faulty ones are excluded, and the others form a new
world.

A world that could grow, or one of whose nodes has to go, first *wishes* for a checkpoint. Growing
is granted when the checkpoint is made, or a grace time has passed: scripts that report no
checkpoints wait no longer than that.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from itertools import chain, count

import msgspec

from remesh.elastic import checks, rendezvous
from remesh.elastic.budget import Spent
from remesh.elastic.events import (
    Drain,
    Event,
    Fail,
    Hang,
    HangOver,
    Join,
    Leave,
    Lose,
    Noted,
    Put,
    Saved,
    Tested,
    WantCheck,
)
from remesh.elastic.failures import (
    Decision,
    Patterns,
    ProcessFailure,
    Ruling,
    decide,
)
from remesh.elastic.progress import Progress
from remesh.elastic.rendezvous import Outcome

MAX_RECORDS = 500
"""Failures, and lines of history, that are kept."""


class HangAction(StrEnum):
    """What happens to a job that hangs, after the stacks of its processes were collected."""

    NOTHING = "nothing"
    RESTART = "restart"
    FAIL = "fail"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the master treats a job.

    Attributes:
        heartbeat_timeout: Seconds of silence after which a node is lost.
        check: Test nodes that have not been tested before they train.
        check_timeout: Seconds within which a test must be reported.
        exclude_stragglers: Do not use slow nodes if enough others are there.
        save_grace: Seconds that a growing world waits for a checkpoint.
        hang_timeout: Seconds without a step after which the job hangs; None: never.
        hang_action: What happens then.
        patterns: What tells kinds of failures apart.
        restart_refill: Seconds after which a node gets back one of the restarts that it was
            charged with, and the job one of those after hangs; None: never.
    """

    heartbeat_timeout: float = 10.0
    check: bool = False
    check_timeout: float = 120.0
    exclude_stragglers: bool = False
    save_grace: float = 60.0
    hang_timeout: float | None = None
    hang_action: HangAction = HangAction.RESTART
    patterns: Patterns = Patterns()
    restart_refill: float | None = None


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of one node in one round, and what followed.

    Attributes:
        node_id: The node.
        round: The round.
        time: When the master heard of it.
        failures: The processes.
        ruling: What followed.
    """

    node_id: int
    round: int
    time: float
    failures: tuple[ProcessFailure, ...]
    ruling: Ruling


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a world that was lost or left before its processes had succeeded.

    Attributes:
        node_id: The node.
        round: The round of the world.
        time: When the master knew it.
        lost: Whether nothing was heard of it; otherwise it said that it left.
        text: What happened, in a sentence.
    """

    node_id: int
    round: int
    time: float
    lost: bool
    text: str


class Line(msgspec.Struct, frozen=True):
    """A line of the job's history."""

    time: float
    text: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A check of the members of a world.

    Attributes:
        number: Counts the checks.
        round: The round whose world is checked.
        plan: The groups of the test round that runs.
        since: When it began.
        reports: What nodes have reported in it, by node id.
        results: The test rounds before it.
    """

    number: int
    round: int
    plan: tuple[tuple[int, ...], ...]
    since: float
    reports: dict[int, Tested] = {}
    results: tuple[tuple[checks.GroupResult, ...], ...] = ()


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is wished for before the world changes.

    Attributes:
        round: The round whose ranks should save.
        until: When it is waited for no longer.
        saved_before: The newest checkpoint when the wish was made.
        draining: Ids of the nodes that have to go.
    """

    round: int
    until: float
    saved_before: int | None
    draining: frozenset[int] = frozenset()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must not be forgotten.

    Attributes:
        policy: How the job is treated.
        began: When its first node joined.
        ended: When it ended; None while it runs.
        rendezvous: Nodes and world; None before the first join.
        max_restarts: Restarts that each node may be charged with.
        spent: Restarts that each node was charged with, by node id.
        names: Node ids by name.
        records: Failures, oldest first.
        departures: Nodes that were lost or left, oldest first.
        words: What nodes left for others in this round.
        checked: Incarnations that passed a check, by node id.
        check_reason: Why the next world is to be checked; empty if it need not be.
        check: The check that runs.
        num_checks: Checks so far.
        verdict: What the last check found, in words by node id.
        wish: The checkpoint that is wished for.
        saved: The step of the newest checkpoint.
        dump: Number of the last wish for stacks.
        hanging: Round and reason of a hang that is not over.
        forced: Round and reason of a restart of everybody.
        hangs: Restarts after hangs.
        progress: How far the training was when that was noted last.
        history: What happened.
        forgotten: What agents know of the job that this state does not; empty if nothing.
    """

    policy: Policy
    began: float | None = None
    ended: float | None = None
    rendezvous: rendezvous.State | None = None
    max_restarts: int = 0
    spent: dict[int, Spent] = {}
    names: dict[str, int] = {}
    records: tuple[FailureRecord, ...] = ()
    departures: tuple[Departure, ...] = ()
    words: dict[str, str] = {}
    checked: dict[int, str] = {}
    check_reason: str = ""
    check: Check | None = None
    num_checks: int = 0
    verdict: dict[int, str] = {}
    wish: Wish | None = None
    saved: int | None = None
    dump: int = 0
    hanging: tuple[int, str] | None = None
    forced: tuple[int, str] | None = None
    hangs: Spent = Spent()
    progress: Progress | None = None
    history: tuple[Line, ...] = ()
    forgotten: str = ""


def start(policy: Policy) -> State:
    """A job of which no node has been heard."""
    return State(policy=policy)


def assign_id(
    state: State, name: str, wanted: int | None, has_living_agent: Callable[[int], bool | None]
) -> tuple[int, str] | None:
    """The id of a node, and the name that this id has from now on.

    That is the id it wants, the one its name had, or the smallest free one. If an agent of that
    name lives, the name gets a number.

    Args:
        state: The state.
        name: What the node calls itself.
        wanted: The id it wants; None if any will do.
        has_living_agent: Whether another agent holds an id and lives; None if that is not known.

    Returns:
        None as long as it is not known whether the id can be had.

    Raises:
        ValueError: If another agent holds the wanted id and lives.
    """
    labels = chain([name], (f"{name} ({number})" for number in count(2)))
    if wanted is not None:
        lives = has_living_agent(wanted)
        if lives:
            raise ValueError(
                f"node id {wanted} belongs to another agent, which lives; give each node an id of "
                "its own"
            )
        label = next(label for label in labels if state.names.get(label) in (None, wanted))
        return None if lives is None else (wanted, label)
    taken = set(state.names.values())
    for label in labels:
        if label not in state.names:
            return next(number for number in count() if number not in taken), label
        lives = has_living_agent(state.names[label])
        if not lives:
            return None if lives is None else (state.names[label], label)
    raise AssertionError("labels never end")


def apply(state: State, event: Event, now: float) -> State:
    """The state after an event."""
    if isinstance(event, Join):
        state = _join(state, event, now)
    elif state.rendezvous is None:
        return state
    else:
        state = _happen(state, event, state.rendezvous.round, now)
    return _settle(state, now)


def _happen(state: State, event: Event, current: int, now: float) -> State:
    """What an event changes by itself, in a job whose current round is given."""
    match event:
        case Leave(node_id=node_id, incarnation=incarnation, outcome=outcome, reason=reason):
            text = f"node {node_id} leaves, {outcome}: {reason}"
            if outcome is not Outcome.SUCCEEDED:
                state = _depart(state, node_id, incarnation, text, now, lost=False)
            state = _note(state, now, text)
            return _step(state, rendezvous.Left(node_id, incarnation, outcome), now)
        case Lose(node_id=node_id, incarnation=incarnation):
            text = f"node {node_id} is lost: nothing was heard of it"
            state = _note(_depart(state, node_id, incarnation, text, now, lost=True), now, text)
            return _step(state, rendezvous.Lost(node_id, incarnation), now)
        case Fail():
            return _fail(state, event, now)
        case Drain():
            return _drain(state, event, now)
        case Put(round=number, key=key, value=value) if number == current:
            return _replace(state, words={**state.words, key: value})
        case Tested():
            return _tested(state, event)
        case WantCheck(reason):
            return _note(_replace(state, check_reason=reason), now, f"check wanted: {reason}")
        case Saved(step) if state.saved is None or step > state.saved:
            return _replace(state, saved=step)
        case Hang(number, reason) if number == current and state.hanging is None:
            state = _replace(state, hanging=(number, reason), dump=state.dump + 1)
            return _note(state, now, f"the job hangs: {reason}")
        case Noted(progress):
            return _replace(state, progress=progress)
        case HangOver(number):
            return _end_hang(state, number, now)
    return state


def _replace(state: State, **changes: object) -> State:
    return msgspec.structs.replace(state, **changes)


def _note(state: State, now: float, text: str) -> State:
    return _replace(state, history=(*state.history, Line(now, text))[-MAX_RECORDS:])


def _depart(
    state: State, node_id: int, incarnation: str, text: str, now: float, *, lost: bool
) -> State:
    """Remember that a member of the world goes: it explains why others fail."""
    world = state.rendezvous
    assert world is not None
    member = world.member(node_id)
    if member is None or member.incarnation != incarnation or node_id not in world.active:
        return state
    departure = Departure(node_id=node_id, round=world.round, time=now, lost=lost, text=text)
    return _replace(state, departures=(*state.departures, departure)[-MAX_RECORDS:])


def _step(state: State, event: rendezvous.Event, now: float) -> State:
    """Let the rendezvous take a step, and begin what a new round begins."""
    assert state.rendezvous is not None
    before = state.rendezvous
    after = rendezvous.step(before, event, now)
    if after is before:
        return state
    state = _replace(state, rendezvous=after)
    if after.world is not before.world:
        members = ", ".join(str(node.id) for node in after.world)
        state = _note(state, now, f"round {after.round}: nodes {members}")
        state = _replace(state, words={}, wish=None, hanging=None, forced=None, check=None)
        state = _begin_check(state, now)
    if after.outcome is not None and before.outcome is None:
        state = _note(state, now, f"the job has {after.outcome}: {after.reason}")
        state = _replace(state, ended=now)
    return state


def _join(state: State, event: Join, now: float) -> State:
    if state.rendezvous is None:
        state = _replace(
            state,
            began=now,
            rendezvous=rendezvous.start(event.settings, now),
            max_restarts=event.max_restarts,
        )
    node = event.node
    assert state.rendezvous is not None
    if event.after_round > state.rendezvous.round:
        text = (
            f"node {node.id} comes from round {event.after_round}, the journal knows only "
            f"{state.rendezvous.round} rounds: it was lost, or is an old copy"
        )
        state = _note(_replace(state, forgotten=text), now, text)
    if state.names.get(node.name) != node.id:
        state = _replace(state, names={**state.names, node.name: node.id})
    return _step(state, rendezvous.Joined(node, event.after_round), now)


def record_of(state: State, node_id: int, round_of_node: int) -> FailureRecord | None:
    """What was ruled about a node's failures in a round."""
    for record in reversed(state.records):
        if (record.node_id, record.round) == (node_id, round_of_node):
            return record
    return None


def charges_of(state: State, node_id: int, now: float) -> Spent:
    """The restarts that a node is charged with now."""
    return state.spent.get(node_id, Spent()).at(now, state.policy.restart_refill)


def _fail(state: State, event: Fail, now: float) -> State:
    assert state.rendezvous is not None
    known = state.rendezvous.known(event.node_id)
    if known is None or known.incarnation != event.incarnation:
        return state
    if not event.failures or record_of(state, event.node_id, event.round) is not None:
        return state  # the second copy of a message
    charged = charges_of(state, event.node_id, now)
    ruling = decide(
        event.failures,
        num_charged=charged.count,
        max_restarts=state.max_restarts,
        patterns=state.policy.patterns,
    )
    record = FailureRecord(
        node_id=event.node_id,
        round=event.round,
        time=now,
        failures=event.failures,
        ruling=ruling,
    )
    state = _replace(state, records=(*state.records, record)[-MAX_RECORDS:])
    state = _note(state, now, ruling.reason)
    if ruling.charged:
        state = _replace(state, spent={**state.spent, event.node_id: charged.and_one()})
    if ruling.decision is Decision.REPLACE:
        state = _replace(state, check_reason=f"node {event.node_id} reported a broken machine")
        barred = rendezvous.Excluded(event.node_id, event.incarnation, ruling.reason)
        state = _step(state, barred, now)
    if ruling.decision is Decision.GIVE_UP:
        state = _step(state, rendezvous.Ended(Outcome.FAILED, ruling.reason), now)
    return state


def _drain(state: State, event: Drain, now: float) -> State:
    assert state.rendezvous is not None
    known = state.rendezvous.known(event.node_id)
    if known is None or known.incarnation != event.incarnation:
        return state
    if event.node_id not in state.rendezvous.active:
        return state
    old = state.wish
    if old is not None and event.node_id in old.draining:
        return state
    wish = Wish(
        round=state.rendezvous.round,
        until=now + event.seconds,
        saved_before=state.saved if old is None else old.saved_before,
        draining=(old.draining if old is not None else frozenset()) | {event.node_id},
    )
    return _note(
        _replace(state, wish=wish),
        now,
        f"node {event.node_id} has to go within {event.seconds:g} s: {event.reason}",
    )


def _end_hang(state: State, number: int, now: float) -> State:
    if state.hanging is None or state.hanging[0] != number:
        return state
    reason = f"the job hung: {state.hanging[1]}"
    state = _replace(state, hanging=None)
    match state.policy.hang_action:
        case HangAction.NOTHING:
            return state
        case HangAction.RESTART:
            spent = state.hangs.at(now, state.policy.restart_refill)
            if spent.count < state.max_restarts:
                return _replace(state, forced=(number, reason), hangs=spent.and_one())
            reason = f"{reason}; its {state.max_restarts} restarts are used up"
    return _step(state, rendezvous.Ended(Outcome.FAILED, reason), now)


def _settle(state: State, now: float) -> State:
    """What follows from the state and the time alone."""
    state = _step(state, rendezvous.Tick(), now)
    state = _go_on_with_check(state, now)
    assert state.rendezvous is not None
    world = state.rendezvous
    if state.check is None and state.wish is None and world.active:
        size = rendezvous.larger_size(world)
        if size is not None:
            wish = Wish(
                round=world.round,
                until=now + state.policy.save_grace,
                saved_before=state.saved,
            )
            text = f"the world can grow to {size} nodes: {len(world.ready)} more wait"
            state = _note(_replace(state, wish=wish), now, text)
    return state


def is_granted(state: State, now: float) -> bool:
    """Whether the checkpoint that was wished for has been made, or waited for long enough."""
    wish = state.wish
    if wish is None:
        return True
    made = state.saved is not None and (
        wish.saved_before is None or state.saved > wish.saved_before
    )
    return made or now >= wish.until


def _begin_check(state: State, now: float) -> State:
    assert state.rendezvous is not None
    world = state.rendezvous.world
    unknown = [node.id for node in world if state.checked.get(node.id) != node.incarnation]
    if not state.check_reason and not (state.policy.check and unknown):
        return state
    number = state.num_checks + 1
    plan = checks.plan_round([node.id for node in world], ())
    check = Check(number=number, round=state.rendezvous.round, plan=plan, since=now)
    return _replace(state, check=check, num_checks=number)


def _tested(state: State, event: Tested) -> State:
    check = state.check
    assert state.rendezvous is not None
    if check is None or (event.check, event.test_round) != (check.number, len(check.results)):
        return state
    member = state.rendezvous.member(event.node_id)
    if member is None or member.incarnation != event.incarnation:
        return state
    reports = {**check.reports, event.node_id: event}
    return _replace(state, check=msgspec.structs.replace(check, reports=reports))


def _go_on_with_check(state: State, now: float) -> State:
    check = state.check
    if check is None:
        return state
    assert state.rendezvous is not None
    world = state.rendezvous
    if world.outcome is not None:
        return _replace(state, check=None)
    if len(world.active) != len(world.world):
        return _meet_again(_replace(state, check=None), now)  # somebody was lost meanwhile
    overdue = now - check.since >= state.policy.check_timeout
    if not overdue and len(check.reports) < len(world.world):
        return state  # every member is in a group of every test round
    results = (*check.results, tuple(_group_result(group, check) for group in check.plan))
    plan = checks.plan_round([node.id for node in world.world], results)
    if plan:
        check = msgspec.structs.replace(check, plan=plan, since=now, reports={}, results=results)
        return _replace(state, check=check)
    verdict = checks.judge(
        [node.id for node in world.world], [result for done in results for result in done]
    )
    return _end_check(state, verdict, now)


def _group_result(group: tuple[int, ...], check: Check) -> checks.GroupResult:
    reports = [check.reports[node_id] for node_id in group if node_id in check.reports]
    silent = [node_id for node_id in group if node_id not in check.reports]
    messages = [f"node {report.node_id}: {report.message}" for report in reports if report.message]
    messages += [f"node {node_id} did not report in time" for node_id in silent]
    return checks.GroupResult(
        members=group,
        passed=not silent and all(report.passed for report in reports),
        broken=frozenset(report.node_id for report in reports if report.broken),
        seconds={report.node_id: report.seconds for report in reports},
        message="; ".join(messages),
    )


def _end_check(state: State, verdict: checks.Verdict, now: float) -> State:
    assert state.rendezvous is not None
    world = state.rendezvous
    out = dict(verdict.faulty)
    slow = {
        node_id: f"is a straggler: its probe takes {factor:.1f} times the median"
        for node_id, factor in verdict.stragglers.items()
    }
    if state.policy.exclude_stragglers:
        rest = len(world.world) + len(world.ready) - len(out) - len(slow)
        if world.settings.fitting(rest):
            out |= slow
    words = {**dict(verdict.suspects), **slow, **out}
    words |= {node_id: "healthy" for node_id in verdict.healthy if node_id not in words}
    state = _replace(
        state,
        check=None,
        check_reason="",
        verdict=words,
        checked={node.id: node.incarnation for node in world.world if node.id not in out},
    )
    said = [f"node {node_id} {text}" for node_id, text in sorted(words.items())]
    said = [text for text in said if not text.endswith(" healthy")] or ["all nodes are healthy"]
    for group in verdict.connections:
        said.append(f"the connection among nodes {', '.join(map(str, group))} failed")
    state = _note(state, now, f"check {state.num_checks}: {'; '.join(said)}")
    if not out:
        return state
    for node in world.world:
        if node.id in out:
            reason = f"check {state.num_checks}: {out[node.id]}"
            barred = rendezvous.Excluded(node.id, node.incarnation, reason)
            state = _step(state, barred, now)
    return _meet_again(state, now)


def _meet_again(state: State, now: float) -> State:
    """Let the members that are left join again: none has started processes yet."""
    assert state.rendezvous is not None
    world = state.rendezvous
    for node in world.world:
        if node.id in world.active:
            state = _step(state, rendezvous.Joined(node, world.round), now)
    return state
