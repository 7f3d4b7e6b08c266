"""The next step of a job: a pure function of the job, its pods, its master and the time.

`reconcile` returns the next status of the job and a list of actions. The caller first writes the
status, on the condition that the job has not changed since it was read, and only then carries out
the actions, in any order and each as often as it likes. Nothing else is needed for safety:

* Every action follows from the status that was written. An operator that is killed in the middle
  finds on its next pass that a worker of the status has no pod, or a pod has no worker in the
  status, and does what is missing.
* Of two operators at the same time only one can write; the other one reads everything again.
* The name of a pod follows from its number in the status, so no pod is created twice.

**Numbers of workers.** The number of a worker is its node id, by which the master orders the ranks.
It stays the same while its pod lives, and is not given to another pod. A replacement therefore
comes last in the order: the workers that go on keep their order, rank 0 stays where its log is,
and the agent of a lost machine that comes back never meets another one with its id.

**Sizes.** A job has `spec.replicas` workers. The pods of those that Kubernetes cannot place stay
pending, and the master lets the others train if they are enough.

Suspending and deleting stop the workers first: they save while the master still runs.

**Ends of pods.** Why a pod has ended follows from its exit code, one of those of `remesh run`
(docs/elastic.md), and from what Kubernetes says of it. The agent tells the master whether the job
has failed, so an exit code of 1 in a job that has not is the failure of one pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from remesh.elastic.lifecycle import EXIT_REPLACE
from remesh.kubernetes.resource import (
    FINALIZER,
    FINISHED,
    LABEL_JOB,
    LABEL_ROLE,
    CleanPolicy,
    Condition,
    ElasticJob,
    ExcludedHost,
    FailureEntry,
    Holds,
    JobStatus,
    Phase,
    Pod,
    Role,
    Training,
    Worker,
    problem_of,
)

MAX_ENDED = 3
"""Ended pods of each role that are kept for their logs while the job runs."""
MAX_FAILURES = 10
"""Failures that are kept in the status."""
MAX_BACKOFF = 60.0
"""Longest wait, in seconds, before a pod that failed is replaced."""
FORCE_SECONDS = 60.0
"""A pod of a deleted job that should be gone for so long is removed without its kubelet."""
END_SECONDS = 30.0
"""Time for the pods of a finished job to end by themselves."""
TRAINING_SECONDS = 30.0
"""Time between two writes of the status that tell nothing but the progress of the training."""

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


class Cause(StrEnum):
    """The cause of the end of a pod."""

    SUCCEEDED = "Succeeded"
    OUT_OF_MEMORY = "OutOfMemory"
    HARDWARE = "HardwareFailed"
    STOPPED = "Stopped"
    USAGE = "NotStarted"
    FAILED = "Failed"


class MasterAnswer(NamedTuple):
    """The answer of a job's master."""

    epoch: int  # `JobStatus.epoch` of the job when it was asked
    training: Training  # how far the training is
    errors: tuple[FailureEntry, ...] = ()  # the newest failures, newest first


class HoldJob(msgspec.Struct, frozen=True):
    """Keep a deleted job until its pods are gone; or let it go, without service and secret."""

    held: bool


class CreateShared(msgspec.Struct, frozen=True):
    """Create the service of the master and the secret with the token, if they are not there."""


class CreatePod(msgspec.Struct, frozen=True):
    """Create a pod as the status says, if it is not there."""

    role: Role
    index: int


class DeletePod(msgspec.Struct, frozen=True):
    """Delete a pod; with force, without waiting for its kubelet."""

    name: str
    force: bool = False


class Emit(msgspec.Struct, frozen=True):
    """Tell users of the job what happened, as an event."""

    reason: str
    message: str
    warning: bool = False


Action: TypeAlias = HoldJob | CreateShared | CreatePod | DeletePod | Emit


class Ending(NamedTuple):
    """The end of a pod: its cause, and what is known, in words."""

    cause: Cause
    text: str


class Decision(NamedTuple):
    """The next status, and what is to be done."""

    status: JobStatus  # the status to be written before the actions
    actions: tuple[Action, ...] = ()  # what is to be done
    wake: float | None = None
    """Seconds after which time alone may change the decision; None: it does not."""


@dataclass(slots=True)
class _Draft:
    """A decision in the making: what is seen, and what is decided so far."""

    job: ElasticJob
    pods: tuple[Pod, ...]
    master: MasterAnswer | None
    now: datetime
    status: JobStatus
    actions: list[Action] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def set(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def emit(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.actions.append(Emit(reason, message, warning))

    def since(self, time: datetime) -> float:
        """Seconds that have passed; none if the clock was set back."""
        return max((self.now - time).total_seconds(), 0.0)

    def passed(self, time: datetime, seconds: float) -> bool:
        """True if so many seconds have passed; if not, the next pass is then at the latest."""
        left = seconds - self.since(time)
        if left > 0:
            self.wakes.append(left)
        return left <= 0

    def backed_off(self, failed_at: datetime | None, failures: int) -> bool:
        """True if a pod may take the place of one that failed: the more failed, the later."""
        pause = min(2.0 ** min(failures - 1, 10), MAX_BACKOFF) if failures else 0.0
        return failed_at is None or self.passed(failed_at, pause)

    def of(self, role: Role) -> dict[int, Pod]:
        return {pod.index: pod for pod in self.pods if pod.role is role}

    def living_workers(self) -> list[Pod]:
        """Workers that run, or save before they end; not those that a lost node keeps.

        The next pass is when one of them should be gone.
        """
        workers = [pod for pod in self.of(Role.WORKER).values() if not pod.has_ended]
        expiries = {pod.index: pod.expires for pod in workers if pod.expires is not None}
        left = {index: (time - self.now).total_seconds() for index, time in expiries.items()}
        self.wakes += [seconds for seconds in left.values() if seconds > 0]
        return [pod for pod in workers if left.get(pod.index, 1.0) > 0]

    def failed(self, where: str, ending: Ending) -> None:
        entry = FailureEntry(time=self.now, where=where, what=ending.cause, message=ending.text)
        self.set(failures=(entry, *self.status.failures)[:MAX_FAILURES])

    def delete(self, pods: Iterable[Pod]) -> None:
        """Delete those pods that are not being deleted."""
        self.actions.extend(DeletePod(pod.name) for pod in pods if pod.expires is None)


def reconcile(
    job: ElasticJob, pods: tuple[Pod, ...], master: MasterAnswer | None, now: datetime
) -> Decision:
    """Decide what happens next to a job that was read before its pods."""
    this = _Draft(job, pods, master, now, job.status)
    if FINALIZER in job.finalizers:
        (_delete if job.deleting else _go_on)(this)
    elif not job.deleting:
        this.actions.append(HoldJob(held=True))
    return Decision(this.status, tuple(this.actions), min(this.wakes, default=None))


def _go_on(this: _Draft) -> None:
    _start(this)
    if this.master is not None and this.master.epoch != this.status.epoch:
        this.master = None
    _note_training(this)
    if this.status.phase in FINISHED:
        _clean(this)
    elif this.job.spec.suspend:
        _suspend(this)
    else:
        if this.status.phase is Phase.SUSPENDED:
            _resume(this)
        _run(this)
    this.set(observed_generation=this.job.generation)
    _describe(this)


def _start(this: _Draft) -> None:
    """Note when the job began; let no wait last longer because the clock was set back."""
    status = this.status
    if status.started is None:
        labels = f"{LABEL_JOB}={this.job.name},{LABEL_ROLE}={Role.WORKER}"
        this.set(started=this.now, selector=labels)
    for name in ("replaced_at", "master_failed_at"):
        time = getattr(status, name)
        if time is not None and time > this.now:
            this.set(**{name: this.now})


# The end of a job -----------------------------------------------------------------------------


def _delete(this: _Draft) -> None:
    """Stop the workers, then the master; let the job go when nothing of it is left."""
    if not this.pods:
        this.actions.append(HoldJob(held=False))
    this.delete(this.living_workers() or this.pods)
    for pod in this.pods:
        if pod.expires is not None and this.passed(pod.expires, FORCE_SECONDS):
            this.actions.append(DeletePod(pod.name, force=True))


def _finish(this: _Draft, phase: Phase, reason: str) -> None:
    this.set(phase=phase, reason=reason, finished=this.now)
    this.emit(phase.value, reason, warning=phase is Phase.FAILED)
    _clean(this)


def _clean(this: _Draft) -> None:
    """Delete the pods of a finished job that its policy does not keep; workers first."""
    policy = this.job.spec.clean_policy
    if policy is CleanPolicy.NONE:
        return
    living = this.living_workers()
    if living and _ends_by_itself(this):
        return  # the workers learn of the end from the master
    unwanted = [pod for pod in this.pods if pod.lingers or not pod.has_ended]
    this.delete(living or (this.pods if policy is CleanPolicy.ALL else unwanted))


def _ends_by_itself(this: _Draft) -> bool:
    """True if the pods of a finished job are about to end, and their logs to be complete."""
    training, finished = this.status.training, this.status.finished
    known = training is not None and training.has_ended
    if finished is None or not (known or this.status.phase is Phase.SUCCEEDED):
        return False
    return not this.passed(finished, END_SECONDS)


def _suspend(this: _Draft) -> None:
    """Stop the workers, then the master; what is remembered of hosts and budgets stays."""
    if this.status.phase is not Phase.SUSPENDED:
        this.set(phase=Phase.SUSPENDED, reason="spec.suspend is true", workers=())
        this.emit("Suspended", "the workers save and stop")
    this.delete(this.living_workers() or this.pods)


def _resume(this: _Draft) -> None:
    """Begin again with all workers, and with a new journal: the old world has ended."""
    this.set(
        phase=Phase.PENDING,
        reason="resumed",
        epoch=this.status.epoch + 1,
        master=this.status.master + 1,
        master_seen=False,
        workers=(),
    )
    this.master = None
    this.emit("Resumed", "the job starts again from its newest checkpoint")


# A job that runs ------------------------------------------------------------------------------


def _run(this: _Draft) -> None:
    if problem := problem_of(this.job.spec):
        _finish(this, Phase.FAILED, f"the spec is not valid: {problem}")
    elif this.master is not None and this.master.training.has_ended:
        training = this.master.training
        succeeded = training.phase == "succeeded"
        _finish(this, Phase.SUCCEEDED if succeeded else Phase.FAILED, training.reason)
    for step in (_check_workers, _check_master, _place, _keep_logs):
        if this.status.phase not in FINISHED:
            step(this)


def _check_workers(this: _Draft) -> None:
    """Take workers whose pods have failed or are gone off the list.

    Those that have succeeded stay. That of one says nothing of the others: the master knows, or all
    have succeeded in the end.
    """
    spec, pods, kept, num_succeeded = this.job.spec, this.of(Role.WORKER), [], 0
    for worker in this.status.workers:
        pod = pods.get(worker.id)
        ending = _ending_of(worker.seen, pod)
        if ending is None or ending.cause is Cause.SUCCEEDED:
            num_succeeded += ending is not None
            kept.append(Worker(id=worker.id, seen=worker.seen or pod is not None))
            continue
        _take_off(this, worker.id, pod, ending)
        if this.status.phase in FINISHED:
            return
    this.set(workers=tuple(kept))
    if kept and num_succeeded >= max(len(kept), spec.replicas):
        _finish(this, Phase.SUCCEEDED, "the processes of all nodes succeeded")
    elif this.status.replacements > spec.max_replacements:
        last = this.status.failures[0]
        text = f"more than {spec.max_replacements} workers failed (maxReplacements); the last one"
        _finish(this, Phase.FAILED, f"{text}: {last.where}: {last.message}")


def _ending_of(seen: bool, pod: Pod | None) -> Ending | None:
    """The end of a pod; None if it has not ended, or is yet to be created."""
    if pod is None:
        return Ending(Cause.STOPPED, "its pod was deleted") if seen else None
    if not pod.has_ended:
        return None if pod.expires is None else Ending(Cause.STOPPED, "its pod is being deleted")
    code, reason = pod.exit_code, pod.reason
    text = reason if code is None else f"exit code {code}" + (f" ({reason})" if reason else "")
    text = ": ".join(filter(None, (text, pod.message)))
    return Ending(_cause_of(pod), text or "no reason is known")


def _cause_of(pod: Pod) -> Cause:
    code, reason = pod.exit_code, pod.reason
    if reason == "OOMKilled":
        return Cause.OUT_OF_MEMORY
    if reason in HARDWARE_REASONS or code in HARDWARE_CODES:
        return Cause.HARDWARE
    if reason in STOPPED_REASONS:
        return Cause.STOPPED
    if code == 0 or (code is None and pod.phase == "Succeeded"):
        return Cause.SUCCEEDED
    if code in USAGE_CODES:
        return Cause.USAGE
    return Cause.STOPPED if code in STOPPED_CODES else Cause.FAILED


def _take_off(this: _Draft, index: int, pod: Pod | None, ending: Ending) -> None:
    """Act on the end of a worker's pod, besides its replacement."""
    host = "" if pod is None else pod.host
    where = f"worker {index}" + (f" on {host}" if host else "")
    text, most = f"{where}: {ending.text}", this.job.spec.max_replacements
    if ending.cause is Cause.STOPPED:
        this.emit("WorkerStopped", f"{text}; it is replaced, nothing is charged")
        return
    this.failed(where, ending)
    if ending.cause is Cause.USAGE:
        _finish(this, Phase.FAILED, f"{text}; its command cannot run: check script and args")
    elif ending.cause is Cause.HARDWARE:
        _exclude(this, host, ending.text)
    else:
        number = this.status.replacements + 1
        this.set(replacements=number, replaced_at=this.now)
        text = f"{text}; {number} of {most} replacements are charged"
        this.emit("WorkerFailed", text, warning=True)


def _exclude(this: _Draft, host: str, reason: str) -> None:
    """Remember that a host is faulty."""
    known = {each.host for each in this.status.excluded_hosts}
    if this.job.spec.exclude_faulty_hosts and host and host not in known:
        entry = ExcludedHost(host=host, reason=reason, time=this.now)
        this.set(excluded_hosts=(*this.status.excluded_hosts, entry))
        this.emit("HostExcluded", f"no pod of this job will use {host}: {reason}", warning=True)


def _check_master(this: _Draft) -> None:
    """Count a master that has ended, and choose the number of the next."""
    status = this.status
    pod = this.of(Role.MASTER).get(status.master)
    ending = _ending_of(status.master_seen, pod)
    if ending is None:
        this.set(master_seen=pod is not None)
        return
    has_failed = pod is not None and pod.has_ended
    if has_failed:
        this.failed("master", ending)
    if ending.cause is Cause.USAGE:
        text = f"the master cannot run: {ending.text}; check master.args"
        _finish(this, Phase.FAILED, text)
        return
    this.set(
        master=status.master + 1,
        master_seen=False,
        master_failures=status.master_failures + has_failed,
        master_failed_at=this.now,
    )
    this.emit("MasterReplaced", f"master {status.master}: {ending.text}", warning=True)


def _place(this: _Draft) -> None:
    """Bring the list of workers to its size, and the pods to what the list says."""
    status, pods = this.status, this.of(Role.WORKER)
    target = this.job.spec.replicas
    workers = list(status.workers)
    if len(workers) > target:
        # Those that do not run yet go first, then the newest.
        running = {pod.index for pod in pods.values() if pod.is_running}
        order = sorted(workers, key=lambda each: (each.id in running, -each.id))
        extra = {each.id for each in order[: len(workers) - target]}
        workers = [each for each in workers if each.id not in extra]
    missing = target - len(workers)
    if missing > 0 and this.backed_off(status.replaced_at, status.replacements):
        first = status.next_worker
        workers += [Worker(id=number) for number in range(first, first + missing)]
        this.set(next_worker=first + missing)
    this.set(workers=tuple(workers))
    listed = {each.id for each in workers}
    this.delete(pod for pod in pods.values() if pod.index not in listed and not pod.has_ended)
    _place_master(this)
    this.actions.extend(
        CreatePod(Role.WORKER, each.id) for each in workers if not each.seen and each.id not in pods
    )


def _place_master(this: _Draft) -> None:
    status, pods = this.status, this.of(Role.MASTER)
    this.delete(pod for pod in pods.values() if pod.index != status.master and not pod.has_ended)
    if status.master in pods or status.master_seen:
        return
    if this.backed_off(status.master_failed_at, status.master_failures):
        this.actions += [CreateShared(), CreatePod(Role.MASTER, status.master)]


def _keep_logs(this: _Draft) -> None:
    """Delete the ended pods but for the newest, whose logs may be wanted."""
    listed = {each.id for each in this.status.workers}
    for role in Role:
        pods = sorted(this.of(role).items())
        ended = [pod for _, pod in pods if pod.has_ended]
        if role is Role.WORKER:
            ended = [pod for pod in ended if pod.index not in listed]
        this.delete(ended[:-MAX_ENDED])
        this.delete(pod for pod in ended[-MAX_ENDED:] if pod.lingers)  # it keeps its devices


# What users see -------------------------------------------------------------------------------


def _note_training(this: _Draft) -> None:
    """Take over from the master how far the training is; not often if that is all there is."""
    master, old = this.master, this.status.training
    if master is None:
        return
    new = master.training
    same = old is not None and (old.phase, old.round) == (new.phase, new.round)
    if same and old is not None and not new.has_ended and this.since(old.time) < TRAINING_SECONDS:
        return
    this.set(training=new)
    known = {(each.where, each.what, each.message) for each in this.status.failures}
    found = [each for each in master.errors if (each.where, each.what, each.message) not in known]
    this.set(failures=(*found, *this.status.failures)[:MAX_FAILURES])


STALLED = "Stalled"
"""The condition of a job with which the operator cannot go on. The next status is without it."""


def stalled(conditions: object, text: str, now: datetime) -> list[Any]:
    """The conditions of such a job, whatever stands in its JSON for those it has."""
    found = conditions if isinstance(conditions, list) else []
    known = [each for each in found if isinstance(each, Mapping) and "type" in each]
    made = _condition(STALLED, "True", "OperatorFailed", text, now)
    others = [each for each in known if each["type"] != STALLED]
    return [*others, msgspec.to_builtins(made)]


def _condition(kind: str, status: Holds, reason: str, message: str, since: datetime) -> Condition:
    return Condition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=since
    )


def _describe(this: _Draft) -> None:
    """Show how many workers run, and the phase and the conditions that follow."""
    job, workers = this.job, tuple(this.of(Role.WORKER).values())
    running = sum(pod.is_running for pod in workers)
    this.set(replicas=running)
    if this.status.phase not in (*FINISHED, Phase.SUSPENDED):
        phase, reason = _phase(job, running, workers, this.master)
        this.set(phase=phase, reason=reason)
    phase, reason = this.status.phase, this.status.reason
    degraded = phase in (Phase.PENDING, Phase.RUNNING) and running < job.spec.replicas
    few = f"{running} of {job.spec.replicas} workers run" + _why_waiting(workers)
    failed = phase is Phase.FAILED
    values = {
        "Training": (phase is Phase.RUNNING, phase.value, reason),
        "Degraded": (degraded, "TooFewWorkers" if degraded else "AllWorkers", few),
        "Suspended": (phase is Phase.SUSPENDED, phase.value, ""),
        "Complete": (phase is Phase.SUCCEEDED, phase.value, ""),
        "Failed": (failed, phase.value, reason if failed else ""),
    }
    since = {(each.type, each.status): each.last_transition_time for each in this.status.conditions}
    conditions = []
    for kind, (holds, why, text) in values.items():
        known: Holds = "True" if holds else "False"
        conditions.append(_condition(kind, known, why, text, since.get((kind, known), this.now)))
    this.set(conditions=tuple(conditions))


def _phase(
    job: ElasticJob, running: int, workers: Sequence[Pod], master: MasterAnswer | None
) -> tuple[Phase, str]:
    """The phase of a job that has not finished, and the reason."""
    training = None if master is None else master.training
    if training is not None and training.phase == "running":
        return Phase.RUNNING, training.reason
    if not job.spec.fitting(running):
        text = f"{running} workers run, {job.spec.fewest} are needed"
        return Phase.PENDING, text + _why_waiting(workers)
    text = "the master is not reached" if training is None else training.reason
    if training is None or training.phase == "checking":
        return (Phase.PENDING if job.status.phase is Phase.PENDING else Phase.RUNNING), text
    return Phase.PENDING, text


def _why_waiting(workers: Sequence[Pod]) -> str:
    """The reason that Kubernetes gives for a pod that does not run, if any."""
    waiting = [pod for pod in workers if pod.phase == "Pending" and pod.expires is None]
    texts = [pod.message or pod.reason for pod in waiting if pod.message or pod.reason]
    return f"; {texts[0]}" if texts else ""
