"""The phase and the conditions of a job, which `kubectl get` and `kubectl wait` show. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from remesh.kubernetes.observed import Master, Pod, Role
from remesh.kubernetes.resource import (
    FINISHED,
    LABEL_JOB,
    LABEL_ROLE,
    Condition,
    Holds,
    Job,
    Phase,
    Status,
)

STALLED = "Stalled"
"""The condition of a job with which the operator cannot go on. The next status is without it."""


def stalled(conditions: object, text: str, now: datetime) -> list[Any]:
    """The conditions of such a job, whatever stands in its JSON for those it has."""
    found = conditions if isinstance(conditions, list) else []
    known = [each for each in found if isinstance(each, Mapping) and "type" in each]
    made = Condition(
        type=STALLED,
        status="True",
        reason="OperatorFailed",
        message=text,
        last_transition_time=now,
    )
    others = [each for each in known if each["type"] != STALLED]
    return [*others, msgspec.to_builtins(made)]


def selector_of(job: Job) -> str:
    """The labels of the workers of a job, as a selector."""
    return f"{LABEL_JOB}={job.name},{LABEL_ROLE}={Role.WORKER}"


def described(
    job: Job, status: Status, workers: Sequence[Pod], master: Master | None, now: datetime
) -> Status:
    """The status with the phase and the conditions that follow from it."""
    running = sum(pod.is_running for pod in workers)
    status = msgspec.structs.replace(status, replicas=running)
    if status.phase not in (*FINISHED, Phase.SUSPENDED):
        phase, reason = _phase(job, running, workers, master)
        status = msgspec.structs.replace(status, phase=phase, reason=reason)
    phase = status.phase
    degraded = phase in (Phase.PENDING, Phase.RUNNING) and running < job.spec.replicas
    few = f"{running} of {job.spec.replicas} workers run" + _why_waiting(workers)
    values = {
        "Training": (phase is Phase.RUNNING, phase.value, status.reason),
        "Degraded": (degraded, "TooFewWorkers" if degraded else "AllWorkers", few),
        "Suspended": (phase is Phase.SUSPENDED, phase.value, ""),
        "Complete": (phase is Phase.SUCCEEDED, phase.value, ""),
        "Failed": (
            phase is Phase.FAILED,
            phase.value,
            status.reason if phase is Phase.FAILED else "",
        ),
    }
    old = {each.type: each for each in status.conditions}
    conditions = tuple(
        _condition(old.get(kind), kind, *value, now) for kind, value in values.items()
    )
    return msgspec.structs.replace(status, conditions=conditions)


def _phase(
    job: Job, running: int, workers: Sequence[Pod], master: Master | None
) -> tuple[Phase, str]:
    """The phase of a job that has not finished, and the reason."""
    if master is not None and master.phase in ("running", "hanging"):
        return Phase.RUNNING, master.reason
    if job.spec.fitting(running) and (master is None or master.phase == "checking"):
        text = "the master is not reached" if master is None else master.reason
        return (Phase.PENDING if job.status.phase is Phase.PENDING else Phase.RUNNING), text
    if master is not None and job.spec.fitting(running):
        return Phase.PENDING, master.reason
    text = f"{running} workers run, {job.spec.fewest} are needed"
    return Phase.PENDING, text + _why_waiting(workers)


def _why_waiting(workers: Sequence[Pod]) -> str:
    """The reason that Kubernetes gives for a pod that does not run, if any."""
    waiting = [pod for pod in workers if pod.phase == "Pending" and pod.expires is None]
    texts = [pod.message or pod.reason for pod in waiting if pod.message or pod.reason]
    return f"; {texts[0]}" if texts else ""


def _condition(
    old: Condition | None, kind: str, holds: bool, reason: str, message: str, now: datetime
) -> Condition:
    status: Holds = "True" if holds else "False"
    time = now if old is None or old.status != status else old.last_transition_time
    return Condition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=time
    )
