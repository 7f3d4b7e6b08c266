"""The resource ElasticJob as Python values.

The API server validates objects by a schema that `manifests` makes of these classes. `Spec` is
written by users, `JobStatus` by the operator alone. The status is all that the operator remembers
of a job, so an operator that is killed and started again continues from it.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from remesh.errors import ClusterError

GROUP = "remesh.dev"
VERSION = "v1alpha1"
KIND = "ElasticJob"
PLURAL = "elasticjobs"
FINALIZER = f"{GROUP}/pods"
"""Keeps a deleted job until its pods are gone."""
LABEL_JOB = f"{GROUP}/job"
LABEL_ROLE = f"{GROUP}/role"
LABEL_INDEX = f"{GROUP}/index"
MAX_WORKERS = 10_000
"""Workers of a job: its status, which lists them, has to fit into an object of the API server."""
MAX_MESSAGE = 1024
"""Characters of a message that are kept in the status of a job."""


class Phase(StrEnum):
    """The state of a job in one word."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED = (Phase.SUCCEEDED, Phase.FAILED)


class CleanPolicy(StrEnum):
    """Which pods of a finished job are deleted."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


def about(text: str, **rules: Any) -> Meta:
    """The description of a field in the schema, and its rules."""
    return Meta(description=text, **rules)


Text = Annotated[str, Meta(min_length=1)]
SecretName = Annotated[str, Meta(min_length=1, max_length=253)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class Tls(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Certificates of the master, for the name <job>-master.<namespace>.svc."""

    secret: Annotated[SecretName, about("A Secret with the keys tls.crt, tls.key and ca.crt.")]
    ca_bundle: Annotated[
        str | None, about("The certificates that the operator trusts, as PEM; else the system's.")
    ] = None

    def trust(self) -> ssl.SSLContext | None:
        """The certificates that the operator trusts; None for the system's."""
        if self.ca_bundle is None:
            return None
        try:
            return ssl.create_default_context(cadata=self.ca_bundle)
        except (OSError, TypeError) as error:
            raise ValueError(f"no certificates in PEM format: {error}") from error


class MasterSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The pod that coordinates the workers; it needs no GPU."""

    port: Annotated[int, about("Port of the master and of its service.", ge=1, le=65535)] = 29400
    # Without a claim a master that is replaced by another pod learns of the job from the agents.
    state_claim: Annotated[
        Text | None, about("A PersistentVolumeClaim for the master's journal.")
    ] = None
    args: Annotated[tuple[str, ...], about("Further options of `remesh master`.")] = ()
    template: Annotated[
        dict[str, Any], about("Pod template; by default the image of the workers.")
    ] = {}


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The pods that train."""

    args: Annotated[tuple[str, ...], about("Further options of `remesh run`.")] = ()
    template: Annotated[
        dict[str, Any], about("Pod template; its first container runs the training.")
    ]


class Spec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The wishes of a user."""

    script: Annotated[tuple[str, ...], about("The script and its arguments.", min_length=1)]
    replicas: Annotated[Workers, about("Workers that the job should have.")] = 1
    min_replicas: Annotated[
        Workers | None, about("Fewest workers that can train; replicas by default.")
    ] = None
    max_replicas: Annotated[Workers | None, about("Most workers; replicas by default.")] = None
    node_unit: Annotated[Positive, about("Worlds have a multiple of so many workers.")] = 1
    max_restarts: Annotated[
        Natural, about("Restarts of a worker's processes that are charged.")
    ] = 3
    max_replacements: Annotated[
        Natural, about("Workers that are replaced after failures that are charged.")
    ] = 10
    check: Annotated[bool, about("Test workers before they train.")] = False
    exclude_faulty_hosts: Annotated[bool, about("Keep pods off hosts that proved faulty.")] = True
    suspend: Annotated[bool, about("Give back all resources until this is false.")] = False
    clean_policy: Annotated[
        CleanPolicy, about("Which pods are deleted when the job has finished.")
    ] = CleanPolicy.RUNNING
    node_lost_seconds: Annotated[
        Natural, about("Pods of a lost node are replaced after this, in seconds.")
    ] = 30
    drain_seconds: Annotated[Natural, about("Time for a last checkpoint, in seconds.")] = 60
    join_seconds: Annotated[
        Natural, about("Without enough workers for this long the job fails, in seconds.")
    ] = 3600
    tls: Tls | None = None
    master: MasterSpec = MasterSpec()
    worker: WorkerSpec

    @property
    def fewest(self) -> int:
        """Fewest workers that can train."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Most workers."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def fitting(self, num_workers: int) -> int:
        """The size of the largest world that so many workers can form; 0 if there is none."""
        trimmed = min(num_workers, self.most) // self.node_unit * self.node_unit
        return trimmed if trimmed >= self.fewest else 0


class Worker(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A worker that the job should have."""

    id: int  # its node id: its place in the order of ranks, and part of the name of its pod
    seen: bool = False
    """The pod has existed. A pod that was seen and is missing was deleted."""


class ExcludedHost(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A Kubernetes node on which the job starts no pods any more."""

    host: str
    time: datetime
    reason: str = ""


Holds = Literal["True", "False", "Unknown"]


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A condition, as Kubernetes has them."""

    type: str
    status: Holds
    reason: str
    message: str = ""
    last_transition_time: datetime


class Training(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The progress of the training, as the master said at `time`."""

    time: datetime
    phase: str = ""  # as `remesh status` prints it
    reason: str = ""  # why, in a sentence
    round: int = 0  # number of the world
    step: int | None = None  # the highest step
    saved_step: int | None = None  # the step of the newest checkpoint
    goodput: float | None = None  # share of the time that moved the training forward

    @property
    def has_ended(self) -> bool:
        return self.phase in ("succeeded", "failed")


class FailureEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A failure of a process, as the master says, or of a pod."""

    time: datetime
    where: str = ""
    what: str = ""
    message: str = ""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The operator's knowledge of a job."""

    observed_generation: int = 0  # the generation of the spec that the status belongs to
    phase: Phase = Phase.PENDING  # the state of the job
    reason: str = ""  # why, in a sentence
    conditions: Annotated[
        tuple[Condition, ...],
        about(
            "Training, Degraded, Suspended, Complete, Failed; Stalled if the operator is stuck.",
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = ()
    replicas: int = 0  # worker pods that run
    selector: str = ""  # labels of the worker pods, for `kubectl scale`
    workers: tuple[Worker, ...] = ()  # the workers that the job should have
    next_worker: int = 0  # the next node id. Ids are not used again, see `reconcile`
    master: int = 0  # number of the master pod
    master_seen: bool = False  # whether that pod has existed
    master_failures: int = 0  # master pods that failed
    master_failed_at: datetime | None = None  # when the last one failed
    epoch: int = 0  # how often the job was suspended
    excluded_hosts: tuple[ExcludedHost, ...] = ()  # hosts that are not used
    replacements: int = 0  # workers that were replaced and charged
    replaced_at: datetime | None = None  # when the last of them was
    started: datetime | None = None  # when the operator first saw the job
    finished: datetime | None = None  # when the job ended
    training: Training | None = None  # how far the training is
    failures: tuple[FailureEntry, ...] = ()  # the newest failures, newest first


class Role(StrEnum):
    """The purpose of a pod."""

    MASTER = "master"
    WORKER = "worker"


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a job."""

    name: str
    role: Role  # what it is for
    index: int  # its node id, or the number of the master
    host: str = ""  # the Kubernetes node that it is bound to; empty before
    phase: str = "Pending"  # as in its status
    reason: str = ""  # why it is in that phase, or why its container waits
    message: str = ""  # the same in a sentence
    exit_code: int | None = None  # of its first container; None while that runs
    lingers: bool = False  # whether others run though the first has ended
    expires: datetime | None = None  # when it is expected to be gone, if it is to be deleted

    @property
    def has_ended(self) -> bool:
        """True if its first container does not run and will not again."""
        return self.lingers or self.phase in ("Succeeded", "Failed")

    @property
    def is_running(self) -> bool:
        """True if its first container runs, and nothing is known to end it."""
        return self.phase == "Running" and self.expires is None and not self.lingers


class Key(NamedTuple):
    """Where a job is."""

    namespace: str
    name: str


class ElasticJob(msgspec.Struct, frozen=True, kw_only=True):
    """An ElasticJob."""

    name: str
    namespace: str
    uid: str  # differs for every object
    version: str = ""  # changes with every write (`resourceVersion`)
    generation: int = 1  # changes with every write of the spec
    deleting: bool = False  # whether it is to be deleted
    finalizers: tuple[str, ...] = ()  # what keeps it until then
    spec: Spec  # what the user asks for
    status: JobStatus = JobStatus()  # what the operator knows

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


def parse_job(data: Mapping[str, Any]) -> ElasticJob:
    """An ElasticJob from the JSON of the API server."""
    meta = data.get("metadata") or {}
    where = f"ElasticJob {meta.get('namespace', '')}/{meta.get('name', '')}"
    try:
        return ElasticJob(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta.get("uid", ""),
            version=meta.get("resourceVersion", ""),
            generation=meta.get("generation", 1),
            deleting=meta.get("deletionTimestamp") is not None,
            finalizers=tuple(meta.get("finalizers") or ()),
            spec=msgspec.convert(data["spec"], Spec),
            status=msgspec.convert(data.get("status") or {}, JobStatus),
        )
    except (msgspec.ValidationError, KeyError) as error:
        raise ClusterError(
            f"{where} is not valid: {error}; apply the output of `remesh manifests` of this version"
        ) from error


def parse_pod(data: Mapping[str, Any]) -> Pod | None:
    """A pod from the JSON of the API server; None if its labels are not those of a job's pod."""
    meta, spec, status = data["metadata"], data.get("spec") or {}, data.get("status") or {}
    labels = meta.get("labels") or {}
    role, index = labels.get(LABEL_ROLE, ""), labels.get(LABEL_INDEX, "")
    if role not in tuple(Role) or not index.isdecimal():
        return None
    # The server lists them by name, and not in the order of the spec.
    states = {one["name"]: one.get("state") or {} for one in status.get("containerStatuses") or ()}
    state = states.get(spec["containers"][0]["name"], {})
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    expires = meta.get("deletionTimestamp")
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    unscheduled = conditions.get("PodScheduled") or {}
    if unscheduled.get("status") == "True":
        unscheduled = {}
    return Pod(
        name=meta["name"],
        role=Role(role),
        index=int(index),
        host=spec.get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        reason=_first(ended, waiting, status, unscheduled, key="reason"),
        message=_first(ended, waiting, status, unscheduled, key="message")[:MAX_MESSAGE],
        exit_code=ended.get("exitCode"),
        lingers=bool(ended) and any("running" in each for each in states.values()),
        expires=None if expires is None else datetime.fromisoformat(expires),
    )


def _first(*places: Mapping[str, Any], key: str) -> str:
    return next((str(place[key]) for place in places if place.get(key)), "")


def status_patch(old: JobStatus, new: JobStatus) -> dict[str, Any]:
    """The fields in which a status differs, as a JSON merge patch: null removes a field.

    Empty texts are removed: they mean the same, and the schema of old API servers refuses them.
    """
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(new)
    return {
        name: _without_empty(value)
        for name, value in after.items()
        if value != before[name] or name == "phase"
    }


def _without_empty(value: Any) -> Any:
    """A value for a merge patch: also in an object, an empty text would keep the old one."""
    if isinstance(value, dict):
        return {name: _without_empty(each) for name, each in value.items()}
    return None if value == "" else value


def problem_of(spec: Spec) -> str:
    """The fault of a spec that the schema cannot express; empty if there is none."""
    if not spec.fewest <= spec.replicas <= spec.most:
        return (
            f"{spec.replicas} replicas are not in minReplicas:maxReplicas, "
            f"{spec.fewest}:{spec.most}"
        )
    if not spec.fitting(spec.replicas):
        return f"no multiple of nodeUnit {spec.node_unit} is in {spec.fewest}:{spec.replicas}"
    containers = (spec.worker.template.get("spec") or {}).get("containers")
    if not containers:
        return "worker.template has no container"
    if spec.tls is not None:
        try:
            spec.tls.trust()
        except ValueError as error:
            return f"tls.caBundle: {error}"
    return ""
