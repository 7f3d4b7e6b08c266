"""A job's pods, and the training as its master sees it. Pure.

Why a pod has ended follows from its exit code and what Kubernetes says of it. The exit codes are
those of `remesh run` (docs/elastic.md). The agent has restarted processes as often as its budget
allows before it ends with 1, and has told the master, which says whether the job has failed. So an
exit code of 1 here, in a job that has not failed, is the failure of one pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from remesh.elastic.lifecycle import EXIT_REPLACE
from remesh.elastic.status import Status
from remesh.errors import ClusterError
from remesh.kubernetes.resource import (
    LABEL_INDEX,
    LABEL_ROLE,
    LARGEST_INTEGER,
    FailureEntry,
    Training,
    parse_quantity,
)

MAX_MESSAGE = 1024
"""Characters of a message that are kept in the status of a job."""
_MAX_TIME = 253402300799.0
"""The end of the year 9999, in seconds since the epoch: the last time that a status can hold."""

EXIT_SUCCEEDED = 0
HARDWARE_CODES = (EXIT_REPLACE, 201, 202)
USAGE_CODES = (2, 126, 127, 128)
"""Wrong options; a command that cannot be run, or is not there, or was not started."""
STOPPED_CODES = (130, 137, 143)
"""SIGINT, SIGKILL, SIGTERM."""
HARDWARE_REASONS = ("UnexpectedAdmissionError",)
"""The kubelet's reason when a device that was promised to the pod is not usable."""
STOPPED_REASONS = (
    "Evicted",
    "Preempting",
    "Preempted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "DeadlineExceeded",
    "ContainerStatusUnknown",
)


class Role(StrEnum):
    """The purpose of a pod."""

    MASTER = "master"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of a job."""

    name: str
    role: Role  # what it is for
    index: int  # its node id, or the number of the master
    host: str = ""  # the Kubernetes node that it is bound to; empty before
    phase: str = "Pending"  # as in its status
    reason: str = ""  # why it is in that phase, or why its container waits
    message: str = ""  # the same in a sentence
    exit_code: int | None = None  # of its first container; None while that runs
    expires: datetime | None = None  # when it is expected to be gone, if it is to be deleted
    memory: int | None = None  # bytes that its first container may use

    @property
    def has_ended(self) -> bool:
        """True if its container does not run and will not again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_running(self) -> bool:
        """True if its container runs, and nothing is known to end it."""
        return self.phase == "Running" and self.expires is None


class Cause(StrEnum):
    """The cause of the end of a worker pod."""

    SUCCEEDED = "Succeeded"
    OUT_OF_MEMORY = "OutOfMemory"
    HARDWARE = "HardwareFailed"
    STOPPED = "Stopped"
    USAGE = "NotStarted"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker pod: its cause, and what is known, in words."""

    cause: Cause
    text: str


def classify(pod: Pod) -> Ending:
    """The end of a pod that has ended."""
    code, reason = pod.exit_code, pod.reason
    text = reason if code is None else f"exit code {code}" + (f" ({reason})" if reason else "")
    if pod.message:
        text = f"{text}: {pod.message}" if text else pod.message
    return Ending(_cause(code, reason, pod.phase), text or "no reason is known")


def _cause(code: int | None, reason: str, phase: str) -> Cause:
    if reason == "OOMKilled":
        return Cause.OUT_OF_MEMORY
    if reason in HARDWARE_REASONS or code in HARDWARE_CODES:
        return Cause.HARDWARE
    if reason in STOPPED_REASONS:
        return Cause.STOPPED
    if code == EXIT_SUCCEEDED or (code is None and phase == "Succeeded"):
        return Cause.SUCCEEDED
    if code in USAGE_CODES:
        return Cause.USAGE
    return Cause.STOPPED if code in STOPPED_CODES else Cause.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterAnswer:
    """The answer of a job's master."""

    epoch: int  # `JobStatus.epoch` of the job when it was asked
    training: Training  # how far the training is
    errors: tuple[FailureEntry, ...] = ()  # the newest failures, newest first


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def parse_pod(data: Mapping[str, Any]) -> Pod | None:
    """A pod from the JSON of the API server; None if its labels are not those of a job's pod."""
    meta, status = data["metadata"], data.get("status") or {}
    labels = meta.get("labels") or {}
    role, index = labels.get(LABEL_ROLE, ""), labels.get(LABEL_INDEX, "")
    if role not in tuple(Role) or not index.isdecimal():
        return None
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    unscheduled = conditions.get("PodScheduled") or {}
    if unscheduled.get("status") == "True":
        unscheduled = {}
    return Pod(
        name=meta["name"],
        role=Role(role),
        index=int(index),
        host=(data.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        reason=_first(ended, waiting, status, unscheduled, key="reason"),
        message=_first(ended, waiting, status, unscheduled, key="message")[:MAX_MESSAGE],
        exit_code=ended.get("exitCode"),
        expires=_time(meta.get("deletionTimestamp")),
        memory=memory_of(data.get("spec") or {}),
    )


def _first(*places: Mapping[str, Any], key: str) -> str:
    return next((str(place[key]) for place in places if place.get(key)), "")


def memory_of(pod_spec: Mapping[str, Any]) -> int | None:
    """The bytes of memory that the first container of a pod may use; None if it has no limit."""
    containers = pod_spec.get("containers") or [{}]
    limits = (containers[0].get("resources") or {}).get("limits") or {}
    try:
        return parse_quantity(limits["memory"]) if "memory" in limits else None
    except ValueError:
        return None  # the API server refuses such a pod


def seen_of_master(status: Status, epoch: int, now: datetime) -> MasterAnswer:
    """The part of a master's status that the operator uses."""
    times = [record.time for record in status.failures[:5]]
    counts = [status.round, status.step or 0, status.saved_step or 0, status.goodput or 0.0]
    are_times = all(0 <= time <= _MAX_TIME for time in times)
    if not are_times or any(abs(count) > LARGEST_INTEGER for count in counts):
        numbers = ", ".join(str(number)[:40] for number in (*counts, *times))
        raise ClusterError(f"the master's answer is not used: a number of {numbers} is too large")
    errors = []
    for record in status.failures[:5]:
        if record.cause or not record.failures:
            where, what, message = record.cause, "", ""
        else:
            first = record.failures[0]
            where = f"rank {first.rank} on node {first.node_id}, round {record.round}"
            what = first.signal or f"exit code {first.exit_code}"
            message = (first.message or first.log_tail)[-MAX_MESSAGE:]
        errors.append(
            FailureEntry(
                time=datetime.fromtimestamp(record.time, UTC),
                where=where[:MAX_MESSAGE],
                what=what[:MAX_MESSAGE],
                message=message,
            )
        )
    training = Training(
        time=now,
        phase=status.phase[:MAX_MESSAGE],
        reason=status.reason[:MAX_MESSAGE],
        round=status.round,
        step=status.step,
        saved_step=status.saved_step,
        goodput=status.goodput,
    )
    return MasterAnswer(epoch=epoch, training=training, errors=tuple(errors))
