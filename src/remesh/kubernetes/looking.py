"""One look at a job: read it and its pods, decide, write the status, act.

The order makes the look safe beside others (`reconcile`): the job is read before its pods, and its
status is written, on the condition that nothing else has written to the job since, before the first
action. The write is made even if the status is unchanged: it is the proof that what was seen of the
job still holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec

from remesh.kubernetes.observed import Master, Pod
from remesh.kubernetes.reconcile import Action, reconcile
from remesh.kubernetes.resource import Job, Status


class Key(NamedTuple):
    """Where a job is."""

    namespace: str
    name: str


class ConflictError(Exception):
    """The job was written by another since it was read."""


class Cluster(Protocol):
    """The requests of a look to the API server."""

    async def read_job(self, key: Key) -> Job | None:
        """A job as it is now; None if there is none."""

    async def list_pods(self, key: Key) -> tuple[Pod, ...]:
        """The pods of a job as they are now."""

    async def write_status(self, job: Job, status: Status) -> Job:
        """Write the status; the job after it. ConflictError if it has another version by now."""

    async def perform(self, job: Job, action: Action) -> None:
        """Carry out an action; no error if it was done, ConflictError as for `write_status`."""

    async def show_problem(self, key: Key, text: str) -> None:
        """Show on a job, as a condition and an event, that the operator cannot go on with it.

        The job may be one that cannot be read as such.
        """


Ask = Callable[[Job, tuple[Pod, ...]], Awaitable[Master | None]]
"""Asks the master of a job; None if it is not reached."""


@dataclass(frozen=True, slots=True)
class Look:
    """The findings and actions of a look."""

    job: Job | None  # the job after it; None if there is none
    pods: tuple[Pod, ...] = ()  # the pods before it
    master: Master | None = None  # what the master said
    actions: tuple[Action, ...] = ()  # what was done
    wake: float | None = None
    """Seconds after which time alone may change the decision; None: it does not."""


async def look(cluster: Cluster, key: Key, ask: Ask, clock: Callable[[], datetime]) -> Look:
    """Look at a job once, and act; ConflictError if another wrote to it meanwhile: look again."""
    job = await cluster.read_job(key)
    if job is None:
        return Look(None)
    pods = await cluster.list_pods(key)
    master = await ask(job, pods)
    decision = reconcile(job, pods, master, clock())
    if decision.actions or decision.status != job.status:
        job = await cluster.write_status(job, decision.status)
        job = msgspec.structs.replace(job, status=decision.status)
        for action in decision.actions:
            await cluster.perform(job, action)
    return Look(job, pods, master, decision.actions, decision.wake)
