"""The job's machine, with heartbeats and answers, under everything that can happen."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remesh.elastic.job import (
    CheckpointSaved,
    Event,
    HangDetected,
    JobState,
    NodeHeld,
    Tick,
    apply,
    concerns_all,
    content_of,
    stop_reason,
)
from remesh.elastic.journal import Journal
from remesh.elastic.liveness import (
    Liveness,
    events_of_time,
    has_living_agent,
    is_over,
    on_beat,
    on_message,
    on_stacks,
)
from remesh.elastic.nodes import Outcome
from remesh.elastic.progress import RankProgress, TrainingProgress
from remesh.elastic.protocol import (
    Assignment,
    Beat,
    Content,
    Drain,
    JobEnded,
    Leave,
    NodeTest,
    ReportFailures,
    ReportStacks,
    ReportTest,
    Sender,
    Stop,
    TestResult,
    Waiting,
)
from remesh.elastic.status import status_of
from tests.elastic.agents import failure_of
from tests.elastic.played_job import COLLATERAL, NEW, POLICY, SETTINGS, PlayedJob, joining


@dataclass(slots=True)
class Agent:
    """An agent that behaves: it knows only what it was told."""

    id: int
    incarnation: str
    round: int = 0
    runs: bool = False
    waits: bool = False

    @property
    def sender(self) -> Sender:
        return Sender(node_id=self.id, incarnation=self.incarnation, round=self.round)


def without_text(content: Content) -> object:
    """What a node has to do; the reason may be one that was true before."""
    return msgspec.structs.replace(content, reason="") if hasattr(content, "reason") else content


class Jobs(RuleBasedStateMachine):
    """Agents that join, beat, fail, leave and die; a network that loses, repeats and reorders.

    The clock jumps, and the master is killed and started again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState(policy=POLICY)
        self.now = 1000.0
        self.live = Liveness.after_start(self.state, self.now)
        self.journal = Journal(":memory:")
        self.agents: dict[int, Agent] = {}
        self.num_started = 0
        self.sent: list[Event] = []
        self.failures: set[tuple[int, int]] = set()

    def deliver(self, event: Event) -> None:
        """Apply an event; nodes that have not sent it are shown what follows if it concerns all."""
        before, others = self.state, self.all_but(getattr(event, "node_id", None))
        self.state = apply(before, event, self.now)
        old, new = before, self.state
        assert new.round in (old.round, old.round + 1)
        assert new.round != old.round or new.world == old.world
        if concerns_all(before, self.state):
            return
        assert others == self.all_but(getattr(event, "node_id", None)), event

    def all_but(self, sender: int | None) -> dict[int, object]:
        """What other nodes than a sender have to do, without the texts."""
        return {
            number: without_text(self.shown_to(agent))
            for number, agent in self.agents.items()
            if number != sender
        }

    def send(self, event: Event) -> None:
        self.sent.append(event)
        self.deliver(event)

    def ask_to_join(self, agent: Agent, *, answered: bool) -> None:
        on_message(self.live, agent.incarnation, self.now)
        own: dict[str, Any] = {"after_round": agent.round, "max_restarts": 1_000_000}
        self.send(joining(agent.id, agent.incarnation, **own))
        if not answered:
            return
        match self.shown_to(agent):
            case Assignment(round=number) if number > agent.round:
                agent.round, agent.runs = number, True
            case Stop(round=number) if number > agent.round:
                agent.round = number  # it was over before the agent had entered it
            case NodeTest(check=check, test_round=number):
                passed = TestResult(passed=True, broken=False)
                self.send(ReportTest(**agent.sender, check=check, test_round=number, result=passed))
            case other:
                assert isinstance(other, Waiting), f"a healthy node is shown {other}"

    def shown_to(self, agent: Agent) -> Content:
        return content_of(self.state, agent.sender)

    def beat(self, agent: Agent, *, answered: bool) -> None:
        report = RankProgress(step=int(self.now), time=0.0, waits=agent.waits)
        request = Beat(**agent.sender, ranks={agent.id: report} if agent.runs else {})
        on_message(self.live, agent.incarnation, self.now)
        for event in on_beat(self.live, self.state, request, self.now):
            self.deliver(event)
        content = self.shown_to(agent)
        assert isinstance(content, Assignment | Stop | Waiting)
        goes_on = isinstance(content, Assignment) and content.round == agent.round
        if answered and not goes_on:
            agent.runs = False
        agent.waits = answered and isinstance(content, Assignment) and content.grow

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for event in events_of_time(self.live, self.state, self.now):
            self.deliver(event)
        self.deliver(Tick())

    def draw_agent(self, data: st.DataObject) -> Agent:
        return self.agents[data.draw(st.sampled_from(sorted(self.agents)))]

    @rule(number=st.integers(0, 6))
    def an_agent_starts(self, number: int) -> None:
        self.num_started += 1
        self.agents[number] = Agent(number, str(self.num_started))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def an_agent_dies(self, data: st.DataObject) -> None:
        del self.agents[self.draw_agent(data).id]

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def an_agent_leaves(self, data: st.DataObject) -> None:
        agent = self.draw_agent(data)
        del self.agents[agent.id]
        self.send(Leave(**agent.sender, outcome=Outcome.DRAINED, reason="SIGTERM"))

    def speak(self, agent: Agent, *, answered: bool) -> None:
        if agent.runs:
            self.beat(agent, answered=answered)
        else:
            self.ask_to_join(agent, answered=answered)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), answered=st.booleans())
    def an_agent_speaks(self, data: st.DataObject, answered: bool) -> None:
        self.speak(self.draw_agent(data), answered=answered)

    @rule()
    def all_agents_speak(self) -> None:
        for agent in self.agents.values():
            self.speak(agent, answered=True)

    @precondition(lambda self: any(agent.runs for agent in self.agents.values()))
    @rule(data=st.data(), own=st.booleans())
    def a_process_fails(self, data: st.DataObject, own: bool) -> None:
        running = [number for number, agent in self.agents.items() if agent.runs]
        agent = self.agents[data.draw(st.sampled_from(running))]
        code, message = (-9, "") if own else (1, COLLATERAL)
        failure = failure_of(agent.id, round=agent.round, exit_code=code, message=message)
        self.failures.add((agent.id, agent.round))
        self.send(ReportFailures(**agent.sender, failures=(failure,)))
        agent.runs = False

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), seconds=st.floats(0, 30))
    def a_node_has_to_go(self, data: st.DataObject, seconds: float) -> None:
        agent = self.draw_agent(data)
        self.send(Drain(**agent.sender, seconds=seconds, reason="SIGTERM"))

    @rule(number=st.integers(0, 6), is_used=st.booleans())
    def an_operator_excludes_or_readmits(self, number: int, is_used: bool) -> None:
        self.deliver(NodeHeld(number, None if is_used else "its fan"))

    @rule(step=st.integers(0, 100))
    def a_checkpoint_is_made(self, step: int) -> None:
        self.send(CheckpointSaved(step))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_old_message_arrives(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.sent)))

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(seconds=st.floats(0, 1e6))
    def the_clock_jumps(self, seconds: float) -> None:
        """Forwards, while the master is stopped; `SteadyClock` never goes back."""
        self.now += seconds

    @rule(tests_nodes=st.booleans())
    def the_master_is_killed_and_started_again(self, tests_nodes: bool) -> None:
        self.journal.write(self.state, self.now)
        policy = msgspec.structs.replace(POLICY, check=tests_nodes)
        loaded, _ = self.journal.load(policy)
        assert loaded == msgspec.structs.replace(self.state, policy=policy)
        self.state = loaded
        self.live = Liveness.after_start(self.state, self.now)

    @invariant()
    def nobody_healthy_is_excluded(self) -> None:
        assert self.state.excluded == {}
        for agent in self.agents.values():
            assert agent.incarnation not in self.state.replaced

    @invariant()
    def worlds_are_as_the_settings_say(self) -> None:
        nodes = self.state
        ids = [member.id for member in nodes.world]
        assert ids == sorted(set(ids))
        assert len(ids) == SETTINGS.fitting(len(ids))
        assert nodes.active.keys() <= set(ids) - nodes.ready.keys()

    @invariant()
    def a_world_forms_when_the_nodes_are_there(self) -> None:
        nodes = self.state
        if not nodes.active and SETTINGS.fitting(len(nodes.usable)):
            later = apply(nodes, Tick(), self.now + 1000)
            assert later.round == nodes.round + 1
            assert later.active
            assert not later.active.keys() & nodes.held.keys()

    @invariant()
    def members_are_told_that_the_world_is_broken(self) -> None:
        nodes = self.state
        for number in nodes.active if len(nodes.active) < len(nodes.world) else ():
            told = stop_reason(nodes, number, nodes.round)
            assert told is not None

    @invariant()
    def each_failure_that_was_reported_is_charged_once_at_most(self) -> None:
        for number, charged in self.state.charges.items():
            assert charged <= sum(node_id == number for node_id, _ in self.failures)

    def teardown(self) -> None:
        """Whatever has happened, agents that go on behaving meet in one world."""
        for number in [*self.state.held]:
            self.deliver(NodeHeld(number, None))
        for _ in range(60):
            self.pass_time(1.0)
            self.all_agents_speak()
        size = SETTINGS.fitting(len(self.agents))
        running = [agent for agent in self.agents.values() if agent.runs]
        assert len(running) == size
        if size:
            world = self.state
            assert {agent.round for agent in running} == {world.round}
            assert [node.id for node in world.world] == sorted(agent.id for agent in running)
        self.journal.close()


TestJobs = Jobs.TestCase
TestJobs.settings = hypothesis_settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_rounds_that_only_the_nodes_remember_are_counted() -> None:
    known = PlayedJob()
    job = known.after(joining(0, after_round=7), joining(1, after_round=7), at=1.0)
    assert "node 0 comes from round 7, the journal knows only 0 rounds" in job.state.history[1].text
    job = job.after(at=100.0)
    assert (job.state.round, len(job.state.world)) == (8, 2)
    # An old copy of the journal, in which the world of an earlier round is active.
    job = PlayedJob.running().after(joining(0, after_round=5), joining(1, after_round=5), at=200.0)
    assert (job.state.round, set(job.state.active)) == (6, {0, 1})
    worlds = re.findall("^round .*", job.history, re.MULTILINE)
    assert worlds == ["round 1: nodes 0, 1", "round 6: nodes 0, 1"]


def test_a_world_whose_ranks_all_wait_grows_without_a_checkpoint() -> None:
    job = PlayedJob.running().join(2, 3, at=200.0, new=True)
    live = Liveness.after_start(job.state, 200.0)
    shown = []
    for now, waits in ((201.0, [False, False]), (202.0, [True, False]), (203.0, [True, True])):
        for number in (0, 1):
            ranks = {number: RankProgress(step=5, time=0.0, waits=waits[number])}
            job = job.beat(live, ranks, at=now, node=number)
            shown.append(job.shown(number, at=now))
    for content in shown[:5]:
        assert isinstance(content, Assignment)
        assert (content.save, content.grow) == (True, True)
    assert isinstance(shown[5], Stop)
    assert shown[5].reason == "nodes 2, 3 can join, the world grows to 4"


def test_each_growth_waits_for_a_save_of_its_own() -> None:
    job = PlayedJob.running().join(2, 3, at=200.0, new=True)
    assert saves(job, 201.0) == (True, True)
    for number in (2, 3):  # they go before the ranks have saved
        job = job.lose(number, at=202.0)
    assert saves(job, 203.0) == (False, False)
    job = job.after(at=300.0).join(2, 3, at=301.0, new=True)
    assert saves(job, 302.0) == (True, True)


def test_a_world_that_a_node_has_to_leave_changes_when_all_ranks_have_saved_and_wait() -> None:
    job = PlayedJob.running(4).hold(3, at=200.0)
    live = Liveness.after_start(job.state, 200.0)
    # The node takes its memory along. A checkpoint of an earlier step loses those after it.
    for saved, waits, goes_on in (
        (None, True, True),
        (4, True, True),
        (5, False, True),
        (5, True, False),
    ):
        last = RankProgress(step=5, time=0.0, saved_step=saved, waits=waits)
        done = msgspec.structs.replace(last, saved_step=5, waits=True)
        for number in range(4):
            ranks = {number: last if number == 0 else done}
            job = job.beat(live, ranks, at=201.0, node=number)
        assert isinstance(job.shown(1, at=202.0), Assignment) == goes_on


def test_a_node_that_runs_another_command_is_in_the_history() -> None:
    job = PlayedJob().after(joining(0, command="train.py --lr 1"), at=1.0)
    other = joining(1, command="train.py --lr 2")
    job = job.after(other, joining(2), joining(3, command="train.py --lr 1"), other, at=2.0)
    text = "another command than the job began with: train.py --lr 2, which was train.py --lr 1"
    assert re.findall("^.* command .*", job.history, re.MULTILINE) == [f"node 1 runs {text}"]


def test_the_budget_of_a_node_is_said_and_ends() -> None:
    job = PlayedJob.running(max_restarts=1).fail(0, at=200.0)
    assert job.status(at=201.0).max_restarts == 1
    assert job.history.startswith("restart budget: 1 restarts per node\n")
    assert "; 1 of 1 restarts charged to its node" in job.history
    nodes = job.join(0, 1, at=200.0).fail(0, at=1e9).state
    assert nodes.outcome is Outcome.FAILED
    assert "no restart left: 1 of 1 restarts charged to its node" in nodes.reason


def test_hangs_have_a_budget_of_their_own() -> None:
    job = PlayedJob.running(max_restarts=1).fail(0, at=150.0).join(0, 1, at=150.0)
    for number, now in ((2, 200.0), (3, 350.0)):
        hang = HangDetected(number, "no rank has finished a step")
        job = job.after(hang, at=now)
        assert (job.state.outcome is None) == (number < 3)
        job = job.join(0, 1, at=now)


def test_a_round_that_never_makes_a_step_hangs() -> None:
    job = PlayedJob.running().state
    known = TrainingProgress(began=0.0, moved=100.0, last_step=9, round_step=9, recent=(1.0,))
    live = Liveness.after_start(msgspec.structs.replace(job, progress=known), 200.0)
    live.recorded_at = 11_000.0
    for node in range(2):
        on_message(live, "a", 11_000.0)
        on_beat(live, job, Beat(node_id=node, incarnation="a", round=1, ranks={}), 11_000.0)
    assert events_of_time(live, job, 11_000.0) == []
    reason = "no rank has finished a step for 10801 s"
    assert events_of_time(live, job, 11_001.0) == [HangDetected(1, reason)]


def test_only_a_world_that_hangs_is_asked_for_its_stacks() -> None:
    hung = PlayedJob.running(max_restarts=1).after(HangDetected(1, "no step"), at=150.0)
    assert hung.after(HangDetected(1, "no step"), at=151.0).state.hang_charges == 1
    stop = hung.shown(0, at=151.0)
    assert isinstance(stop, Stop)
    assert stop.hangs
    again = hung.join(0, 1, at=152.0)
    assert again.after(HangDetected(1, "no step"), at=153.0).state.broken is None
    stop = again.fail(0, at=153.0).shown(1, at=153.0)
    assert isinstance(stop, Stop)
    assert not stop.hangs
    ended = again.after(HangDetected(2, "no step"), at=300.0).shown(0, at=300.0)
    assert isinstance(ended, JobEnded)
    assert ended.hangs


def test_stacks_of_an_earlier_hang_are_not_added_to_those_of_the_last() -> None:
    live = Liveness.after_start(NEW, 0.0)
    for number, stacks in ((2, {0: "new"}), (1, {1: "old"}), (2, {2: "new"})):
        own: dict[str, Any] = {"node_id": 0, "incarnation": "a", "round": number}
        on_stacks(live, ReportStacks(**own, stacks=stacks))
    assert live.stacks == {0: "new", 2: "new"}


def test_the_id_of_an_agent_that_never_comes_back_is_free_after_the_timeout() -> None:
    """As when it died while the master was away."""
    job = PlayedJob.running().state
    live = Liveness.after_start(job, 200.0)
    assert has_living_agent(live, job, 0, "new", 205.0) is None
    assert has_living_agent(live, job, 0, "new", 211.0) is False


def test_heartbeats_count_of_members_in_the_newest_round() -> None:
    job, ranks = PlayedJob.running(), {0: RankProgress(step=5, time=0.0, saved_step=5)}
    live = Liveness.after_start(job.state, 100.0)
    for node, number in ((0, 0), (2, 1)):
        beat = Beat(node_id=node, incarnation="a", round=number, ranks=ranks)
        assert on_beat(live, job.state, beat, 101.0) == []
    assert live.ranks == {}


def test_the_save_at_the_end_is_heard_after_the_node_has_finished() -> None:
    job = PlayedJob.running()
    live = Liveness.after_start(job.state, 100.0)
    last = RankProgress(step=5, time=0.0, saved_step=4)
    job = job.beat(live, {0: last}, at=101.0)
    job = job.leave(0, 1, outcome=Outcome.SUCCEEDED, at=102.0)
    job = job.beat(live, {0: msgspec.structs.replace(last, saved_step=5)}, at=102.0)
    assert (job.state.outcome, job.state.saved_step) == (Outcome.SUCCEEDED, 5)


def test_failures_that_a_node_says_again_after_it_has_joined_are_charged_once() -> None:
    """In each new session, until it is in another world: then records of long ago may be gone."""
    settings = msgspec.structs.replace(SETTINGS, max_nodes=2)
    job = PlayedJob.running(settings=settings, max_restarts=1).fail(1, at=110.0)
    ready = job.join(1, at=111.0)
    assert ready.state.ready.keys() == {1}
    in_world = ready.join(0, at=112.0)
    assert in_world.world == (2, [0, 1])
    failure = failure_of(1, round=1, exit_code=1, time=110.0, message="")
    again = ReportFailures(node_id=1, incarnation="a", round=1, failures=(failure,))
    for now in (ready, in_world):
        forgotten = replace(now, state=msgspec.structs.replace(now.state, incidents=()))
        assert forgotten.after(again, at=999.0).state == forgotten.state


def test_a_connection_that_fails_a_check_is_said_and_excludes_no_node() -> None:
    """Results that arrive again change nothing, in later rounds and after the check."""
    job = PlayedJob(JobState(policy=msgspec.structs.replace(POLICY, check=True)))
    job = job.join(0, 1, 2, 3, at=1.0).after(at=100.0)
    earlier: list[ReportTest] = []
    while (check := job.state.check) is not None:
        assert job.after(*earlier, at=101.0).state == job.state
        own: dict[str, Any] = {"incarnation": "a", "round": 0, "check": check.number}
        own |= {"test_round": len(check.results)}
        for group in check.groups:
            result = TestResult(passed={*group} != {0, 1}, broken=False)
            reports = [ReportTest(node_id=number, result=result, **own) for number in group]
            job = job.after(*reports, at=101.0)
            earlier += reports
    assert job.after(*earlier, at=101.0).state == job.state
    assert "check 1: all nodes are healthy; the connection among nodes 0, 1 failed" in job.history
    assert job.world == (1, [0, 1, 2, 3])


class TestCause:
    """What is shown of the failures of a round, and why they came about."""

    def cause_of(self, job: PlayedJob) -> tuple[str, int]:
        """The cause that is shown of the only failures, and how many processes failed."""
        (failed,) = job.status(at=130.0).failures
        return failed.cause, len(failed.failures)

    def test_a_lost_node_is_the_cause_of_what_its_peers_meet(self) -> None:
        job = PlayedJob.running().fail(0, COLLATERAL, at=110.0)
        assert self.cause_of(job) == ("", 1)  # not known yet
        lost = "node 1 is lost: no message came within the heartbeat timeout"
        assert self.cause_of(job.lose(1, at=120.0)) == (lost, 1)
        assert job.status(at=130.0).failures[0].time == 110.0
        alone = PlayedJob.running().lose(1, at=120.0)
        assert self.cause_of(alone) == (lost, 0)  # no process failed

    def test_a_process_that_failed_by_itself_stays_the_cause(self) -> None:
        job = PlayedJob.running().fail(0, "ValueError: no such layer", at=110.0)
        assert self.cause_of(job.lose(1, at=120.0)) == ("", 1)

    def test_a_node_that_leaves_is_no_failure_but_may_cause_some(self) -> None:
        job = PlayedJob.running().leave(1, outcome=Outcome.DRAINED, at=120.0)
        assert job.status(at=121.0).failures == ()
        failed = job.fail(0, COLLATERAL, at=121.0)
        assert self.cause_of(failed) == ("node 1 leaves, drained: SIGTERM", 1)


def test_goodput_does_not_fall_after_the_end() -> None:
    job = PlayedJob.running()
    live = Liveness.after_start(job.state, 100.0)
    for step in range(1, 100):
        job = job.beat(live, {0: RankProgress(step=step, time=0.0)}, at=100.0 + step)
    job = job.leave(0, 1, outcome=Outcome.SUCCEEDED, at=200.0)
    at_end = status_of(job.state, live, 200.0)
    assert at_end.phase == "succeeded"
    assert at_end.goodput is not None
    assert 0.4 < at_end.goodput < 0.6
    later = status_of(job.state, live, 5000.0)
    assert (later.goodput, later.ended) == (at_end.goodput, 200.0)
    # Nor does it change when the master is restarted.
    (noted,) = events_of_time(live, job.state, 201.0)
    job = job.after(noted, at=201.0)
    assert events_of_time(live, job.state, 202.0) == []
    assert job.status(at=9000.0).goodput == at_end.goodput


def test_a_job_is_over_when_its_agents_are_silent_after_its_end() -> None:
    job = PlayedJob.running()
    silence = job.state.policy.heartbeat_timeout
    live = Liveness.after_start(job.state, 100.0)
    assert not is_over(live, job.state, 1e9)
    ended = job.leave(0, 1, outcome=Outcome.SUCCEEDED, at=200.0).state
    assert not is_over(live, ended, 200.0 + silence / 2)
    on_message(live, "a", 201.0)  # it is told that the job has ended
    assert not is_over(live, ended, 200.5 + silence)
    assert is_over(live, ended, 201.0 + silence)


def test_an_ended_job_stays_ended() -> None:
    ended = PlayedJob.running(3, max_restarts=0).fail(0, at=120.0)
    assert ended.state.outcome is Outcome.FAILED
    for later in (
        ended.join(1, at=1e6),
        ended.lose(1, at=1e6),
        ended.leave(1, outcome=Outcome.SUCCEEDED, at=1e6),
        ended.hold(1, at=1e6),
        ended.after(at=1e6),
    ):
        assert later.state == ended.state


def test_a_node_that_is_excluded_by_hand_leaves_when_the_ranks_have_saved() -> None:
    job = PlayedJob.running(4).hold(3, at=200.0)
    assert saves(job, 201.0) == (True, False)
    [row] = [row for row in job.status(at=201.0).nodes if row.id == 3]
    assert (row.state, row.reason) == ("draining", "its fan")
    late = job.shown(0, at=206.0)  # without a save, after the time for it
    job = job.save(at=202.0)
    for stop in (late, job.shown(0, at=203.0)):
        assert isinstance(stop, Stop)
        assert stop.reason == "node 3 excluded by hand"
    job = job.join(0, 1, 2, 3, at=204.0).after(at=204.0)
    # The world has a multiple of two nodes.
    assert [member.id for member in job.state.world] == [0, 1]
    assert job.state.charges == {}
    # Its agent waits, and knows why; so does one that starts anew.
    again = job.join(3, at=205.0, agent="b", new=True)
    waits = job.shown(3, at=205.0)
    assert isinstance(waits, Waiting)
    assert again.shown(3, at=205.0, agent="b") == waits
    assert waits.reason == (
        "an operator has excluded it: its fan; it is used again after `remesh node readmit 3`"
    )
    assert job.status(at=206.0).nodes_by_state == {"active": 2, "excluded": 1, "ready": 1}
    job = job.hold(3, None, at=207.0).save(at=208.0)
    assert isinstance(job.shown(0, at=209.0), Stop), "it grows"


def saves(job: PlayedJob, at: float, number: int = 0) -> tuple[bool, bool]:
    """Whether a node, which goes on, is asked to save, and whether only to grow."""
    content = job.shown(number, at=at)
    assert isinstance(content, Assignment)
    return content.save, content.grow


def held_and_needed() -> PlayedJob:
    """Node 1 is excluded by hand, but the job has only two; it has saved since."""
    job = PlayedJob.running().hold(1, at=200.0)
    assert saves(job, 201.0) == (False, False)
    return job.save(at=250.0)


def test_a_node_that_the_job_needs_stays_until_another_has_come_and_the_ranks_have_saved() -> None:
    job = held_and_needed().join(2, at=301.0, new=True)
    assert saves(job, 302.0) == (True, False)
    assert isinstance(job.save(at=303.0).shown(1, at=304.0), Stop)
    # The other may go before: then a third is waited for, and all have saved when it has come.
    lost = job.lose(2, at=302.0).after(at=310.0)
    assert (saves(lost, 311.0), lost.state.save_request) == ((False, False), None)
    assert saves(lost.join(3, at=7000.0, new=True), 7001.0) == (True, False)
    # It may also be taken back before.
    job = PlayedJob.running(4).hold(3, at=200.0).hold(3, None, at=201.0)
    assert saves(job, 202.0) == (False, False)
    assert isinstance(job.shown(3, at=300.0), Assignment)


def test_while_an_excluded_node_stays_other_changes_wait_for_a_save_too() -> None:
    assert saves(held_and_needed().drain(1, at=300.0), 301.0) == (True, False)
    # A growth that waits for its save goes on as an exclusion.
    grows = PlayedJob.running().join(2, 3, at=200.0, new=True)
    assert saves(grows, 201.0) == (True, True)
    held = grows.hold(1, at=202.0)
    assert saves(held, 203.0) == (True, False)
    stop = held.save(at=204.0).shown(0, at=205.0)
    assert isinstance(stop, Stop)
    assert stop.reason == "node 1 excluded by hand"
