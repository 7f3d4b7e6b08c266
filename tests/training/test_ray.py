"""examples/ray_train.py on a real Ray cluster of two nodes: docs/how-to/ray.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="pip install 'ray[train]'")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head, where no worker fits, and two nodes with room for one worker each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # a busy machine would never come to them
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield made
    made.shutdown()


def add(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=80_000_000)


def test_a_node_dies_and_another_joins(cluster: Any, tmp_path: Path) -> None:
    nodes = [add(cluster), add(cluster)]
    log = tmp_path / "log"
    command = [sys.executable, str(EXAMPLE), "--storage", str(tmp_path / "results")]
    command += ["--workers", "1", "--most-workers", "2", "--steps", "1000000"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with log.open("wb") as output:
        driver = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def resumed() -> list[tuple[int, int]]:
        """World size and step of each start of a rank 0."""
        found = re.findall(r"rank 0 of (\d) goes on after step (\d+)", log.read_text())
        return [(int(size), int(step)) for size, step in found]

    def until(what: str, size: int) -> int:
        """Wait for a newer world of a size; the step after which it goes on."""

        def holds() -> bool:
            assert driver.poll() is None, log.read_text()[-5000:]
            return len(resumed()) > before and resumed()[-1][0] == size

        wait_until(holds, what, 400)
        return resumed()[-1][1]

    def until_saved(after: int) -> None:
        roots = (tmp_path / "results" / "first" / "checkpoints").glob
        wait_until(
            lambda: any(int(each.parent.name[5:]) > after for each in roots("step_*/remesh.json")),
            "a checkpoint",
            400,
        )

    try:
        before = 0
        until("two workers train", 2)
        until_saved(10)
        before = len(resumed())
        cluster.remove_node(nodes[1], allow_graceful=False)
        shrunk = until("one worker goes on", 1)
        assert shrunk >= 10
        until_saved(shrunk + 10)
        before = len(resumed())
        add(cluster)
        assert until("two workers go on", 2) >= shrunk + 10
    finally:
        driver.kill()
        driver.wait()
