"""Agents that die, and agents whose connections only break."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from remesh.elastic.job import JobState, NodeLost, Policy
from remesh.elastic.liveness import (
    BEAT_SECONDS,
    CONFIRM_SECONDS,
    Liveness,
    events_of_time,
    extend_deadlines,
    on_beat,
    on_end_of_session,
    on_failures,
    on_message,
)
from remesh.elastic.nodes import Settings
from remesh.elastic.protocol import Beat, ReportFailures
from tests.elastic.agents import failure_of
from tests.elastic.cluster import Cluster
from tests.elastic.played_job import PlayedJob
from tests.elastic.test_scenarios import assert_same_run

LATE = BEAT_SECONDS + CONFIRM_SECONDS


def nobody() -> Liveness:
    return Liveness.after_start(JobState(policy=Policy()), 0.0)


def test_a_death_is_confirmed_when_the_next_heartbeat_is_overdue() -> None:
    live = nobody()
    on_message(live, "a", 0.0, session=1)
    on_message(live, "a", 0.5, session=2, pause=0.2)
    on_end_of_session(live, 1, "a", 0.6, by_peer=True)
    assert not live.agents["a"].is_dead(99.0)  # it has another session
    on_end_of_session(live, 2, "a", 100.0, by_peer=True)
    assert not live.agents["a"].is_dead(100.0 + CONFIRM_SECONDS)
    assert live.agents["a"].is_dead(100.1 + CONFIRM_SECONDS)


def test_a_restart_of_the_master_is_no_death() -> None:
    live = nobody()
    on_end_of_session(live, 1, "a", 0.0, by_peer=True)  # of the time before
    assert not live.agents


@pytest.mark.parametrize("how", ["goes on", "failed"])
def test_a_lost_peer_is_that_of_the_ended_session(how: str) -> None:
    policy, settings = Policy(heartbeat_timeout=100.0), Settings(min_nodes=1, max_nodes=2)
    played = PlayedJob(JobState(policy=policy), settings)
    job = played.join(0, at=0.0, agent="0").join(1, at=0.0, agent="1").state
    live, this_round = Liveness.after_start(job, 0.0), job.round
    for node in (0, 1):
        on_message(live, str(node), 0.0, session=node)
    own: dict[str, Any] = {"node_id": 0, "incarnation": "0"}

    def fails(text: str, round_of_node: int, exit_code: int = 1) -> None:
        failure = failure_of(0, round=round_of_node, exit_code=exit_code, message=text)
        on_failures(live, job, ReportFailures(**own, round=round_of_node, failures=(failure,)))

    def says(round_of_node: int, *, lost_peer: bool) -> None:
        if how == "goes on":
            on_beat(live, job, Beat(**own, round=round_of_node, lost_peer=lost_peer), 1.0)
        else:
            fails("Connection reset by peer" if lost_peer else "ValueError", round_of_node)

    on_end_of_session(live, 1, "1", 1.0, by_peer=True)
    says(this_round - 1, lost_peer=True)  # of another world
    says(this_round, lost_peer=False)
    fails("", this_round, exit_code=-signal.SIGTERM)  # it was stopped
    assert events_of_time(live, job, 1.0) == []
    says(this_round, lost_peer=True)
    lost = NodeLost(node_id=1, incarnation="1", is_closed=True)
    assert events_of_time(live, job, 1.0) == [lost]
    on_message(live, "1", 1.0, session=7)  # it lives and has connected again
    assert events_of_time(live, job, 1.0) == []


class Agents(RuleBasedStateMachine):
    """Agents that speak in time while they live, in sessions that break in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.live = nobody()
        self.now = 0.0
        self.number = 0
        self.spoke: dict[str, float] = {}
        self.session: dict[str, int | None] = {}
        self.old: list[tuple[int, str]] = []
        self.died: dict[str, float] = {}

    names = st.sampled_from(["a", "b", "c"])

    @initialize()
    def begin(self) -> None:
        for name in ("a", "b", "c"):
            self.session[name] = None
            self._speak(name)

    def _speak(self, name: str, *, fresh: bool = False) -> None:
        number = self.session[name]
        if number is None or fresh:
            if number is not None:
                self.old.append((number, name))
            self.number += 1
            number = self.session[name] = self.number
        self.spoke[name] = self.now
        on_message(self.live, name, self.now, session=number, pause=BEAT_SECONDS)

    def _close(self, name: str, *, by_peer: bool) -> None:
        number = self.session[name]
        if number is not None:
            on_end_of_session(self.live, number, name, self.now, by_peer=by_peer)
        self.session[name] = None

    @rule(name=names, fresh=st.booleans())
    def speak(self, name: str, fresh: bool) -> None:
        if name not in self.died:
            self._speak(name, fresh=fresh)

    @rule(name=names, by_peer=st.booleans())
    def break_session(self, name: str, by_peer: bool) -> None:
        self._close(name, by_peer=by_peer)

    @precondition(lambda self: self.old)
    @rule(data=st.data(), by_peer=st.booleans())
    def learn_late_that_an_old_one_has_ended(self, data: st.DataObject, by_peer: bool) -> None:
        number, name = self.old.pop(data.draw(st.integers(0, len(self.old) - 1)))
        on_end_of_session(self.live, number, name, self.now, by_peer=by_peer)

    @rule(name=names)
    @precondition(lambda self: len(self.died) < 2)
    def die(self, name: str) -> None:
        if name not in self.died and self.session[name] is not None:
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
        extend_deadlines(self.live, seconds)
        self.spoke = {name: at + seconds for name, at in self.spoke.items()}
        self.died = {name: at + seconds for name, at in self.died.items()}

    @invariant()
    def only_the_dead_are_dead(self) -> None:
        for name in self.spoke:
            is_dead = self.live.agents[name].is_dead(self.now)
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
        cluster.master.kill()
        cluster.until_step(cluster.step + 10)  # the training goes on without it
        cluster.master.start()  # all sessions have broken, and no agent has died
        cluster.until_step(cluster.step + 10)
        assert cluster.status().round == before
        cluster.stop(0)
        assert_same_run(cluster)
