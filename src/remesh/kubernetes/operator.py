"""The operator's process: what it watches, when it reconciles a job, what it shows of itself.

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aiohttp
import kopf
import msgspec
from aiohttp import web
from lightkube import AsyncClient
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
from remesh.kubernetes.api import (
    CONFLICT,
    SECRETS,
    ApiCluster,
    ConflictError,
    errors_of,
    read,
)
from remesh.kubernetes.manifests import KEY_SECRET
from remesh.kubernetes.observed import MAX_MESSAGE, MasterAnswer, Pod, Role, seen_of_master
from remesh.kubernetes.pods import master_url, token_of
from remesh.kubernetes.reconcile import Decision, reconcile
from remesh.kubernetes.resource import (
    FINISHED,
    GROUP,
    LABEL_JOB,
    PLURAL,
    VERSION,
    ElasticJob,
    Key,
    Phase,
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

Ask = Callable[[ElasticJob, tuple[Pod, ...]], Awaitable[MasterAnswer | None]]
"""Asks the master of a job; None if it is not reached."""

_decode = msgspec.json.Decoder(Status).decode


class Metrics:
    """The operator's counts of itself, for Prometheus."""

    content_type = CONTENT_TYPE_LATEST

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


class Masters:
    """Asks masters for their status."""

    def __init__(self, session: aiohttp.ClientSession, key: bytes, host: str | None) -> None:
        self._session = session
        self._key = key
        self._host = host

    async def ask(self, job: ElasticJob, pods: tuple[Pod, ...]) -> MasterAnswer | None:
        """The answer of a job's master; None if it does not run or is not reached."""
        running = any(
            pod.is_running and pod.role is Role.MASTER and pod.index == job.status.master
            for pod in pods
        )
        if not running:
            return None
        url = f"{master_url(job, self._host)}/v{PROTOCOL_VERSION}/status"
        headers = {"Authorization": f"Bearer {token_of(self._key, job)}"}
        try:
            trust = (None if job.spec.tls is None else job.spec.tls.trust()) or True
            async with self._session.get(url, headers=headers, ssl=trust) as reply:
                text = await reply.read()
                if reply.status != web.HTTPOk.status_code:
                    log.info("%s: HTTP status %d", url, reply.status)
                    return None
                return seen_of_master(_decode(text), job.status.epoch, _now())
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            log.info("%s: %s", url, error)
            return None
        except (ClusterError, ValueError) as error:  # its answer, or its certificates in the spec
            log.warning("%s: %s", url, error)
            return None


@dataclass(frozen=True, slots=True)
class Pass:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """The options of an operator."""

    namespace: str | None = None  # the only namespace whose jobs it sees; None: all
    metrics_port: int = 0  # where `/metrics` and `/healthz` are served; 0: nowhere
    master_host: str | None = None
    """Where masters are reached; by default by the names of their services."""


async def run_operator(cluster: ApiCluster, key: bytes, options: OperatorOptions) -> None:
    """Serve metrics and look after jobs."""
    metrics = Metrics()
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        if options.metrics_port:
            await stack.enter_async_context(_served(metrics, options.metrics_port))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        masters = Masters(session, key, options.master_host)
        operator = Operator(cluster, masters.ask, metrics)
        stack.push_async_callback(operator.close)
        await kopf.operator(
            registry=_registry(operator),
            settings=_settings(),
            clusterwide=options.namespace is None,
            namespaces=[] if options.namespace is None else [options.namespace],
        )


@contextlib.asynccontextmanager
async def _served(metrics: Metrics, port: int) -> Any:

    async def show(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.render(), headers={"Content-Type": metrics.content_type})

    async def live(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/metrics", show)
    app.router.add_get("/healthz", live)
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


def main(*, own_namespace: str | None, identity: str, options: OperatorOptions) -> None:
    """Run an operator until it is stopped."""

    async def run() -> None:
        with errors_of("connect"):
            client = AsyncClient()
        try:
            await operate(client)
        finally:
            await client.close()

    async def operate(client: AsyncClient) -> None:
        key = await read_key(client, own_namespace or client.namespace)
        await run_operator(ApiCluster(client, key, identity), key, options)

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(run())
