"""The decisions of the operator: each case by itself, then all that may happen, at random."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from remesh.kubernetes.operator import ConflictError, Pass, reconcile_once
from remesh.kubernetes.pods import pod_name
from remesh.kubernetes.reconcile import MasterAnswer
from remesh.kubernetes.resource import FINISHED, ElasticJob, JobStatus, Phase, Pod, Role
from tests.kubernetes.simulated import KEY, Cluster, make_job, make_master, make_spec

RUNNING = make_master(phase="running", reason="round 1", round=1, step=7, saved_step=5)


class Bench:
    """A cluster and one operator, which looks until nothing changes any more."""

    def __init__(self, *, hosts: int = 4, **spec: Any) -> None:
        self.cluster = Cluster(make_job(**spec), hosts=hosts)
        self.master: MasterAnswer | None = None
        self.settle()

    async def ask(self, job: ElasticJob, pods: tuple[Pod, ...]) -> MasterAnswer | None:
        return self.master

    def look(self) -> None:
        steps = reconcile_once(self.cluster, KEY, self.ask, lambda: self.cluster.now)
        with contextlib.suppress(StopIteration):
            while True:
                steps.send(None)

    def settle(self) -> None:
        """Look, and let the cluster do its part, until nothing is to be done."""
        for _ in range(50):
            before = self.cluster.job, str(self.cluster.pods)
            self.look()
            self.cluster.place()
            self.cluster.sweep()
            if before == (self.cluster.job, str(self.cluster.pods)):
                return
        raise AssertionError("the operator finds something to do for ever")

    @property
    def status(self) -> JobStatus:
        assert self.cluster.job is not None
        return self.cluster.job.status

    def ids(self, role: Role = Role.WORKER) -> list[int]:
        return sorted(pod.index for pod in self.cluster.living(role))

    def hosts(self) -> dict[int, str]:
        return {pod.index: pod.host for pod in self.cluster.living()}

    def holds(self, condition: str) -> bool:
        return {each.type: each.status for each in self.status.conditions}[condition] == "True"

    def end(
        self, index: int, code: int, reason: str = "Error", *, role: Role = Role.WORKER
    ) -> None:
        self.cluster.end(pod_name(KEY.name, role, index), code, reason)
        self.settle()

    def hear(self, master: MasterAnswer | None) -> None:
        self.master = master
        self.settle()

    def change(self, **spec: Any) -> None:
        self.cluster.change(spec=make_spec(**spec))
        self.settle()

    def wait(self, seconds: float) -> None:
        self.cluster.now += timedelta(seconds=seconds)
        self.settle()


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.hear(RUNNING)
    return made


def test_a_job_gets_its_master_and_workers(bench: Bench) -> None:
    assert (bench.ids(), bench.ids(Role.MASTER)) == ([0, 1, 2], [0])
    assert bench.cluster.shared
    assert bench.status.phase is Phase.RUNNING
    assert (bench.status.replicas, bench.status.training and bench.status.training.step) == (3, 7)
    assert (bench.holds("Training"), bench.holds("Degraded")) == (True, False)


@pytest.mark.parametrize(
    ("code", "reason", "charged", "excludes"),
    [
        pytest.param(137, "Error", 0, False, id="killed"),
        pytest.param(143, "Error", 0, False, id="stopped"),
        pytest.param(1, "Evicted", 0, False, id="evicted"),
        pytest.param(1, "Error", 1, False, id="failed"),
        pytest.param(137, "OOMKilled", 1, False, id="out of memory"),
        pytest.param(75, "Error", 0, True, id="its machine is broken"),
        pytest.param(1, "UnexpectedAdmissionError", 0, True, id="its device is refused"),
    ],
)
def test_a_worker_that_ends_is_replaced(
    code: int, reason: str, charged: int, excludes: bool, bench: Bench
) -> None:
    host = bench.hosts()[1]
    bench.end(1, code, reason)
    assert bench.ids() == ([0, 2] if charged else [0, 2, 3]), "a failure is waited for"
    bench.wait(1)
    assert bench.ids() == [0, 2, 3], "a number is used once"
    assert bench.status.replacements == charged
    assert [each.host for each in bench.status.excluded_hosts] == [host] * excludes
    bench.change(suspend=True)
    bench.change()
    assert bench.ids() == [4, 5, 6]
    assert (host in bench.hosts().values()) is not excludes, "remembered for the job"


def test_a_worker_that_ends_while_containers_beside_it_run_is_replaced(bench: Bench) -> None:
    pod = bench.cluster.pods["train-worker-1"]
    ended = {"name": "train", "state": {"terminated": {"exitCode": 143}}}
    # The server lists them by name.
    found = [{"name": "log", "state": {"running": {}}}, ended]
    pod["status"] = {"phase": "Running", "containerStatuses": found}
    bench.settle()
    assert bench.ids() == [0, 2, 3]
    assert "train-worker-1" not in bench.cluster.pods, "it would keep its devices"


@pytest.mark.parametrize("code", [2, 126, 127, 128])
def test_a_command_that_cannot_run_stops_the_job(code: int, bench: Bench) -> None:
    bench.end(0, code)
    assert bench.status.phase is Phase.FAILED
    assert "check script and args" in bench.status.reason
    assert bench.ids(Role.MASTER) == []


def test_a_pod_that_is_deleted_is_replaced_and_nothing_is_charged(bench: Bench) -> None:
    bench.cluster.delete(pod_name(KEY.name, Role.WORKER, 0))
    bench.settle()
    assert (bench.ids(), bench.status.replacements) == ([1, 2, 3], 0)


def test_failures_are_replaced_ever_later_until_the_budget_is_used_up() -> None:
    bench = Bench(max_replacements=2)
    bench.end(0, 1)
    bench.wait(1)
    bench.end(1, 1)
    bench.wait(1)
    assert bench.ids() == [2, 3], "the second replacement waits two seconds"
    bench.wait(1)
    bench.end(2, 1)
    assert bench.status.phase is Phase.FAILED
    assert "more than 2 workers failed" in bench.status.reason
    assert bench.ids() == []


@pytest.mark.parametrize(
    ("ends", "master", "phase"),
    [
        pytest.param({0: 1}, "failed", Phase.FAILED, id="an error of the user's"),
        pytest.param({1: 0}, "failed", Phase.FAILED, id="a worker has ended too early"),
        pytest.param({1: 0}, "succeeded", Phase.SUCCEEDED, id="the others still train"),
    ],
)
def test_a_job_ends_as_its_master_says(
    ends: dict[int, int], master: str, phase: Phase, bench: Bench
) -> None:
    for index, code in ends.items():
        bench.end(index, code)
    assert bench.status.phase is Phase.RUNNING
    assert not set(ends) & set(bench.ids()), "one that is done is not replaced"
    bench.hear(make_master(phase=master, reason="why"))
    assert (bench.status.phase, bench.status.reason) == (phase, "why")
    assert (bench.holds("Failed"), bench.holds("Complete")) == (
        phase is Phase.FAILED,
        phase is Phase.SUCCEEDED,
    )
    assert bench.status.finished is not None
    ended = {pod_name(KEY.name, Role.WORKER, index) for index in ends}
    assert ended <= bench.cluster.pods.keys(), "their logs can be read"


def test_a_job_succeeds_without_its_master_when_all_workers_have(bench: Bench) -> None:
    bench.master = None
    for index in (1, 0):
        bench.end(index, 0, "Completed")
        assert bench.status.phase is not Phase.SUCCEEDED
    bench.end(2, 1)
    bench.wait(1)
    assert bench.ids() == [3], "the work of a worker that failed is still to be done"
    bench.end(3, 0, "Completed")
    assert bench.status.phase is Phase.SUCCEEDED


def test_the_master_is_replaced(bench: Bench) -> None:
    bench.end(0, 1, role=Role.MASTER)
    bench.wait(1)
    assert bench.ids(Role.MASTER) == [1]
    assert bench.ids() == [0, 1, 2], "the workers go on"


@pytest.mark.parametrize(
    ("hosts", "phase", "reason"),
    [
        (2, Phase.RUNNING, "round 1"),
        (1, Phase.PENDING, "1 workers run, 2 are needed"),
    ],
)
def test_pods_that_cannot_be_placed_wait(hosts: int, phase: Phase, reason: str) -> None:
    bench = Bench(hosts=hosts)
    bench.hear(RUNNING if hosts > 1 else None)
    bench.wait(600)
    assert (bench.ids(), bench.status.replicas) == ([0, 1, 2], hosts)
    assert (bench.status.phase, bench.status.reason) == (phase, reason)
    assert bench.holds("Degraded")
    bench.cluster.hosts = 3
    bench.settle()
    assert (bench.ids(), bench.status.replicas) == ([0, 1, 2], 3)


def test_what_the_master_says_no_more_is_not_shown(bench: Bench) -> None:
    bench.hear(make_master(phase="waiting", reason="too few nodes"))
    bench.hear(make_master(phase="running"))
    assert bench.status.training == make_master(phase="running").training


def test_a_user_scales_a_job(bench: Bench) -> None:
    bench.change(replicas=4)
    assert bench.ids() == [0, 1, 2, 3]
    bench.change(replicas=2)
    assert bench.ids() == [0, 1]


def test_a_suspended_job_saves_before_its_master_goes(bench: Bench) -> None:
    bench.cluster.change(spec=make_spec(suspend=True))
    bench.look()
    assert (bench.ids(), bench.ids(Role.MASTER)) == ([], [0]), "the workers still drain"
    bench.settle()
    assert bench.cluster.pods == {}
    assert bench.status.phase is Phase.SUSPENDED
    bench.change()  # the master that is reached is still the old one's answer
    assert (bench.ids(), bench.status.epoch) == ([3, 4, 5], 1)
    assert "u1-1.json" in str(bench.cluster.pods[pod_name(KEY.name, Role.MASTER, 1)])


def test_a_deleted_job_leaves_nothing(bench: Bench) -> None:
    bench.cluster.change(deleting=True)
    bench.look()
    assert bench.ids(Role.MASTER) == [0]
    bench.settle()
    assert (bench.cluster.job, bench.cluster.pods, bench.cluster.shared) == (None, {}, False)


def test_pods_of_a_lost_node_do_not_keep_a_deleted_job(bench: Bench) -> None:
    bench.cluster.change(deleting=True)
    for seconds in (100, 100, 100, 0, 0, 0, 100, 100, 100):
        bench.look()  # no kubelet does its part
        bench.cluster.now += timedelta(seconds=seconds)
    assert bench.cluster.job is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"replicas": 5}, "5 replicas are not in minReplicas:maxReplicas, 2:4"),
        ({"node_unit": 5}, "no multiple of nodeUnit 5"),
    ],
)
def test_a_spec_that_is_not_valid_fails(spec: dict[str, Any], text: str) -> None:
    bench = Bench(**spec)
    assert bench.status.phase is Phase.FAILED
    assert text in bench.status.reason
    assert bench.cluster.pods == {}


CODES = [(0, "Completed"), (1, "Error"), (75, "Error"), (137, "OOMKilled"), (143, "Error")]


class Everything(RuleBasedStateMachine):
    """Two operators, pods that do as they like, users who change their minds, a clock that jumps.

    An operator is a coroutine that stops at each request: others run before it is answered, and it
    may be killed there. Requests see the present state, as those to an API server do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(make_job(max_replacements=50))
        self.operators: dict[int, Coroutine[None, None, Pass | None]] = {}
        self.master: MasterAnswer | None = None
        self.dropped: set[int] = set()

    async def ask(self, job: ElasticJob, pods: tuple[Pod, ...]) -> MasterAnswer | None:
        return self.master

    def step(self, number: int) -> bool:
        """Let an operator make one request; whether it goes on."""
        if number not in self.operators:
            self.operators[number] = reconcile_once(
                self.cluster, KEY, self.ask, lambda: self.cluster.now
            )
        try:
            self.operators[number].send(None)
        except (StopIteration, ConflictError):
            del self.operators[number]
            return False
        return True

    @rule(number=st.integers(0, 1), steps=st.integers(1, 12))
    def operate(self, number: int, steps: int) -> None:
        for _ in range(steps):
            if not self.step(number):
                break

    @initialize(is_running=st.booleans())
    def begin(self, is_running: bool) -> None:
        for _ in range(4 if is_running else 0):
            while self.step(0):
                pass
            self.cluster.place()

    @rule(steps=st.integers(1, 5), choice=st.integers(0, 9), ending=st.sampled_from(CODES))
    def overtake(self, steps: int, choice: int, ending: tuple[int, str]) -> None:
        """One operator is stopped in the middle of a look, and the other one acts meanwhile."""
        for _ in range(steps):
            if not self.step(0):
                break
        self.end(choice, ending)
        for number in (1, 0):
            while self.step(number):
                pass

    @rule(number=st.integers(0, 1))
    def kill(self, number: int) -> None:
        if number in self.operators:
            self.operators.pop(number).close()

    @rule()
    def place(self) -> None:
        self.cluster.place()

    @rule()
    def sweep(self) -> None:
        self.cluster.sweep()

    @rule(choice=st.integers(0, 9), ending=st.sampled_from(CODES))
    def end(self, choice: int, ending: tuple[int, str]) -> None:
        running = [pod.name for pod in self.cluster.seen() if pod.phase == "Running"]
        if running:
            self.cluster.end(running[choice % len(running)], *ending)

    @rule(choice=st.integers(0, 9), at_once=st.booleans())
    def delete_pod(self, choice: int, at_once: bool) -> None:
        names = list(self.cluster.pods)
        if names:
            self.cluster.delete(names[choice % len(names)], force=at_once)

    @rule(seconds=st.sampled_from([1, 30, 300, -3600]))
    def jump(self, seconds: int) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    @rule(hosts=st.integers(1, 6))
    def change_hosts(self, hosts: int) -> None:
        self.cluster.hosts = hosts

    @rule(number=st.integers(0, 3))
    def lose_host(self, number: int) -> None:
        """No kubelet is there any more to end the pods of a host, which are to be deleted."""
        self.cluster.lost_hosts.add(f"host-{number}")
        for pod in self.cluster.seen():
            if pod.host == f"host-{number}":
                self.cluster.delete(pod.name)

    @rule(suspend=st.booleans(), replicas=st.integers(2, 4))
    def edit(self, suspend: bool, replicas: int) -> None:
        if self.cluster.job is not None:
            spec = msgspec.structs.replace(
                self.cluster.job.spec, suspend=suspend, replicas=replicas
            )
            self.cluster.change(spec=spec)

    @rule(
        epoch=st.integers(0, 1),
        phase=st.sampled_from(["running", "waiting", "lost"]),
        reason=st.sampled_from(["", "why"]),
    )
    def hear_master(self, epoch: int, phase: str, reason: str) -> None:
        self.master = None if phase == "lost" else make_master(epoch, phase=phase, reason=reason)

    @precondition(lambda self: len(self.cluster.written) > 8)
    @rule(outcome=st.sampled_from(["succeeded", "failed"]))
    def finish(self, outcome: str) -> None:
        self.master = make_master(phase=outcome, reason=outcome)

    @precondition(lambda self: len(self.cluster.written) > 12)
    @rule()
    def delete_job(self) -> None:
        if self.cluster.job is not None:
            self.cluster.change(deleting=True)

    @invariant()
    def what_is_remembered_stays(self) -> None:
        for before, after in zip(self.cluster.written, self.cluster.written[1:], strict=False):
            assert after.next_worker >= before.next_worker
            assert after.epoch >= before.epoch
            assert after.master >= before.master
            assert after.replacements >= before.replacements
            assert after.excluded_hosts[: len(before.excluded_hosts)] == before.excluded_hosts
            assert before.phase not in FINISHED or after.phase is before.phase
            self.dropped |= {each.id for each in before.workers} - {
                each.id for each in after.workers
            }
            assert not self.dropped & {each.id for each in after.workers}, "a number came back"
        del self.cluster.written[:-1]

    @invariant()
    def the_list_of_workers_is_sound(self) -> None:
        job = self.cluster.job
        if job is not None:
            ids = [each.id for each in job.status.workers]
            assert sorted(set(ids)) == ids
            assert len(ids) <= 4
            assert all(number < job.status.next_worker for number in ids)

    def teardown(self) -> None:
        """When nothing disturbs them any more, one operator brings all to its end."""
        for steps in self.operators.values():
            steps.close()
        self.operators = {}
        self.cluster.hosts = 12
        for _ in range(60):
            while self.step(0):
                pass
            self.cluster.place()
            self.cluster.sweep()
            self.cluster.now += timedelta(seconds=61)
        job = self.cluster.job
        if job is None:
            assert self.cluster.pods == {}
            assert not self.cluster.shared
            return
        assert not job.deleting
        living = {pod.index for pod in self.cluster.living()}
        if job.status.phase in FINISHED or job.spec.suspend:
            assert living == set()
            assert self.cluster.living(Role.MASTER) == []
        else:
            done = {pod.index for pod in self.cluster.seen() if pod.phase == "Succeeded"}
            listed = {each.id for each in job.status.workers}
            assert living == listed - done
            assert living, "all have succeeded, and so has the job"
            assert len(listed) == job.spec.replicas
            assert [pod.index for pod in self.cluster.living(Role.MASTER)] == [job.status.master]


Everything.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEverything = Everything.TestCase
