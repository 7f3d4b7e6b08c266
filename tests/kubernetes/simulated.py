"""A cluster in memory: objects with versions, hosts, a scheduler and kubelets that do as told."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from remesh.kubernetes.operator import ApiCluster, ConflictError
from remesh.kubernetes.pods import make_pod
from remesh.kubernetes.reconcile import (
    Action,
    CreatePod,
    CreateShared,
    DeletePod,
    Emit,
    HoldJob,
    MasterAnswer,
    stalled,
)
from remesh.kubernetes.resource import (
    FINALIZER,
    Condition,
    ElasticJob,
    JobStatus,
    Key,
    Pod,
    Role,
    Spec,
    Training,
    WorkerSpec,
    parse_job,
    parse_pod,
    status_patch,
)

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
KEY = Key("ml", "train")
TEMPLATE = {
    "spec": {
        "containers": [
            {"name": "train", "image": "train:1", "resources": {"limits": {"memory": "1Gi"}}}
        ]
    }
}


def make_spec(**changes: Any) -> Spec:
    values = {"replicas": 3, "min_replicas": 2, "max_replicas": 4} | changes
    return Spec(script=("train.py",), worker=WorkerSpec(template=TEMPLATE), **values)


def make_job(**changes: Any) -> ElasticJob:
    return ElasticJob(
        name=KEY.name, namespace=KEY.namespace, uid="u1", version="1", spec=make_spec(**changes)
    )


def make_master(epoch: int = 0, time: datetime = START, **said: Any) -> MasterAnswer:
    return MasterAnswer(epoch=epoch, training=Training(time=time, **said))


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Let others run: each request of an operator may take as long as it likes."""
    yield


def merge(data: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a JSON merge patch, as the API server does."""
    for name, value in patch.items():
        if isinstance(value, dict):
            if not isinstance(data.get(name), dict):
                data[name] = {}
            merge(data[name], value)
        elif value is None:
            data.pop(name, None)
        else:
            data[name] = value


@dataclass
class Cluster(ApiCluster):
    """What the API server stores, and the world around it."""

    job: ElasticJob | None
    hosts: int = 4
    now: datetime = START
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: bool = False
    events: list[str] = field(default_factory=list)
    num_requests: int = 0
    lost_hosts: set[str] = field(default_factory=set)
    written: list[JobStatus] = field(default_factory=list)

    # The API server ------------------------------------------------------------------------

    async def read_job(self, key: Key) -> ElasticJob | None:
        await self._request()
        return self.job

    async def list_pods(self, key: Key) -> tuple[Pod, ...]:
        await self._request()
        return self.seen()

    async def write_status(self, job: ElasticJob, status: JobStatus) -> ElasticJob:
        await self._request()
        self._check(job)
        assert self.job is not None
        if status != self.job.status:
            data = msgspec.to_builtins(self.job.status)
            merge(data, status_patch(self.job.status, status))
            stored = msgspec.convert(data, JobStatus)
            assert stored == status
            self.written.append(stored)
            self.change(status=stored)
        return self.job

    async def perform(self, job: ElasticJob, action: Action) -> None:
        await self._request()
        match action:
            case HoldJob(held):
                self._check(job)
                self.change(finalizers=(FINALIZER,) if held else ())
                if not held and self.job is not None and self.job.deleting:
                    self.job, self.shared = None, False
            case CreateShared():
                self.shared = True
            case CreatePod(role, index):
                manifest = make_pod(job, role, index)
                meta = manifest["metadata"]
                stamp = {"uid": f"p{self.num_requests}", "creationTimestamp": self.now.isoformat()}
                self.pods.setdefault(
                    meta["name"],
                    {**manifest, "metadata": meta | stamp, "status": {"phase": "Pending"}},
                )
            case DeletePod(name, force):
                self.delete(name, force=force)
            case Emit(reason):
                self.events.append(reason)

    async def show_problem(self, key: Key, text: str) -> None:
        await self._request()
        assert self.job is not None
        old = msgspec.to_builtins(self.job.status.conditions)
        made = msgspec.convert(stalled(list(old), text, self.now), tuple[Condition, ...])
        self.change(status=msgspec.structs.replace(self.job.status, conditions=made))
        self.events.append(text)

    def _request(self) -> Awaitable[None]:
        self.num_requests += 1
        return pause()

    def _check(self, job: ElasticJob) -> None:
        if self.job is None or self.job.version != job.version:
            raise ConflictError

    def change(self, **changes: Any) -> None:
        assert self.job is not None
        version = str(int(self.job.version) + 1)
        if "spec" in changes:
            changes["generation"] = self.job.generation + 1
        self.job = msgspec.structs.replace(self.job, version=version, **changes)

    # The world -----------------------------------------------------------------------------

    def seen(self) -> tuple[Pod, ...]:
        """The pods as the operator sees them."""
        found = [parse_pod(data) for data in self.pods.values()]
        assert None not in found
        return tuple(pod for pod in found if pod is not None)

    def living(self, role: Role = Role.WORKER) -> list[Pod]:
        """Pods that have not ended and are not asked to."""
        return [
            pod
            for pod in self.seen()
            if pod.role is role and not pod.has_ended and pod.expires is None
        ]

    def delete(self, name: str, *, force: bool = False) -> None:
        """A pod is to be deleted; one without a kubelet goes at once."""
        pod = self.pods.get(name)
        if pod is None:
            return
        bound = "nodeName" in pod["spec"]
        if force or not bound or pod["status"]["phase"] in ("Succeeded", "Failed"):
            del self.pods[name]
        else:
            expiry = (self.now + timedelta(seconds=30)).isoformat()
            pod["metadata"].setdefault("deletionTimestamp", expiry)

    def place(self) -> None:
        """Bind pods to hosts that are free for them, one worker a host; start what is bound."""
        taken = {pod.host for pod in self.seen() if pod.role is Role.WORKER and not pod.has_ended}
        for pod in self.pods.values():
            if pod["status"]["phase"] != "Pending":
                continue
            is_master = pod["metadata"]["labels"]["remesh.dev/role"] == Role.MASTER
            free = [f"host-{n}" for n in range(self.hosts)]
            free = [h for h in free if h not in refused_by(pod) and h not in self.lost_hosts]
            free = [h for h in free if is_master or h not in taken]
            if "nodeName" not in pod["spec"] and free:
                pod["spec"]["nodeName"] = free[0]
                taken.add("" if is_master else free[0])
            if "nodeName" in pod["spec"]:
                pod["status"] = {"phase": "Running"}

    def end(self, name: str, code: int, reason: str = "Error") -> None:
        state = {"terminated": {"exitCode": code, "reason": reason}}
        phase = "Failed" if code else "Succeeded"
        pod = self.pods[name]
        container = pod["spec"]["containers"][0]["name"]
        found = [{"name": container, "state": state}]
        pod["status"] = {"phase": phase, "containerStatuses": found}

    def sweep(self) -> None:
        """The kubelets finish with the pods that are to be deleted."""
        for name, pod in list(self.pods.items()):
            is_lost = pod["spec"].get("nodeName") in self.lost_hosts
            if "deletionTimestamp" in pod["metadata"] and not is_lost:
                del self.pods[name]


def refused_by(pod: dict[str, Any]) -> set[str]:
    """Hosts that a pod's affinity excludes."""
    node = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = node.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    fields = [field for term in terms.get("nodeSelectorTerms", []) for field in term["matchFields"]]
    return {host for each in fields for host in each["values"]}


def roundtrip(job: ElasticJob) -> ElasticJob:
    """A job as it comes back from the API server."""
    meta = {"name": job.name, "namespace": job.namespace, "uid": job.uid}
    data = {
        "metadata": meta,
        "spec": msgspec.to_builtins(job.spec),
        "status": msgspec.to_builtins(job.status),
    }
    return parse_job(data)
