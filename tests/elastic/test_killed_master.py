"""A master that is killed at random moments, and started again on its journal."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from remesh.elastic.client import Client
from remesh.elastic.protocol import Beat, Stop
from remesh.elastic.session import Session
from tests.campaigns.settings import dice_of, lengths
from tests.elastic.agents import SETTINGS, SilentAgent, patient_status
from tests.elastic.cluster import MasterProcess

OF_TWO = msgspec.structs.replace(SETTINGS, max_nodes=2)
BUDGET = 1_000_000


class LivingAgent(SilentAgent):
    """An agent that sends heartbeats: a master that has begun anew learns of it by them."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(url, number)
        self.session.end(0.0)
        self.session = Session(Client(url), self._beat, lambda: 0.25)

    def _beat(self) -> Beat:
        return Beat(**self.sender())


def kill_again_and_again(master: MasterProcess, count: int, rng: random.Random) -> None:
    for _ in range(count):
        time.sleep(rng.uniform(0.0, 0.5))
        master.kill()
        master.start()


@pytest.mark.timeout(0)
@lengths("num_kills", 5, 200)
def test_it_knows_what_it_had_said(
    tmp_path: Path, num_kills: int, covered: Callable[[str], None]
) -> None:
    """Each world is formed once, and each failure charged once, whenever it is killed."""
    master = MasterProcess(tmp_path, "--heartbeat-timeout", "600")
    rng = dice_of("killed masters", num_kills)
    killing = threading.Thread(target=kill_again_and_again, args=(master, num_kills, rng))
    agents = [LivingAgent(master.url, number) for number in (0, 1)]
    other, failing = agents
    number = 0
    killing.start()
    try:
        while killing.is_alive() or number == 0:
            number += 1
            for agent in agents:
                agent.session.forget()
                agent.say_join(settings=OF_TWO, max_restarts=BUDGET)
            places = [agent.placed() for agent in agents]
            assert [(place.round, place.node_rank) for place in places] == [
                (number, 0),
                (number, 1),
            ]
            stopped = failing.report(failing.failure(2))
            assert f"{number} of {BUDGET} restarts charged" in stopped.reason
            assert other.shown(Stop).round == number
        status = patient_status(Client(master.url))
        assert (status.round, len(status.failures)) == (number, min(number, 500))
        assert [node.num_charged for node in status.nodes] == [0, number]
        covered(f"{num_kills} kills of the master, {number} worlds")
    finally:
        killing.join()
        for agent in agents:
            agent.session.end(0.0)
        master.kill()
