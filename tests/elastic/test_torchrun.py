"""An unchanged torchrun whose worlds a remesh master forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.cluster import SILENCE_OF_THE_DEAD, TORCHRUN, TRAIN, Cluster, kill
from tests.elastic.fsdp_job import uninterrupted

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


class Torchrun(Cluster):
    """Nodes whose agents are torchrun's."""

    def command(self, number: int) -> list[str]:
        """What starts the agent of a node."""
        options = f"node_id={number},last_call=2,beat_seconds=0.3,join_timeout=300"
        return [
            *(TORCHRUN, "--rdzv-backend=remesh", f"--rdzv-endpoint={self.url}"),
            # torchrun charges a node whose processes fail because others have been stopped.
            *("--nnodes=1:2", "--max-restarts=20", f"--rdzv-conf={options}"),
            *("--local-addr=127.0.0.1", "-m", "remesh.elastic.script"),
            *(str(TRAIN), str(self.directory), "fsdp", "0.05"),
        ]

    def kill_node(self, number: int) -> None:
        """SIGKILL an agent and the processes that it started, which torchrun does not tie to it."""
        agent = self.agents[number].pid
        workers = [entry["pid"] for entry in self.said("start") if entry["parent"] == agent]
        self.kill_agent(number)
        del self.agents[number]
        for pid in set(workers) & set(self.workers()):
            kill(pid)

    def places(self, size: int) -> dict[int, int]:
        """The rank of each node in the newest world of a size that has made a step."""
        numbers = {agent.pid: number for number, agent in self.agents.items()}
        nodes = {one["pid"]: numbers.get(one["parent"]) for one in self.said("start")}
        made = [(nodes[one["pid"]], one) for one in self.said("step") if one["size"] == size]
        return {number: one["rank"] for number, one in made if number is not None}


def test_the_world_shrinks_and_grows_with_a_master_that_is_started_again(
    tmp_path: Path,
) -> None:
    grace = ("--save-grace", "1")
    with Torchrun(tmp_path, "1:2", silence=SILENCE_OF_THE_DEAD, master=grace) as cluster:
        cluster.start(7, 3)
        cluster.until(lambda: cluster.places(2) == {3: 0, 7: 1})
        cluster.master.kill()
        cluster.master.start()
        assert cluster.status().round == 1, "the world goes on"
        cluster.kill_node(3)  # the one with rank 0, whose launcher has the store
        cluster.until(lambda: cluster.places(1) == {7: 0})
        cluster.start(4)
        cluster.until(lambda: cluster.places(2) == {4: 0, 7: 1})
        cluster.stop(4, 7)
        assert cluster.status().phase == "succeeded"
        assert sorted(entry["rank"] for entry in cluster.said("end")) == [0, 1]
        cluster.assert_losses(uninterrupted(cluster.step + 1))
