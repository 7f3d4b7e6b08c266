"""The operator and its jobs on a real API server: docs/how-to/kubernetes.md, end to end."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.kubernetes.operator import JOBS
from remesh.kubernetes.resource import Phase
from tests.elastic.numpy_job import uninterrupted
from tests.kubernetes.bed import HEAD, MISSING, Bed, bed_in
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"no test cluster: set {', '.join(MISSING)}"),
]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    # One test at a time: each has all nodes.
    with Path(tempfile.gettempdir(), "remesh-test-kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with bed_in(tmp_path) as made:
            yield made


def start(bed: Bed, *nodes: str) -> None:
    bed.start_node(HEAD, gpus=0)
    for node in nodes:
        bed.start_node(node)


def finish(bed: Bed, name: str) -> None:
    """Let the training end; its losses are those of an uninterrupted run, and nothing is left."""
    (bed.directory / "stop").touch()
    bed.until(name, "the job succeeds", lambda: bed.job(name).status.phase is Phase.SUCCEEDED)
    bed.assert_losses(uninterrupted(bed.step + 1), rel=1e-6)
    delete(bed, name)


def delete(bed: Bed, name: str) -> None:
    bed.client.delete(JOBS, name)
    wait_until(lambda: not [*bed.client.list(JOBS)], "nothing is left of the job", 200)
    assert bed.pods(name) == []
    assert bed.shared(name) == []


@pytest.mark.slow
def test_a_node_dies_and_another_takes_its_place(bed: Bed) -> None:
    start(bed, "gpu1", "gpu2", "gpu3")
    bed.start_operator()
    bed.submit("train")
    bed.until_trained("train", 0, 1, 2)
    bed.until("train", "it runs", lambda: bed.job("train").status.phase is Phase.RUNNING)
    lost = bed.workers("train")[1]
    bed.kill_node(lost)
    bed.until("train", "two ranks train", lambda: bed.size() == 2)
    bed.start_node("gpu4")
    bed.until_trained("train", 0, 2, 3)
    assert bed.job("train").status.replacements == 0
    bed.start_node(lost)  # so that the pod it had can go
    finish(bed, "train")


@pytest.mark.nightly
def test_masters_operators_workers_and_hosts_fail(bed: Bed) -> None:
    start(bed, "gpu1", "gpu2", "gpu3", "gpu4")
    first = bed.start_operator()
    patterns = bed.directory / "patterns.json"
    patterns.write_text('{"node": ["an error of the user\'s"]}')
    bed.submit("train", failure_patterns=patterns)
    bed.until_trained("train", 0, 1, 2)

    bed.delete_pod("train-master-0")
    bed.until("train", "another master", lambda: bed.pods("train")[0].name == "train-master-1")
    bed.until_trained("train", 0, 1, 2)

    bed.kill_operator(first)
    bed.start_operator()  # as its Deployment does
    bed.end_pod("train-worker-1", out_of_memory=True)
    bed.until_trained("train", 0, 2, 3)
    assert "OOMKilled" in str(bed.events())

    host = bed.workers("train")[2]
    (bed.directory / "fail-1").touch()
    bed.until_trained("train", 0, 3, 4)
    assert [each.host for each in bed.job("train").status.excluded_hosts] == [host]
    assert host not in bed.workers("train").values()
    assert "an error of the user's" in str(bed.job("train").status.failures)
    finish(bed, "train")


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["indexed-job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_workers_of_a_job_without_the_operator(bed: Bed, example: str) -> None:
    start(bed, "gpu1", "gpu2", "gpu3")
    (bed.directory / "token").write_text("a token of the test")
    bed.apply_example("master.yaml")
    bed.apply_example(example)
    wait_until(lambda: bed.size() == 3, "three ranks train", 240)
    bed.end_pod("run")
    wait_until(lambda: bed.num_ended("failed") == 1, "a worker fails", 240)
    step = bed.step

    wait_until(lambda: bed.size() == 3 and bed.step > step + 3, "three ranks train again", 240)
    (bed.directory / "stop").touch()
    wait_until(lambda: bed.num_ended("succeeded") == 3, "the Job is complete", 240)
    losses = bed.losses()
    assert sorted(losses) == list(range(len(losses)))
