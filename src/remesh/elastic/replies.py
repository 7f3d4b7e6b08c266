"""The replies of the master that depend on the job: pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from remesh.elastic.job import Job, awaits_checkpoint, is_for_growth, ordered_change
from remesh.elastic.protocol import (
    Assignment,
    Beat,
    BeatReply,
    JobEnded,
    JoinReply,
    NodeTest,
    Rejected,
    Waiting,
)
from remesh.elastic.rendezvous import (
    Change,
    Node,
    exclusion_of,
    is_replaced,
)


def assignments_of(job: Job) -> dict[int, Assignment]:
    """The assignment of every member of the current nodes, by node id."""
    if job.rendezvous is None or not job.rendezvous.world:
        return {}
    world_nodes = job.rendezvous.world
    total = sum(node.num_processes for node in world_nodes)
    timeout = job.policy.heartbeat_timeout
    assignments, first = {}, 0
    for rank, node in enumerate(world_nodes):
        assignments[node.id] = Assignment(
            node.id,
            job.rendezvous.round,
            rank,
            len(world_nodes),
            first,
            total,
            world_nodes[0],
            timeout,
        )
        first += node.num_processes
    return assignments


def join_reply(job: Job, node: Node, assignments: Mapping[int, Assignment]) -> JoinReply | None:
    """The reply to a node that has joined; None while it has to wait."""
    nodes = job.rendezvous
    if nodes is None:
        return None
    if nodes.outcome is not None:
        return JobEnded(nodes.outcome, nodes.reason)
    if is_replaced(nodes, node):
        return Rejected(f"another agent has taken over node id {node.id}")
    reason = exclusion_of(nodes, node)
    if reason is not None:
        return Rejected(reason)
    if nodes.member(node.id) != node or node.id not in nodes.active:
        return None
    if job.check is None:
        return assignments.get(node.id)
    if node.id in job.check.reports:
        return None
    group = next((group for group in job.check.groups if node.id in group), ())
    members = tuple(member for member in map(nodes.member, group) if member is not None)
    check = job.check
    timeout = job.policy.heartbeat_timeout
    return NodeTest(node.id, nodes.round, check.number, len(check.results), members, timeout)


def waiting(job: Job, node: Node) -> Waiting:
    """The reply to a node that has to wait."""
    return Waiting(node.id, _wait_reason(job), job.policy.heartbeat_timeout)


def _wait_reason(job: Job) -> str:
    nodes = job.rendezvous
    if nodes is None:
        return "no node has joined"
    if job.check is not None:
        return f"check {job.check.number} is running"
    if nodes.active:
        return (
            f"round {nodes.round} runs on {len(nodes.active)} nodes; {len(nodes.ready)} are ready "
            "for a larger world"
        )
    settings = nodes.settings
    return (
        f"{len(nodes.ready)} nodes are ready, the world has {settings.min_nodes} to "
        f"{settings.max_nodes} in multiples of {settings.node_unit}"
    )


def beat_reply(job: Job, beat: Beat, now: float) -> BeatReply:
    """What a node should do that runs processes."""
    nodes = job.rendezvous
    if nodes is None:
        return BeatReply(restart=Change.STALE, reason="the master knows no round")
    if nodes.outcome is not None:
        return BeatReply(outcome=nodes.outcome, reason=nodes.reason)
    current = beat.round == nodes.round
    member = nodes.member(beat.node_id)
    if not current or member is None or member.incarnation != beat.incarnation:
        reason = f"round {beat.round} is over for node {beat.node_id}"
        return BeatReply(restart=Change.STALE, reason=reason)
    dump = job.dump if job.hanging is not None else 0
    change = ordered_change(job, beat.node_id, beat.round, now)
    if change is not None:
        return BeatReply(restart=change[0], reason=change[1], dump=dump)
    awaits = awaits_checkpoint(job, now)
    return BeatReply(save=awaits, grow=awaits and is_for_growth(job), dump=dump)
