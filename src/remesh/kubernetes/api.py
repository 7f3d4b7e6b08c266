"""The API server of Kubernetes, through lightkube: objects as JSON values, errors of remesh."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.types import PatchType

from remesh.errors import ClusterError
from remesh.kubernetes.observed import Pod, parse_pod
from remesh.kubernetes.pods import (
    Manifest,
    make_pod,
    make_secret,
    make_service,
    secret_name,
    service_name,
    token_of,
)
from remesh.kubernetes.reconcile import (
    STALLED,
    Action,
    CreatePod,
    CreateShared,
    DeletePod,
    Emit,
    HoldJob,
    stalled,
)
from remesh.kubernetes.resource import (
    FINALIZER,
    GROUP,
    KIND,
    LABEL_JOB,
    PLURAL,
    VERSION,
    ElasticJob,
    JobStatus,
    Key,
    parse_job,
    status_patch,
)

log = logging.getLogger(__name__)

JOBS = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)

PODS = create_namespaced_resource("", "v1", "Pod", "pods")
SERVICES = create_namespaced_resource("", "v1", "Service", "services")
SECRETS = create_namespaced_resource("", "v1", "Secret", "secrets")
EVENTS = create_namespaced_resource("", "v1", "Event", "events")
NOT_FOUND, CONFLICT = 404, 409


class ConflictError(Exception):
    """The job was written by another since it was read."""


@contextmanager
def errors_of(what: str, *, ignore: int | None = None, guarded: bool = False) -> Iterator[None]:
    """Turn errors of a request into ClusterError, but for one HTTP status that is none here.

    A guarded write holds only if the job has not changed: if it has, that is a ConflictError.
    """
    try:
        yield
    except ApiError as error:
        if guarded and error.status.code in (CONFLICT, NOT_FOUND):
            raise ConflictError from error
        if error.status.code != ignore:
            raise ClusterError(f"cannot {what}: {error.status.message}") from error
    except ConfigError as error:
        raise ClusterError(f"no cluster is known: {error}; set KUBECONFIG") from error
    except httpx2.HTTPError as error:
        why = str(error) or type(error).__name__
        raise ClusterError(f"cannot {what}: the API server is not reached: {why}") from error


async def read(
    client: AsyncClient, kind: type[GenericNamespacedResource], namespace: str, name: str
) -> dict[str, Any] | None:
    """An object; None if there is none of this name."""
    with errors_of(f"read {name}"):
        try:
            return dict(await client.get(kind, name, namespace=namespace))
        except ApiError as error:
            if error.status.code == NOT_FOUND:
                return None
            raise


class ApiCluster:
    """The requests of the operator to the API server."""

    def __init__(self, client: AsyncClient, key: bytes, identity: str) -> None:
        self._client = client
        self._key = key
        self._identity = identity

    async def read_job(self, key: Key) -> ElasticJob | None:
        """A job as it is now; None if there is none."""
        found = await read(self._client, JOBS, key.namespace, key.name)
        return None if found is None else parse_job(found)

    async def list_pods(self, key: Key) -> tuple[Pod, ...]:
        """The pods of a job as they are now."""
        pods = []
        with errors_of(f"list the pods of job {key.name}"):
            labels: Any = {LABEL_JOB: key.name}
            async for found in self._client.list(PODS, namespace=key.namespace, labels=labels):
                pod = parse_pod(found)
                if pod is not None:
                    pods.append(pod)
        return tuple(pods)

    async def write_status(self, job: ElasticJob, status: JobStatus) -> ElasticJob:
        """Write the status, and return the job after it; ConflictError if another has written."""
        body = {
            "metadata": {"resourceVersion": job.version},
            "status": status_patch(job.status, status),
        }
        return parse_job(await self._patch(JOBS.Status, job.key, body, guarded=True))

    async def perform(self, job: ElasticJob, action: Action) -> None:
        """Carry out an action; no error if it was done, ConflictError as for `write_status`."""
        log.info("%s/%s: %s", job.namespace, job.name, action)
        match action:
            case HoldJob(held):
                if not held:
                    # Not left to the garbage collector: a job of this name may follow at once.
                    await self._delete(SERVICES, job, service_name(job.name))
                    await self._delete(SECRETS, job, secret_name(job.name))
                names = [name for name in job.finalizers if name != FINALIZER]
                names += [FINALIZER] * held
                body = {"metadata": {"resourceVersion": job.version, "finalizers": names}}
                await self._patch(JOBS, job.key, body, guarded=True)
            case CreateShared():
                await self._create(SERVICES, make_service(job))
                await self._create(SECRETS, make_secret(job, token_of(self._key, job)))
            case CreatePod(role, index):
                await self._create(PODS, make_pod(job, role, index))
            case DeletePod(name, force):
                await self._delete(PODS, job, name, grace=0 if force else None)
            case Emit():
                await self._create(EVENTS, self._event(job.key, job.uid, action))

    async def show_problem(self, key: Key, text: str) -> None:
        """Show on a job, as a condition and an event, that the operator cannot go on with it.

        The job may be one that cannot be read as such.
        """
        data = await read(self._client, JOBS, key.namespace, key.name)
        if data is None:
            return
        old, now = (data.get("status") or {}).get("conditions"), datetime.now(UTC)
        conditions = stalled(old, text, now.replace(microsecond=0))
        await self._patch(JOBS.Status, key, {"status": {"conditions": conditions}})
        told = Emit(STALLED, text, warning=True)
        await self._create(EVENTS, self._event(key, data["metadata"].get("uid", ""), told))

    async def _patch(self, kind: Any, key: Key, body: Manifest, *, guarded: bool = False) -> Any:
        part = "the status of " if kind is JOBS.Status else ""
        with errors_of(f"write {part}job {key.name}", guarded=guarded):
            return await self._client.patch(
                kind, key.name, body, namespace=key.namespace, patch_type=PatchType.MERGE
            )

    async def _create(self, kind: type[GenericNamespacedResource], manifest: Manifest) -> None:
        name = manifest["metadata"].get("name", "")
        with errors_of(f"create {manifest['kind']} {name}", ignore=CONFLICT):
            await self._client.create(kind.from_dict(manifest))

    async def _delete(
        self,
        kind: type[GenericNamespacedResource],
        job: ElasticJob,
        name: str,
        grace: int | None = None,
    ) -> None:
        with errors_of(f"delete {name}", ignore=NOT_FOUND):
            await self._client.delete(kind, name, namespace=job.namespace, grace_period=grace)

    def _event(self, key: Key, uid: str, told: Emit) -> Manifest:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{key.name}-", "namespace": key.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": key.name,
                "namespace": key.namespace,
                "uid": uid,
            },
            "reason": told.reason,
            "message": told.message[:1024],
            "type": "Warning" if told.warning else "Normal",
            "source": {"component": "remesh-operator", "host": self._identity},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
