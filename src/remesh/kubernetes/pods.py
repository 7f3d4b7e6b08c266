"""The objects that the operator creates for a job: pods, the master's service, a secret, events.

The template of a user is completed, never overruled: what it says of security, volumes or
tolerations stays. What it does not say follows the "restricted" profile of Kubernetes: no root, a
root file system that is read-only, no privileges, and no account of the cluster. `/tmp` and
`/dev/shm` can be written; snapshots are in the latter.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from remesh.kubernetes.reconcile import Emit
from remesh.kubernetes.resource import (
    GROUP,
    KIND,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_ROLE,
    VERSION,
    ElasticJob,
    Key,
    Role,
)

Manifest = dict[str, Any]
Volume = tuple[str, str, Manifest]
"""Name, path in the main container and source of a volume."""

TOKEN_MOUNT = "/var/run/remesh/token"  # noqa: S105 - a directory
TLS_MOUNT = "/var/run/remesh/tls"
STATE_MOUNT = "/var/lib/remesh"
USER = 1000
CONTAINER_SECURITY = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
VARIABLES = (
    {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
)
"""To which arguments refer, or without which a library fails."""
STOP_SECONDS = 40
"""Seconds that a worker needs to stop besides `spec.drain_seconds`."""
MASTER_STOP_SECONDS = 10
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def service_name(job_name: str) -> str:
    """The name of the service of a job's master."""
    return f"{job_name}-master"


def secret_name(job_name: str) -> str:
    """The name of the secret with a job's token."""
    return f"{job_name}-token"


def pod_name(job_name: str, role: Role, index: int) -> str:
    """The name of a pod."""
    return f"{job_name}-{role}-{index}"


def master_url(job: ElasticJob, host: str | None = None) -> str:
    """The URL of the master, by default at the name under which pods reach it."""
    scheme = "http" if job.spec.tls is None else "https"
    host = host or f"{service_name(job.name)}.{job.namespace}.svc"
    return f"{scheme}://{host}:{job.spec.master.port}"


def token_of(key: bytes, job: ElasticJob) -> str:
    """The token of a job's master: a function of the operator's key, so that no secret is read."""
    text = f"{job.namespace}/{job.name}/{job.uid}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def make_secret(job: ElasticJob, token: str) -> Manifest:
    """The secret with the token."""
    data = {"token": base64.b64encode(token.encode()).decode()}
    meta = _metadata(job, secret_name(job.name))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": data}


def make_service(job: ElasticJob) -> Manifest:
    """The service of the master. Its page is there, and `/metrics`."""
    port = job.spec.master.port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, service_name(job.name)),
        "spec": {
            "selector": {LABEL_JOB: job.name, LABEL_ROLE: Role.MASTER.value},
            "ports": [{"name": "http", "port": port, "targetPort": port}],
        },
    }


def make_pod(job: ElasticJob, role: Role, index: int) -> Manifest:
    """A pod of a job, as its spec and its status say."""
    is_master = role is Role.MASTER
    template = job.spec.master.template if is_master else job.spec.worker.template
    meta = template.get("metadata") or {}
    given = template.get("spec") or {}
    main, *others = given.get("containers") or [{}]
    taken = [each["mountPath"].rstrip("/") for each in main.get("volumeMounts") or []]
    own = [each for each in _volumes(job, role) if each[1] not in taken]
    containers = [_main_container(job, role, index, main, own), *others]
    volumes = [{"name": name, **source} for name, _, source in own]
    drain = MASTER_STOP_SECONDS if is_master else job.spec.drain_seconds + STOP_SECONDS
    spec: Manifest = {
        "terminationGracePeriodSeconds": drain,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        **given,
        "restartPolicy": "Never",
        "containers": _secured(containers),
        "initContainers": _secured(given.get("initContainers") or []),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            **(given.get("securityContext") or {}),
        },
        "tolerations": _tolerations(job, given.get("tolerations") or []),
        "volumes": [*(given.get("volumes") or []), *volumes],
    }
    hosts = [each.host for each in job.status.excluded_hosts]
    if hosts:
        spec["affinity"] = _away_from(hosts, given.get("affinity") or {})
    metadata = _metadata(job, pod_name(job.name, role, index))
    metadata["annotations"] = dict(meta.get("annotations") or {})
    metadata["labels"] = {
        **(meta.get("labels") or {}),
        **metadata["labels"],
        LABEL_ROLE: role.value,
        LABEL_INDEX: str(index),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def make_event(key: Key, uid: str, told: Emit, host: str) -> Manifest:
    """An event of the operator at `host`, for those who look at a job."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{key.name}-", "namespace": key.namespace},
        "involvedObject": {**_reference(key.name, uid), "namespace": key.namespace},
        "reason": told.reason,
        "message": told.message[:1024],
        "type": "Warning" if told.warning else "Normal",
        "source": {"component": "remesh-operator", "host": host},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _reference(name: str, uid: str) -> Manifest:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": name, "uid": uid}


def _metadata(job: ElasticJob, name: str) -> Manifest:
    owner = {**_reference(job.name, job.uid), "controller": True, "blockOwnerDeletion": True}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {LABEL_JOB: job.name, "app.kubernetes.io/managed-by": "remesh-operator"},
        "ownerReferences": [owner],
    }


def _secured(containers: list[Manifest]) -> list[Manifest]:
    return [
        {**each, "securityContext": {**CONTAINER_SECURITY, **(each.get("securityContext") or {})}}
        for each in containers
    ]


def _main_container(
    job: ElasticJob, role: Role, index: int, given: Mapping[str, Any], volumes: list[Volume]
) -> Manifest:
    """The container that runs the master, or a worker's part of the training."""
    workers = (job.spec.worker.template.get("spec") or {}).get("containers") or [{}]
    image = workers[0].get("image", "")
    container: Manifest = {"name": role.value, "image": image, "command": ["remesh"]}
    if role is Role.MASTER:
        container |= _master_defaults(job.spec.master.port)
    container |= given
    container["args"] = _master_args(job) if role is Role.MASTER else _worker_args(job, index)
    container["env"] = [*VARIABLES, *(given.get("env") or [])]
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if "secret" in source else {})}
        for name, path, source in volumes
    ]
    container["volumeMounts"] = [*(given.get("volumeMounts") or []), *mounts]
    return container


def _master_defaults(port: int) -> Manifest:
    return {
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "ports": [{"name": "http", "containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
    }


def _master_args(job: ElasticJob) -> list[str]:
    spec = job.spec
    args = ["master", "--host", "0.0.0.0", "--port", str(spec.master.port)]  # noqa: S104 - a token
    args += ["--token-file", f"{TOKEN_MOUNT}/token"]
    args += ["--state", f"{STATE_MOUNT}/{job.uid}-{job.status.epoch}.json"]
    if spec.tls is not None:
        args += ["--tls-cert", f"{TLS_MOUNT}/tls.crt", "--tls-key", f"{TLS_MOUNT}/tls.key"]
    if spec.check:
        args.append("--check")
    return [*args, *spec.master.args]


def _worker_args(job: ElasticJob, index: int) -> list[str]:
    spec = job.spec
    args = ["run", "--master", master_url(job), "--token-file", f"{TOKEN_MOUNT}/token"]
    if spec.tls is not None:
        args += ["--tls-ca", f"{TLS_MOUNT}/ca.crt"]
    args += ["--node-id", str(index), "--node-name", pod_name(job.name, Role.WORKER, index)]
    args += ["--local-addr", "$(POD_IP)", "--nnodes", f"{spec.fewest}:{spec.most}"]
    args += ["--node-unit", str(spec.node_unit), "--max-restarts", str(spec.max_restarts)]
    args += ["--join-timeout", str(spec.join_seconds), "--drain-seconds", str(spec.drain_seconds)]
    return [*args, *spec.worker.args, *spec.script]


def _volumes(job: ElasticJob, role: Role) -> Iterator[Volume]:
    """The volumes of a pod, besides the template's."""
    spec = job.spec
    yield "remesh-tmp", "/tmp", {"emptyDir": {}}  # noqa: S108 - the pod's own
    yield "remesh-token", TOKEN_MOUNT, {"secret": {"secretName": secret_name(job.name)}}
    if spec.tls is not None:
        source: Manifest = {"secretName": spec.tls.secret}
        if role is Role.WORKER:
            source["items"] = [{"key": "ca.crt", "path": "ca.crt"}]  # not the master's key
        yield "remesh-tls", TLS_MOUNT, {"secret": source}
    if role is Role.MASTER:
        claim = spec.master.state_claim
        state = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        yield "remesh-state", STATE_MOUNT, state
    else:
        yield "remesh-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}  # noqa: S108 - likewise


def _tolerations(job: ElasticJob, given: list[Manifest]) -> list[Manifest]:
    """The template's, and how long pods stay bound to a node that is not ready."""
    known = {each.get("key") for each in given}
    return given + [
        {
            "key": taint,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": job.spec.node_lost_seconds,
        }
        for taint in _NODE_TAINTS
        if taint not in known
    ]


def _away_from(hosts: list[str], given: Mapping[str, Any]) -> Manifest:
    """An affinity that keeps a pod off hosts, besides what the template asks for."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
    node = dict(given.get("nodeAffinity") or {})
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    # A pod must satisfy one of the terms, so each of them excludes the hosts.
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *fields]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    node["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    return {**given, "nodeAffinity": node}
