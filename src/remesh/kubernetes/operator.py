"""The operator's process: its requests to the API server, and when it reconciles a job.

kopf watches jobs and pods and calls a handler for each event, which only wakes the task of the job.
That task makes a pass over the job (`reconcile_once`), then waits until it is woken, until the time
that the decision named, or until the master says something new. Each pass reads everything anew, so
events that are lost, repeated or late change nothing but the time of a pass.

The order within a pass makes it safe beside others (`reconcile`): the job is read before its pods,
and its status is written, on the condition that nothing else has written to the job since, before
the first action. The write is made even if the status is unchanged: it is the proof that what was
seen of the job still holds.

A pass that fails, for whatever reason, concerns its job alone: the reason is in the log and on the
job, and the task tries again after a pause. The other jobs go on.

There is one instance: its Deployment has one replica, and starts another when that has ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import httpx2
import kopf
import msgspec
from aiohttp import web
from lightkube import ApiError, AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.types import PatchType
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from remesh.elastic.protocol import PROTOCOL_VERSION
from remesh.elastic.status import Status
from remesh.errors import ClusterError
from remesh.kubernetes.pods import (
    Manifest,
    make_event,
    make_pod,
    make_secret,
    make_service,
    master_url,
    secret_name,
    service_name,
    token_of,
)
from remesh.kubernetes.reconcile import (
    STALLED,
    Action,
    CreatePod,
    CreateShared,
    Decision,
    DeletePod,
    Emit,
    HoldJob,
    MasterAnswer,
    reconcile,
    stalled,
)
from remesh.kubernetes.resource import (
    FINALIZER,
    FINISHED,
    GROUP,
    KIND,
    LABEL_JOB,
    MAX_MESSAGE,
    PLURAL,
    VERSION,
    ElasticJob,
    FailureEntry,
    JobStatus,
    Key,
    Phase,
    Pod,
    Role,
    Training,
    parse_job,
    parse_pod,
    status_patch,
)

log = logging.getLogger(__name__)

RESYNC_SECONDS = 60.0
"""Longest time between two passes over a job."""
POLL_SECONDS = 3.0
"""Time between two questions to a master."""
SETTLE_SECONDS = 0.1
"""Time in which further events lead to the same pass."""
ASK_SECONDS = 5.0
"""Time for the reply of a master."""
RETRY_SECONDS = (0.5, 30.0)
"""First and longest pause after a request that failed."""

LARGEST_INTEGER = (1 << 63) - 1
"""Of those that the API server stores."""
_MAX_TIME = 253402300799.0
"""The end of the year 9999, in seconds since the epoch: the last time that a status can hold."""

JOBS = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)
PODS = create_namespaced_resource("", "v1", "Pod", "pods")
SERVICES = create_namespaced_resource("", "v1", "Service", "services")
SECRETS = create_namespaced_resource("", "v1", "Secret", "secrets")
EVENTS = create_namespaced_resource("", "v1", "Event", "events")
NOT_FOUND, CONFLICT = 404, 409
KEY_SECRET = "remesh-operator-key"  # noqa: S105 - its name


class ConflictError(Exception):
    """The job was written by another since it was read."""


@contextlib.contextmanager
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
    found = None
    with errors_of(f"read {name}", ignore=NOT_FOUND):
        found = dict(await client.get(kind, name, namespace=namespace))
    return found  # noqa: RET504 - the block may have ended before


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
        labels: Any = {LABEL_JOB: key.name}
        with errors_of(f"list the pods of job {key.name}"):
            listed = self._client.list(PODS, namespace=key.namespace, labels=labels)
            pods = [parse_pod(found) async for found in listed]
        return tuple(pod for pod in pods if pod is not None)

    async def write_status(self, job: ElasticJob, status: JobStatus) -> ElasticJob:
        """Write the status, and return the job after it; ConflictError if another has written."""
        body = {"status": status_patch(job.status, status)}
        return parse_job(await self._patch(JOBS.Status, job.key, body, job.version))

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
                body = {"metadata": {"finalizers": names + [FINALIZER] * held}}
                await self._patch(JOBS, job.key, body, job.version)
            case CreateShared():
                await self._create(SERVICES, make_service(job))
                await self._create(SECRETS, make_secret(job, token_of(self._key, job)))
            case CreatePod(role, index):
                await self._create(PODS, make_pod(job, role, index))
            case DeletePod(name, force):
                await self._delete(PODS, job, name, grace_period=0 if force else None)
            case Emit():
                await self._create(EVENTS, make_event(job.key, job.uid, action, self._identity))

    async def show_problem(self, key: Key, text: str) -> None:
        """Show on a job, as a condition and an event, that the operator cannot go on with it.

        The job may be one that cannot be read as such.
        """
        data = await read(self._client, JOBS, key.namespace, key.name)
        if data is None:
            return
        conditions = stalled((data.get("status") or {}).get("conditions"), text, _now())
        await self._patch(JOBS.Status, key, {"status": {"conditions": conditions}})
        uid, told = data["metadata"].get("uid", ""), Emit(STALLED, text, warning=True)
        await self._create(EVENTS, make_event(key, uid, told, self._identity))

    async def _patch(self, kind: Any, key: Key, body: Manifest, version: str | None = None) -> Any:
        """Change a job; with a version, only if it still has that one."""
        part = "the status of " if kind is JOBS.Status else ""
        if version is not None:
            body.setdefault("metadata", {})["resourceVersion"] = version
        with errors_of(f"write {part}job {key.name}", guarded=version is not None):
            return await self._client.patch(
                kind, key.name, body, namespace=key.namespace, patch_type=PatchType.MERGE
            )

    async def _create(self, kind: type[GenericNamespacedResource], manifest: Manifest) -> None:
        name = manifest["metadata"].get("name", "")
        with errors_of(f"create {manifest['kind']} {name}", ignore=CONFLICT):
            await self._client.create(kind.from_dict(manifest))

    async def _delete(
        self, kind: type[GenericNamespacedResource], job: ElasticJob, name: str, **options: Any
    ) -> None:
        with errors_of(f"delete {name}", ignore=NOT_FOUND):
            await self._client.delete(kind, name, namespace=job.namespace, **options)


Pods = tuple[Pod, ...]
Ask = Callable[[ElasticJob, Pods], Awaitable[MasterAnswer | None]]
"""Asks the master of a job; None if it is not reached."""

_decode = msgspec.json.Decoder(Status).decode


class Metrics:
    """The operator's counts of itself, for Prometheus."""

    def __init__(self) -> None:
        self.phases: dict[Key, Phase] = {}
        self._registry = CollectorRegistry()
        own, prefix = self._registry, "remesh_operator_"
        jobs = Gauge(f"{prefix}jobs", "Jobs by phase", ["phase"], registry=own)
        for phase in Phase:
            jobs.labels(phase.value).set_function(partial(self._count, phase))
        self.look_seconds = Histogram(f"{prefix}look_seconds", "Durations of passes", registry=own)
        self.actions = Counter(f"{prefix}actions", "Actions by kind", ["kind"], registry=own)
        self.errors = Counter(f"{prefix}errors", "Passes that failed", registry=own)

    def _count(self, phase: Phase) -> float:
        return list(self.phases.values()).count(phase)

    def render(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self._registry)


async def ask_master(
    session: aiohttp.ClientSession, key: bytes, host: str | None, job: ElasticJob, pods: Pods
) -> MasterAnswer | None:
    """The answer of a job's master, at a host or else at the name of its service."""
    masters = {pod.index: pod for pod in pods if pod.role is Role.MASTER}
    pod = masters.get(job.status.master)
    if pod is None or not pod.is_running:
        return None
    url = f"{master_url(job, host)}/v{PROTOCOL_VERSION}/status"
    headers = {"Authorization": f"Bearer {token_of(key, job)}"}
    try:
        trust = (None if job.spec.tls is None else job.spec.tls.trust()) or True
        async with session.get(url, headers=headers, ssl=trust) as reply:
            reply.raise_for_status()
            return seen_of_master(_decode(await reply.read()), job.status.epoch, _now())
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
        log.info("%s: %s", url, error)
    except (ClusterError, ValueError) as error:  # its answer, or its certificates in the spec
        log.warning("%s: %s", url, error)
    return None


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
        where, what, message = record.cause, "", ""
        if not record.cause and record.failures:
            first = record.failures[0]
            where = f"rank {first.rank} on node {first.node_id}, round {record.round}"
            what = first.signal or f"exit code {first.exit_code}"
            message = (first.message or first.log_tail)[-MAX_MESSAGE:]
        time, where = datetime.fromtimestamp(record.time, UTC), where[:MAX_MESSAGE]
        what = what[:MAX_MESSAGE]
        errors.append(FailureEntry(time=time, where=where, what=what, message=message))
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


class Pass(NamedTuple):
    """A pass over a job."""

    job: ElasticJob  # the job after it
    pods: tuple[Pod, ...]  # the pods before it
    master: MasterAnswer | None  # the answer of the master
    decision: Decision  # what was done


async def reconcile_once(
    cluster: ApiCluster, key: Key, ask: Ask, clock: Callable[[], datetime]
) -> Pass | None:
    """Read a job and its pods, decide, write the status, act; None if there is no such job."""
    job = await cluster.read_job(key)
    if job is None:
        return None
    pods = await cluster.list_pods(key)
    master = await ask(job, pods)
    decision = reconcile(job, pods, master, clock())
    if decision.actions or decision.status != job.status:
        job = await cluster.write_status(job, decision.status)
        job = msgspec.structs.replace(job, status=decision.status)
        for action in decision.actions:
            await cluster.perform(job, action)
    return Pass(job, pods, master, decision)


class Operator:
    """Makes a pass over a job when something may have happened to it."""

    def __init__(self, cluster: ApiCluster, ask: Ask, metrics: Metrics) -> None:
        self._cluster = cluster
        self._ask = ask
        self._metrics = metrics
        self._woken: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def wake(self, key: Key) -> None:
        """Something happened to a job."""
        self._woken.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._follow(key), name=f"job {key.name}")

    async def close(self) -> None:
        """Follow no job any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, key: Key) -> None:
        pause, woken, shown = RETRY_SECONDS[0], self._woken[key], ""
        while True:
            woken.clear()
            try:
                found = await self._reconcile(key)
                if found is not None:
                    await self._wait(found, woken)
            except ConflictError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, other jobs go on
                self._metrics.errors.inc()
                shown = await self._show(key, error, shown)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            pause, shown = RETRY_SECONDS[0], ""
            if found is None and not woken.is_set():
                del self._tasks[key], self._woken[key]
                self._metrics.phases.pop(key, None)
                return

    async def _show(self, key: Key, error: Exception, shown: str) -> str:
        """Log why a pass failed, and show it on the job; what the job shows now."""
        is_known = isinstance(error, ClusterError)
        text = str(error) if is_known else f"the operator failed: {type(error).__name__}: {error}"
        log.error("%s/%s: %s", *key, text, exc_info=None if is_known else error)
        if text == shown:
            return shown
        try:
            await self._cluster.show_problem(key, text[:MAX_MESSAGE])
        except Exception:
            log.exception("%s/%s: that cannot be shown on the job", *key)
            return shown
        return text

    async def _reconcile(self, key: Key) -> Pass | None:
        with self._metrics.look_seconds.time():
            found = await reconcile_once(self._cluster, key, self._ask, _now)
        if found is not None:
            for action in found.decision.actions:
                self._metrics.actions.labels(type(action).__name__).inc()
            self._metrics.phases[key] = found.job.status.phase
        return found

    async def _wait(self, last: Pass, woken: asyncio.Event) -> None:
        loop, wake = asyncio.get_running_loop(), last.decision.wake
        ends = loop.time() + min(RESYNC_SECONDS if wake is None else wake, RESYNC_SECONDS)
        while (left := ends - loop.time()) > 0:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, POLL_SECONDS)):
                    await woken.wait()
            if woken.is_set():
                await asyncio.sleep(SETTLE_SECONDS)
                return
            if last.job.status.phase not in FINISHED:
                master = await self._ask(last.job, last.pods)
                if _news(master) != _news(last.master):
                    return


def _news(master: MasterAnswer | None) -> object:
    """The part of a master's answer that is a reason for a pass over its job."""
    return None if master is None else (master.training.phase, master.training.round)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _registry(operator: Operator) -> kopf.OperatorRegistry:
    """The handlers of kopf: each wakes a job; and how it logs in."""
    registry = kopf.OperatorRegistry()

    async def on_job(namespace: str | None, name: str | None, **_: Any) -> None:
        operator.wake(Key(namespace or "", name or ""))

    async def on_pod(namespace: str | None, labels: Any, **_: Any) -> None:
        operator.wake(Key(namespace or "", labels[LABEL_JOB]))

    def log_in(**words: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**words) or kopf.login_with_kubeconfig(**words)

    kopf.on.login(registry=registry)(log_in)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(on_job)
    kopf.on.event("v1", "pods", labels={LABEL_JOB: kopf.PRESENT}, registry=registry)(on_pod)
    return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no rights on definitions and namespaces are needed
    settings.posting.enabled = False
    settings.peering.standalone = True  # there is one instance
    settings.watching.server_timeout = 600
    settings.watching.connect_timeout = 60
    return settings


@contextlib.asynccontextmanager
async def _served(metrics: Metrics, port: int) -> AsyncIterator[None]:
    """Serve `/metrics` and `/healthz`."""

    async def show(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def live(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.get("/metrics", show), web.get("/healthz", live)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


async def read_key(client: AsyncClient, namespace: str) -> bytes:
    """The operator's key; made if there is none yet."""
    made = base64.b64encode(secrets.token_bytes(32)).decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY_SECRET, "namespace": namespace},
        "data": {"key": made},
    }
    for _ in range(2):
        found = await read(client, SECRETS, namespace, KEY_SECRET)
        if found is not None:
            return base64.b64decode(found["data"]["key"])
        with errors_of("make the operator's key", ignore=CONFLICT):
            await client.create(SECRETS.from_dict(secret))
    raise ClusterError(f"secret {namespace}/{KEY_SECRET} comes and goes")


def main(
    *,
    namespace: str | None,  # the only one whose jobs it sees; None for all
    own_namespace: str | None,  # where its key is; None for that of its account
    metrics_port: int,  # where `/metrics` and `/healthz` are served; 0 for nowhere
    master_host: str | None,  # where masters are reached; None for the names of their services
    identity: str,  # its name in the events that it makes
) -> None:
    """Run an operator until it is stopped."""

    async def run() -> None:
        metrics, timeout = Metrics(), aiohttp.ClientTimeout(total=ASK_SECONDS)
        async with contextlib.AsyncExitStack() as stack:
            with errors_of("connect"):
                client = AsyncClient()
            stack.push_async_callback(client.close)
            key = await read_key(client, own_namespace or client.namespace)
            if metrics_port:
                await stack.enter_async_context(_served(metrics, metrics_port))
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            ask = partial(ask_master, session, key, master_host)
            operator = Operator(ApiCluster(client, key, identity), ask, metrics)
            stack.push_async_callback(operator.close)
            await kopf.operator(
                registry=_registry(operator),
                settings=_settings(),
                clusterwide=namespace is None,
                namespaces=[] if namespace is None else [namespace],
            )

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(run())
