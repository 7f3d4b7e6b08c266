"""What the master answers: pure functions of the job's state."""

from __future__ import annotations

from collections.abc import Mapping

from remesh.elastic.job import State, is_granted
from remesh.elastic.protocol import (
    Barred,
    BeatReply,
    JoinReply,
    Over,
    Placed,
    Speaker,
    Test,
    Waiting,
)
from remesh.elastic.rendezvous import (
    Change,
    Node,
    exclusion_of,
    is_replaced,
    restart_reason,
)


def places_of(state: State) -> dict[int, Placed]:
    """The place of every member of the current world, by node id."""
    if state.rendezvous is None or not state.rendezvous.world:
        return {}
    world = state.rendezvous.world
    total = sum(node.num_processes for node in world)
    silence = state.policy.heartbeat_timeout
    places, first = {}, 0
    for rank, node in enumerate(world):
        places[node.id] = Placed(
            node.id, state.rendezvous.round, rank, len(world), first, total, world[0], silence
        )
        first += node.num_processes
    return places


def join_reply(state: State, node: Node, places: Mapping[int, Placed]) -> JoinReply | None:
    """The answer to a node that has joined; None while it has to wait.

    Args:
        state: The state, after the join.
        node: The node, with the id that it was given.
        places: What `places_of` gives for this state.
    """
    world = state.rendezvous
    if world is None:
        return None
    if world.outcome is not None:
        return Over(world.outcome, world.reason)
    if is_replaced(world, node):
        return Barred(f"another agent has taken over node id {node.id}")
    reason = exclusion_of(world, node)
    if reason is not None:
        return Barred(reason)
    if world.member(node.id) != node or node.id not in world.active:
        return None
    if state.check is None:
        return places.get(node.id)
    if node.id in state.check.reports:
        return None
    group = next((group for group in state.check.plan if node.id in group), ())
    members = tuple(member for member in map(world.member, group) if member is not None)
    check = state.check
    silence = state.policy.heartbeat_timeout
    return Test(node.id, world.round, check.number, len(check.results), members, silence)


def waiting(state: State, node: Node) -> Waiting:
    """What to say to a node for which there is no answer yet."""
    return Waiting(node.id, _what_is_missing(state), state.policy.heartbeat_timeout)


def _what_is_missing(state: State) -> str:
    world = state.rendezvous
    if world is None:
        return "no node has joined"
    if state.check is not None:
        return f"check {state.check.number} is running"
    if world.active:
        return (
            f"round {world.round} runs on {len(world.active)} nodes; {len(world.ready)} wait until "
            "a larger world is possible"
        )
    settings = world.settings
    return (
        f"{len(world.ready)} nodes are ready, the world has {settings.min_nodes} to "
        f"{settings.max_nodes} in multiples of {settings.node_unit}"
    )


def beat_reply(state: State, speaker: Speaker, now: float) -> BeatReply:
    """What a node should do that runs processes."""
    world = state.rendezvous
    if world is None:
        return BeatReply(restart=Change.STALE, reason="the master knows of no round")
    if world.outcome is not None:
        return BeatReply(over=world.outcome, reason=world.reason)
    current = speaker.round == world.round
    member = world.member(speaker.node_id)
    if not current or member is None or member.incarnation != speaker.incarnation:
        reason = f"round {speaker.round} is over for node {speaker.node_id}"
        return BeatReply(restart=Change.STALE, reason=reason)
    dump = state.dump if state.hanging is not None else 0
    if state.forced is not None:
        return BeatReply(restart=Change.HANG, reason=state.forced[1], dump=dump)
    change = restart_reason(world, speaker.node_id, speaker.round)
    granted = is_granted(state, now)
    if change is not None and (change[0] is not Change.GROW or granted):
        return BeatReply(restart=change[0], reason=change[1], dump=dump)
    wished = state.wish is not None and not granted
    return BeatReply(save=wished, dump=dump)
