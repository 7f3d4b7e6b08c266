"""Agents that die, and agents whose connections only break."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from remesh.elastic.presence import BEAT_SECONDS, CONFIRM_SECONDS, Presence
from tests.elastic.cluster import Cluster

LATE = BEAT_SECONDS + CONFIRM_SECONDS


def test_a_death_is_confirmed_when_the_next_heartbeat_is_overdue() -> None:
    presence = Presence()
    presence.hear(1, "a", 0.0)
    presence.hear(2, "a", 0.5, pause=0.2)
    presence.close(1, 0.6, by_peer=True)
    assert not presence.is_dead("a", 99.0)  # it has another connection
    presence.close(2, 100.0, by_peer=True)
    assert not presence.is_dead("a", 100.0 + CONFIRM_SECONDS)
    assert presence.is_dead("a", 100.1 + CONFIRM_SECONDS)
    assert not presence.is_dead("another", 200.0)


def test_a_restart_of_the_master_is_no_death() -> None:
    presence = Presence()
    presence.close(1, 0.0, by_peer=True)  # of the time before
    assert not presence.is_dead("a", 99.0)


class Agents(RuleBasedStateMachine):
    """Agents that speak in time while they live, on connections that break in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.presence = Presence()
        self.now = 0.0
        self.number = 0
        self.spoke: dict[str, float] = {}
        self.open: dict[str, set[int]] = {}
        self.died: dict[str, float] = {}

    names = st.sampled_from(["a", "b", "c"])

    @initialize()
    def begin(self) -> None:
        for name in ("a", "b", "c"):
            self.open[name] = set()
            self._speak(name)

    def _speak(self, name: str, number: int | None = None) -> None:
        if number is None:
            self.number += 1
            number = self.number
        self.open[name].add(number)
        self.spoke[name] = self.now
        self.presence.hear(number, name, self.now, BEAT_SECONDS)

    def _close(self, name: str, *, by_peer: bool) -> None:
        for number in self.open[name]:
            self.presence.close(number, self.now, by_peer=by_peer)
        self.open[name] = set()

    @rule(name=names, fresh=st.booleans())
    def speak(self, name: str, fresh: bool) -> None:
        if name not in self.died:
            numbers = self.open[name]
            self._speak(name, None if fresh or not numbers else min(numbers))

    @rule(name=names, by_peer=st.booleans())
    def break_connections(self, name: str, by_peer: bool) -> None:
        self._close(name, by_peer=by_peer)

    @rule(name=names)
    def break_one(self, name: str) -> None:
        if self.open[name]:
            self.presence.close(self.open[name].pop(), self.now, by_peer=True)

    @rule(name=names)
    @precondition(lambda self: len(self.died) < 2)
    def die(self, name: str) -> None:
        if name not in self.died and self.open[name]:
            self.died[name] = self.now
            self._close(name, by_peer=True)

    @rule(seconds=st.floats(0.0, LATE))
    def wait(self, seconds: float) -> None:
        """Time passes; agents that live speak before they are overdue."""
        ends = self.now + seconds
        for name, at in self.spoke.items():
            if name not in self.died and ends - at > BEAT_SECONDS:
                self.now = max(self.now, at + BEAT_SECONDS)
                self._speak(name)
        self.now = max(self.now, ends)

    @rule(seconds=st.floats(0.0, 60.0))
    def stop_the_master(self, seconds: float) -> None:
        """It hears nothing meanwhile, and does not count the time."""
        self.now += seconds
        self.presence.postpone(seconds)
        self.spoke = {name: at + seconds for name, at in self.spoke.items()}
        self.died = {name: at + seconds for name, at in self.died.items()}

    @invariant()
    def only_the_dead_are_dead(self) -> None:
        for name in self.spoke:
            is_dead = self.presence.is_dead(name, self.now)
            if name not in self.died:
                assert not is_dead
            elif self.now - self.died[name] > LATE + 1e-6:
                assert is_dead


TestAgents = Agents.TestCase
TestAgents.settings = settings(deadline=None)


@pytest.mark.timeout(600)
def test_the_death_of_an_agent_is_news(tmp_path: Path) -> None:
    """A node whose agent is killed is lost long before it would be by its silence."""
    with Cluster(tmp_path, "1:2", silence=100_000) as cluster:
        cluster.start(0, 1)
        before = cluster.until_trained(0, 1)
        cluster.kill_agent(1)
        cluster.until_trained(0, round_after=before)
        texts = [line.text for line in cluster.status().history]
        assert any("its connections are closed" in text for text in texts)
        before = cluster.status().round
        cluster.kill_master()
        cluster.start_master()  # all connections break, and no agent has died
        cluster.until_step(cluster.step + 20)
        assert cluster.status().round == before
        cluster.stop(0)
