"""The replies of the master that depend on the job: pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from remesh.elastic.job import Job, awaits_checkpoint
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
    restart_reason,
)


def assignments_of(job: Job) -> dict[int, Assignment]:
    """The assignment of every member of the current world, by node id."""
    if job.rendezvous is None or not job.rendezvous.world:
        return {}
    world = job.rendezvous.world
    total = sum(node.num_processes for node in world)
    timeout = job.policy.heartbeat_timeout
    assignments, first = {}, 0
    for rank, node in enumerate(world):
        assignments[node.id] = Assignment(
            node.id, job.rendezvous.round, rank, len(world), first, total, world[0], timeout
        )
        first += node.num_processes
    return assignments


def join_reply(job: Job, node: Node, assignments: Mapping[int, Assignment]) -> JoinReply | None:
    """The reply to a node that has joined; None while it has to wait.

    Args:
        job: The job, after the join.
        node: The node, with its id.
        assignments: `assignments_of(job)`.
    """
    world = job.rendezvous
    if world is None:
        return None
    if world.outcome is not None:
        return JobEnded(world.outcome, world.reason)
    if is_replaced(world, node):
        return Rejected(f"another agent has taken over node id {node.id}")
    reason = exclusion_of(world, node)
    if reason is not None:
        return Rejected(reason)
    if world.member(node.id) != node or node.id not in world.active:
        return None
    if job.check is None:
        return assignments.get(node.id)
    if node.id in job.check.reports:
        return None
    group = next((group for group in job.check.groups if node.id in group), ())
    members = tuple(member for member in map(world.member, group) if member is not None)
    check = job.check
    timeout = job.policy.heartbeat_timeout
    return NodeTest(node.id, world.round, check.number, len(check.results), members, timeout)


def waiting(job: Job, node: Node) -> Waiting:
    """The reply to a node that has to wait."""
    return Waiting(node.id, _wait_reason(job), job.policy.heartbeat_timeout)


def _wait_reason(job: Job) -> str:
    world = job.rendezvous
    if world is None:
        return "no node has joined"
    if job.check is not None:
        return f"check {job.check.number} is running"
    if world.active:
        return (
            f"round {world.round} runs on {len(world.active)} nodes; {len(world.ready)} are ready "
            "for a larger world"
        )
    settings = world.settings
    return (
        f"{len(world.ready)} nodes are ready, the world has {settings.min_nodes} to "
        f"{settings.max_nodes} in multiples of {settings.node_unit}"
    )


def beat_reply(job: Job, beat: Beat, now: float) -> BeatReply:
    """What a node should do that runs processes."""
    world = job.rendezvous
    if world is None:
        return BeatReply(restart=Change.STALE, reason="the master knows no round")
    if world.outcome is not None:
        return BeatReply(outcome=world.outcome, reason=world.reason)
    current = beat.round == world.round
    member = world.member(beat.node_id)
    if not current or member is None or member.incarnation != beat.incarnation:
        reason = f"round {beat.round} is over for node {beat.node_id}"
        return BeatReply(restart=Change.STALE, reason=reason)
    dump = job.dump if job.hanging is not None else 0
    if job.hang_restart is not None:
        return BeatReply(restart=Change.HANG, reason=job.hang_restart[1], dump=dump)
    change = restart_reason(world, beat.node_id, beat.round)
    awaits = awaits_checkpoint(job, now)
    if change is not None and (change[0] is not Change.GROW or not awaits):
        return BeatReply(restart=change[0], reason=change[1], dump=dump)
    return BeatReply(save=awaits, dump=dump)
