"""Why a worker pod has ended, from its exit code and what Kubernetes says of it. Pure.

The exit codes are those of `remesh run` (docs/elastic.md). The agent has restarted processes as
often as its budget allows before it ends with 1, and has told the master, which says whether the
job has failed. So an exit code of 1 here, in a job that has not failed, is the failure of one pod.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from remesh.kubernetes.observed import Pod

EXIT_SUCCEEDED = 0
EXIT_REPLACE = 75
"""`remesh.elastic.agent.EXIT_REPLACE`, which imports torch."""
HARDWARE_CODES = (EXIT_REPLACE, 201, 202)
USAGE_CODES = (2, 126, 127, 128)
"""Wrong options; a command that cannot be run, or is not there, or was not started."""
STOPPED_CODES = (130, 137, 143)
"""SIGINT, SIGKILL, SIGTERM."""
HARDWARE_REASONS = ("UnexpectedAdmissionError",)
"""What the kubelet says when a device that was promised to the pod is not usable."""
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


class Cause(StrEnum):
    """Why a worker pod has ended."""

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
    """Why a pod that has ended did so."""
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
