"""An agent whose processes are done ends as the job does, however long another node works."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from remesh.elastic.lifecycle import EXIT_DRAINED, EXIT_JOB_FAILED
from tests.elastic.cluster import Cluster

pytestmark = pytest.mark.timeout(600)

WORKS = """
import os, sys, time
from pathlib import Path

code = Path(sys.argv[1], "code")
while os.environ["RANK"] == "0" and not code.exists():
    time.sleep(0.01)
sys.exit(int(code.read_text()) if os.environ["RANK"] == "0" else 0)
"""
"""Rank 1 is done at once; rank 0 works until it is given its exit code."""


class Pair(Cluster):
    """Two nodes, of which one has finished."""

    def __init__(self, directory: Path, *agent: str) -> None:
        (directory / "works.py").write_text(WORKS)
        super().__init__(directory, "2:2", agent=("--max-restarts", "0", *agent))
        self.start(0, 1)
        self.until(lambda: [node.state for node in self.status().nodes] == ["active", "finished"])

    def command(self, number: int) -> list[str]:
        """As usual, but for the script."""
        usual = super().command(number)
        options = [*usual[: usual.index("--drain-seconds")], *self._agent_options]
        return [*options, str(self.directory / "works.py"), str(self.directory)]

    def end_work(self, code: int) -> None:
        """Let the node that works end with a code."""
        beside = self.directory / "code.new"
        beside.write_text(str(code))
        beside.rename(self.directory / "code")


@pytest.mark.parametrize(("code", "phase"), [(0, "succeeded"), (3, "failed")])
def test_a_node_that_has_finished_ends_as_the_job_does(
    tmp_path: Path, code: int, phase: str
) -> None:
    with Pair(tmp_path) as cluster:
        cluster.end_work(code)
        ends = [cluster.exit_code(number) for number in (0, 1)]
        assert ends == [EXIT_JOB_FAILED if code else 0] * 2
        assert cluster.status().phase == phase


def test_without_an_answer_of_the_master_the_end_is_not_known(tmp_path: Path) -> None:
    with Pair(tmp_path, "--master-patience", "3") as cluster:
        cluster.master.kill()
        assert cluster.exit_code(1) == EXIT_JOB_FAILED
        # The master may have died before the agent knew that it has its message, or after.
        said = "how the job ends is not known: .*(has not answered|does not answer)"
        assert re.search(said, (tmp_path / "node-1.log").read_text())


def test_a_node_that_is_excluded_by_hand_says_why_and_leaves_at_sigterm(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:2") as cluster:
        cluster.start(0, 1)
        before = cluster.until_trained(0, 1)
        cluster.client.set_node("1", is_used=False, reason="its fan is broken")
        cluster.until_trained(0, round_after=before)
        said = "node 1 waits: an operator has excluded it: its fan is broken"
        cluster.until(lambda: said in (tmp_path / "node-1.log").read_text())
        cluster.agents[1].send_signal(signal.SIGTERM)
        assert cluster.exit_code(1) == EXIT_DRAINED
        said = "the node is drained: SIGTERM, it waited for a round"
        assert said in (tmp_path / "node-1.log").read_text()
        history = [line.text for line in cluster.status().history]
        assert "node 1 leaves, drained: SIGTERM, it waited for a round" in history
        cluster.stop(0)


def test_sigterm_ends_a_node_that_waits_for_the_end(tmp_path: Path) -> None:
    with Pair(tmp_path) as cluster:
        cluster.agents[1].send_signal(signal.SIGTERM)
        assert cluster.exit_code(1) == EXIT_DRAINED
        cluster.end_work(0)
        assert cluster.exit_code(0) == 0
        assert cluster.status().phase == "succeeded"
