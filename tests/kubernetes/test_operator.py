"""The operator with several jobs, of which one or its master is not as it should be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from lightkube import AsyncClient
from prometheus_client.parser import text_string_to_metric_families

from remesh.elastic.job import JobState, Policy
from remesh.elastic.liveness import Liveness
from remesh.elastic.status import RoundFailures, status_of
from remesh.errors import ClusterError
from remesh.kubernetes import operator
from remesh.kubernetes.operator import (
    EVENTS,
    JOBS,
    ApiCluster,
    Ask,
    Metrics,
    Operator,
    ask_master,
    seen_of_master,
)
from remesh.kubernetes.reconcile import STALLED, Action, MasterAnswer
from remesh.kubernetes.resource import ElasticJob, JobStatus, Key, Phase, Pod, Role, Tls
from tests.kubernetes.simulated import START, Cluster, make_job

pytestmark = pytest.mark.timeout(300)


class Clusters(ApiCluster):
    """What the API server stores of two jobs, `good` and `bad`; it tells of each write."""

    def __init__(self) -> None:
        self.of = {name: Cluster(made) for name, made in (("good", job("good")), ("bad", job()))}
        self.wake: Callable[[Key], None] = lambda _key: None

    async def read_job(self, key: Key) -> ElasticJob | None:
        return await self.of[key.name].read_job(key)

    async def list_pods(self, key: Key) -> tuple[Pod, ...]:
        return await self.of[key.name].list_pods(key)

    async def write_status(self, job: ElasticJob, status: JobStatus) -> ElasticJob:
        written = await self.of[job.name].write_status(job, status)
        self.wake(Key(job.namespace, job.name))
        return written

    async def perform(self, job: ElasticJob, action: Action) -> None:
        await self.of[job.name].perform(job, action)
        self.wake(Key(job.namespace, job.name))

    async def show_problem(self, key: Key, text: str) -> None:
        await self.of[key.name].show_problem(key, text)
        self.wake(key)

    def conditions(self, name: str) -> dict[str, str]:
        """The conditions of a job that hold, and their messages."""
        found = self.of[name].job
        assert found is not None
        return {
            each.type: each.message for each in found.status.conditions if each.status == "True"
        }


def job(name: str = "bad", **spec: Any) -> ElasticJob:
    return msgspec.structs.replace(make_job(**spec), name=name)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - many things make it true
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def operating(clusters: Clusters, ask: Ask, metrics: Metrics) -> AsyncIterator[None]:
    """An operator that looks after both jobs."""
    operator = Operator(clusters, ask, metrics)
    clusters.wake = operator.wake
    try:
        for name in clusters.of:
            operator.wake(Key("ml", name))
        yield
    finally:
        await operator.close()


def num_errors(metrics: Metrics) -> float:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    return next(each.value for each in samples if each.name == "remesh_operator_errors_total")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OverflowError("too large"), "the operator failed: OverflowError: too large"),
        (ClusterError("JobState ml/bad is not valid"), "JobState ml/bad is not valid"),
    ],
)
def test_a_job_whose_look_fails_says_so_and_the_others_go_on(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "RETRY_SECONDS", (0.01, 0.02))
    clusters, metrics = Clusters(), Metrics()
    bad, good = clusters.of["bad"], clusters.of["good"]
    is_broken = True

    async def ask(asked: ElasticJob, pods: tuple[Pod, ...]) -> MasterAnswer | None:
        if asked.name == "bad" and is_broken:
            raise error
        return None

    async def trial() -> None:
        nonlocal is_broken
        async with operating(clusters, ask, metrics):
            await until(lambda: num_errors(metrics) >= 3)
            assert clusters.conditions("bad")[STALLED] == text
            assert bad.events == [text], "shown once, however often it fails"
            await until(lambda: len(good.living()) == 3)
            is_broken = False
            await until(lambda: STALLED not in clusters.conditions("bad") and bad.living())

    asyncio.run(trial())


@pytest.mark.parametrize("bundle", ["ü", "x"])
def test_a_spec_that_is_not_valid_fails_its_job_alone(bundle: str) -> None:
    clusters = Clusters()
    clusters.of["bad"] = bad = Cluster(job(tls=Tls(secret="s", ca_bundle=bundle)))

    async def trial() -> None:
        async with aiohttp.ClientSession() as session:

            async def ask(asked: ElasticJob, _pods: tuple[Pod, ...]) -> MasterAnswer | None:
                running = Pod(name="m", role=Role.MASTER, index=0, phase="Running")
                return await ask_master(session, b"k", "127.0.0.1", asked, (running,))

            async with operating(clusters, ask, Metrics()):
                await until(lambda: clusters.conditions("bad").get("Failed"))
                await until(lambda: len(clusters.of["good"].living()) == 3)

    asyncio.run(trial())
    assert bad.job is not None
    assert bad.job.status.phase is Phase.FAILED
    assert "tls.caBundle: no certificates in PEM format" in bad.job.status.reason
    assert bad.pods == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 1 << 63},
        {"saved_step": -(10**30)},
        {"goodput": 1e300},
        {"failures": (RoundFailures(round=1, time=1e18, cause="x", failures=()),)},
        {"failures": (RoundFailures(round=1, time=-1.0, cause="x", failures=()),)},
        {"failures": (RoundFailures(round=1, time=float("nan"), cause="x", failures=()),)},
    ],
)
def test_an_answer_with_numbers_that_cannot_be_is_not_used(changes: dict[str, Any]) -> None:
    elastic = JobState(policy=Policy())
    said = status_of(elastic, Liveness.after_start(elastic, 0.0), 0.0)
    assert seen_of_master(said, 0, START).training.step is None
    with pytest.raises(ClusterError, match="the master's answer is not used"):
        seen_of_master(msgspec.structs.replace(said, **changes), 0, START)


@dataclasses.dataclass
class Server:
    """An API server with one object, which is no JobState."""

    found: dict[str, Any]
    created: list[tuple[type, dict[str, Any]]] = dataclasses.field(default_factory=list)

    async def get(self, kind: type, name: str, *, namespace: str) -> dict[str, Any]:
        assert (kind, name, namespace) == (JOBS, "bad", "ml")
        return self.found

    async def patch(self, kind: type, name: str, body: dict[str, Any], **_: object) -> None:
        assert (kind, name) == (JOBS.Status, "bad")
        self.found["status"] = (self.found.get("status") or {}) | body["status"]

    async def create(self, made: Any) -> None:
        self.created.append((type(made), dict(made)))


@pytest.mark.parametrize("status", [None, {"conditions": "none"}, {"conditions": [{"no": "type"}]}])
def test_a_problem_is_shown_on_what_cannot_be_read_as_a_job(status: object) -> None:
    server = Server({"metadata": {"uid": "u"}, "spec": 7, "status": status})
    cluster = ApiCluster(cast("AsyncClient", server), b"k", "me")
    with pytest.raises(ClusterError, match="is not valid"):
        asyncio.run(cluster.read_job(Key("ml", "bad")))
    for text in ("first", "second"):
        asyncio.run(cluster.show_problem(Key("ml", "bad"), text))
    (condition,) = server.found["status"]["conditions"]
    assert (condition["type"], condition["status"]) == (STALLED, "True")
    assert condition["message"] == "second"
    assert datetime.fromisoformat(condition["lastTransitionTime"]).tzinfo is not None
    kinds = {kind for kind, _ in server.created}
    assert kinds == {EVENTS}
    assert [event["message"] for _, event in server.created] == ["first", "second"]
    assert server.created[0][1]["involvedObject"]["uid"] == "u"
