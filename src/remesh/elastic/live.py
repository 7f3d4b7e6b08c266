"""What changes with every heartbeat, and what it means: who is alive, how far the ranks are.

Nothing here is kept when the master restarts; every node then has its full time to be heard again.
The functions that give events say what has to be remembered: a node is lost, a checkpoint was made,
the job hangs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from remesh.elastic.events import Event, Hang, HangOver, Lose, Noted, Saved
from remesh.elastic.job import State
from remesh.elastic.progress import (
    Progress,
    RankProgress,
    begin,
    begin_round,
    hangs,
    lagging_ranks,
    report,
)
from remesh.elastic.protocol import BeatRequest, StacksRequest

STACKS_TIMEOUT = 20.0
"""Seconds that the stacks of a hanging job are waited for."""
SURELY_BEATS = 5.0
"""Seconds, at most, within which an agent that lives is heard again."""
NOTE_EVERY = 10.0
"""Seconds between two notes of how far the training is."""


@dataclass(slots=True)
class Live:
    """What is known of the nodes at this moment.

    Attributes:
        heard: Incarnation and time of the last message, by node id.
        progress: How far the training is.
        ranks: How far each rank is that has reported in `round`.
        round: The round of the last heartbeat that counted.
        noted_at: When the progress was noted last.
        hung_at: When the stacks were asked for.
        stacks: Stacks of the last hang, by rank.
        answered: Nodes that have sent them.
        claims: Which other agent wants to have a node id, and since when, by node id.
    """

    heard: dict[int, tuple[str, float]]
    progress: Progress
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    round: int = 0
    noted_at: float = 0.0
    hung_at: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    claims: dict[int, tuple[str, float]] = field(default_factory=dict)

    @classmethod
    def after_start(cls, state: State, now: float) -> Live:
        """At the start of a master: nodes that it remembers count as just heard."""
        world = state.rendezvous
        known = {} if world is None else {node.id: node for node in world.world} | world.ready
        progress = begin(now if state.began is None else state.began)
        return cls(
            heard={node.id: (node.incarnation, now) for node in known.values()},
            progress=begin_round(state.progress or progress, now),
            round=0 if world is None else world.round,
            noted_at=now,
        )


def hear(live: Live, node_id: int, incarnation: str, now: float) -> None:
    """A message of a node has come."""
    live.heard[node_id] = (incarnation, now)


def is_over(live: Live, state: State, now: float) -> bool:
    """Whether the job has ended and no agent talks to the master any more.

    The agents learn of the end with a heartbeat. One that has said nothing for the time for silence
    has ended, or will not be heard again.
    """
    if state.ended is None:
        return False
    last = max((at for _, at in live.heard.values()), default=state.ended)
    return now - max(last, state.ended) >= state.policy.heartbeat_timeout


def has_living_agent(
    live: Live, state: State, node_id: int, incarnation: str, now: float
) -> bool | None:
    """Whether another agent than the one that asks holds a node id and lives.

    An agent that starts again asks for the id of the one that died. Two that run under one name, or
    were given one id by mistake, must not take it from each other in turn.

    Returns:
        None if that is not known yet: the other may have died just now.
    """
    world = state.rendezvous
    if world is None:
        return False
    holder = world.known(node_id)
    if holder is None and node_id in world.finished:
        holder = world.member(node_id)
    if holder is None or incarnation in (holder.incarnation, *world.replaced):
        return False
    claimant, since = live.claims.get(node_id, ("", now))
    if claimant != incarnation:
        since = now
        live.claims[node_id] = (incarnation, since)
    heard, at = live.heard.get(node_id, ("", since))
    if heard != holder.incarnation:
        at = since
    if now - at > min(state.policy.heartbeat_timeout / 2, SURELY_BEATS):
        return False
    return True if at > since else None


def excuse(live: Live, seconds: float) -> None:
    """The master itself stood still: that nothing was heard meanwhile says nothing of the nodes."""
    live.heard = {
        node_id: (incarnation, at + seconds) for node_id, (incarnation, at) in live.heard.items()
    }
    live.progress = msgspec.structs.replace(live.progress, moved=live.progress.moved + seconds)


def hear_beat(live: Live, state: State, beat: BeatRequest, now: float) -> list[Event]:
    """How far the ranks of a node are."""
    world = state.rendezvous
    if world is None or beat.round != world.round or beat.node_id not in world.active:
        return []
    if live.round != world.round:
        live.round = world.round
        live.progress = begin_round(live.progress, now)
        live.ranks = {}
    events: list[Event] = []
    for rank, heard in beat.ranks.items():
        known = live.ranks.get(rank)
        if known is None or heard.step != known.step or heard.saved_step != known.saved_step:
            at = RankProgress(
                step=heard.step,
                time=now - heard.age,
                step_seconds=heard.step_seconds,
                saved_step=heard.saved_step,
            )
            live.progress = report(live.progress, known, at)
            live.ranks[rank] = at
        if heard.saved_step is not None and (state.saved is None or heard.saved_step > state.saved):
            events.append(Saved(heard.saved_step))
    return events[-1:]


def hear_stacks(live: Live, state: State, request: StacksRequest) -> None:
    """Where the processes of a node were when the job hung last; that may be over by now."""
    if request.dump == state.dump:
        live.stacks.update(request.stacks)
        live.answered.add(request.node_id)


def events_of_time(live: Live, state: State, now: float) -> list[Event]:
    """What the passing of time has made true."""
    world = state.rendezvous
    if world is None:
        return []
    if world.outcome is not None:
        # Once: what is shown of a job that has ended does not change when its master restarts.
        return [Noted(live.progress)] if live.progress != state.progress else []
    events: list[Event] = []
    limit = state.policy.heartbeat_timeout
    for node_id in (*world.active, *world.ready):
        known = world.known(node_id)
        assert known is not None
        incarnation, at = live.heard.get(node_id, ("", now))
        if incarnation != known.incarnation:
            live.heard[node_id] = (known.incarnation, now)
        elif now - at > limit:
            events.append(Lose(node_id=node_id, incarnation=incarnation))
    if live.round == world.round and not events:
        events += _hang_events(live, state, now)
        if now - live.noted_at >= NOTE_EVERY and live.progress != state.progress:
            live.noted_at = now
            events.append(Noted(live.progress))
    return events


def _hang_events(live: Live, state: State, now: float) -> list[Event]:
    world = state.rendezvous
    assert world is not None
    if state.hanging is not None:
        all_here = world.active <= live.answered
        if all_here or now - live.hung_at > STACKS_TIMEOUT:
            live.progress = msgspec.structs.replace(live.progress, moved=now)
            return [HangOver(world.round)]
        return []
    if state.forced is None and hangs(live.progress, now, state.policy.hang_timeout):
        silent = now - live.progress.moved
        lagging = lagging_ranks(live.ranks)
        who = f"; ranks {', '.join(map(str, lagging))} are behind the others" if lagging else ""
        live.hung_at, live.stacks, live.answered = now, {}, set()
        return [Hang(world.round, f"no rank has finished a step for {silent:.0f} s{who}")]
    return []
