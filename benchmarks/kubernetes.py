"""One operator with many jobs: requests to the API server, memory, time until it reacts.

The operator's own tasks run against an API server in memory, which answers at once: what is
measured is the operator's own work and the number of its requests. First all jobs are new. Then a
worker of each hundredth job is lost, and the time until its replacement is created is measured,
while the masters of all jobs are asked as they always are.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from benchmarks.report import median, print_table, write_json
from remesh.kubernetes.operator import ApiCluster, ConflictError, Metrics, Operator
from remesh.kubernetes.pods import make_pod, pod_name
from remesh.kubernetes.reconcile import Action, CreatePod, DeletePod, MasterAnswer
from remesh.kubernetes.resource import (
    FINALIZER,
    ElasticJob,
    JobStatus,
    Key,
    Pod,
    Role,
    Spec,
    Training,
    WorkerSpec,
    parse_pod,
)

COLUMNS = ("jobs", "workers", "start, s", "its CPU, s", "requests", "MB", "react, ms", "p99, ms")


class ApiServer:
    """Jobs and pods in memory; every pod runs at once."""

    def __init__(self, num_jobs: int, num_workers: int) -> None:
        containers = [{"name": "train", "image": "train:1"}]
        worker = WorkerSpec(template={"spec": {"containers": containers}})
        spec = Spec(script=("train.py",), replicas=num_workers, min_replicas=1, worker=worker)
        self.jobs = {
            Key("ml", f"job-{number}"): ElasticJob(
                name=f"job-{number}",
                namespace="ml",
                uid=f"u{number}",
                version="1",
                finalizers=(FINALIZER,),
                spec=spec,
            )
            for number in range(num_jobs)
        }
        self.pods: dict[Key, dict[str, Pod]] = {key: {} for key in self.jobs}
        self.created: dict[tuple[Key, str], float] = {}
        self.num_requests = 0
        self.on_change: Any = None

    async def read_job(self, key: Key) -> ElasticJob | None:
        await self._request()
        return self.jobs[key]

    async def list_pods(self, key: Key) -> tuple[Pod, ...]:
        await self._request()
        return tuple(self.pods[key].values())

    async def write_status(self, job: ElasticJob, status: JobStatus) -> ElasticJob:
        await self._request()
        key = job.key
        stored = self.jobs[key]
        if stored.version != job.version:
            raise ConflictError
        version = str(int(stored.version) + 1)
        self.jobs[key] = msgspec.structs.replace(stored, status=status, version=version)
        self.on_change(key)
        return self.jobs[key]

    async def perform(self, job: ElasticJob, action: Action) -> None:
        await self._request()
        key = job.key
        match action:
            case CreatePod(role, index):
                data = make_pod(job, role, index)
                now = datetime.now(UTC).isoformat()
                data["metadata"] |= {"uid": f"{self.num_requests}", "creationTimestamp": now}
                data["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
                pod = parse_pod(data)
                assert pod is not None
                self.pods[key][pod.name] = pod
                self.created[key, pod.name] = time.perf_counter()
                self.on_change(key)
            case DeletePod(name):
                self.pods[key].pop(name, None)

    async def _request(self) -> None:
        self.num_requests += 1
        await asyncio.sleep(0)

    def num_pods(self) -> int:
        """Pods of all jobs."""
        return sum(map(len, self.pods.values()))


async def measure(num_jobs: int, num_workers: int) -> dict[str, float]:
    """Measure one size."""
    server = ApiServer(num_jobs, num_workers)

    async def ask(job: ElasticJob, _pods: tuple[Pod, ...]) -> MasterAnswer | None:
        training = Training(time=datetime.now(UTC), phase="running", round=1, step=1)
        return MasterAnswer(epoch=job.status.epoch, training=training)

    operator = Operator(cast("ApiCluster", server), ask, Metrics())
    server.on_change = operator.wake
    began, cpu = time.perf_counter(), time.process_time()
    for key in server.jobs:
        operator.wake(key)
    while server.num_pods() < num_jobs * (num_workers + 1):  # noqa: ASYNC110 - many things change it
        await asyncio.sleep(0.01)
    started, used = time.perf_counter() - began, time.process_time() - cpu
    requests = server.num_requests
    while not all(  # noqa: ASYNC110 - likewise
        worker.seen for job in server.jobs.values() for worker in job.status.workers
    ):
        await asyncio.sleep(0.1)
    waits = []
    for key in list(server.jobs)[:: max(num_jobs // 100, 1)]:
        lost = time.perf_counter()
        del server.pods[key][pod_name(key.name, Role.WORKER, 0)]
        operator.wake(key)
        wanted = key, pod_name(key.name, Role.WORKER, num_workers)
        while wanted not in server.created:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.001)
        waits.append((server.created[wanted] - lost) * 1e3)
    await operator.close()
    waits.sort()
    return {
        "jobs": num_jobs,
        "workers": num_workers,
        "start, s": started,
        "its CPU, s": used,
        "requests": requests,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "react, ms": median(waits),
        "p99, ms": waits[int(len(waits) * 0.99)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    options = parser.parse_args(arguments)
    row = asyncio.run(measure(options.jobs, options.workers))
    print_table("One operator", COLUMNS, [[f"{row[name]:.0f}" for name in COLUMNS]])
    write_json("operator", row)


if __name__ == "__main__":
    main()
