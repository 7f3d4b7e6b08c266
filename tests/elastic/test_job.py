"""The job's machine, with heartbeats and answers, under everything that can happen."""

from __future__ import annotations

from dataclasses import dataclass

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
    NodeLost,
    Policy,
    RanksWait,
    StacksCollected,
    Tick,
    apply,
    concerns_all,
    content_of,
)
from remesh.elastic.journal import Journal
from remesh.elastic.liveness import Liveness, events_of_time, is_over, on_beat, on_message
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    Assignment,
    Beat,
    Content,
    Drain,
    Join,
    Leave,
    NodeTest,
    ReportFailures,
    ReportTest,
    RequestCheck,
    Sender,
    Stop,
    TestResult,
    Waiting,
)
from remesh.elastic.rendezvous import (
    Change,
    Node,
    Outcome,
    Settings,
    restart_reason,
    tick,
)
from remesh.elastic.status import Status, status_of
from tests.elastic.agents import failure_of, join_of

SETTINGS = Settings(min_nodes=2, max_nodes=5, node_unit=2, last_call=5.0, join_timeout=1e12)
POLICY = Policy(heartbeat_timeout=10.0, save_grace=5.0, check_timeout=20.0)
COLLATERAL = "RuntimeError: Connection closed by peer"


def joining(node: Node, *, after_round: int = 0, max_restarts: int = 3) -> Join:
    """The event that a node joins."""
    return join_of(
        node.id,
        name=node.name,
        incarnation=node.incarnation,
        after_round=after_round,
        settings=SETTINGS,
        max_restarts=max_restarts,
    )


@dataclass(slots=True)
class Agent:
    """An agent that behaves: it knows only what it was told."""

    node: Node
    round: int = 0
    runs: bool = False
    waits: bool = False


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
        old, new = before.rendezvous, self.state.rendezvous
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
        node = agent.node
        on_message(self.live, node.incarnation, self.now)
        self.send(joining(node, after_round=agent.round, max_restarts=1_000_000))
        if not answered:
            return
        match self.shown_to(agent):
            case Assignment(round=number) if number > agent.round:
                agent.round, agent.runs = number, True
            case Stop(round=number) if number > agent.round:
                agent.round = number  # it was over before the agent had entered it
            case NodeTest(check=check, test_round=test_round):
                self.send(
                    ReportTest(
                        node_id=node.id,
                        incarnation=node.incarnation,
                        round=agent.round,
                        check=check,
                        test_round=test_round,
                        result=TestResult(passed=True, broken=False, seconds=1.0),
                    )
                )
            case other:
                assert isinstance(other, Waiting), f"a healthy node is shown {other}"

    def shown_to(self, agent: Agent) -> Content:
        node = agent.node
        sender = Sender(node_id=node.id, incarnation=node.incarnation, round=agent.round)
        return content_of(self.state, sender)

    def beat(self, agent: Agent, *, answered: bool) -> None:
        node = agent.node
        report = RankProgress(step=int(self.now), time=0.0, waits=agent.waits)
        request = Beat(
            node_id=node.id,
            incarnation=node.incarnation,
            round=agent.round,
            ranks={node.id: report} if agent.runs else {},
        )
        on_message(self.live, node.incarnation, self.now)
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

    @rule(number=st.integers(0, 6))
    def an_agent_starts(self, number: int) -> None:
        self.num_started += 1
        self.agents[number] = Agent(
            Node(
                id=number,
                incarnation=str(self.num_started),
                name=f"host-{number}",
                address="127.0.0.1",
                num_processes=1,
            )
        )

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def an_agent_dies(self, data: st.DataObject) -> None:
        del self.agents[data.draw(st.sampled_from(sorted(self.agents)))]

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def an_agent_leaves(self, data: st.DataObject) -> None:
        agent = self.agents.pop(data.draw(st.sampled_from(sorted(self.agents))))
        self.send(
            Leave(
                node_id=agent.node.id,
                incarnation=agent.node.incarnation,
                round=agent.round,
                outcome=Outcome.DRAINED,
                reason="SIGTERM",
            )
        )

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), answered=st.booleans())
    def an_agent_speaks(self, data: st.DataObject, answered: bool) -> None:
        agent = self.agents[data.draw(st.sampled_from(sorted(self.agents)))]
        if agent.runs:
            self.beat(agent, answered=answered)
        else:
            self.ask_to_join(agent, answered=answered)

    @rule()
    def all_agents_speak(self) -> None:
        for agent in self.agents.values():
            if agent.runs:
                self.beat(agent, answered=True)
            else:
                self.ask_to_join(agent, answered=True)

    @precondition(lambda self: any(agent.runs for agent in self.agents.values()))
    @rule(data=st.data(), own=st.booleans())
    def a_process_fails(self, data: st.DataObject, own: bool) -> None:
        running = [number for number, agent in self.agents.items() if agent.runs]
        number = data.draw(st.sampled_from(running))
        agent = self.agents[number]
        code, message = (-9, "") if own else (1, COLLATERAL)
        failure = failure_of(number, round=agent.round, exit_code=code, message=message)
        self.failures.add((number, agent.round))
        self.send(
            ReportFailures(
                node_id=number,
                incarnation=agent.node.incarnation,
                round=agent.round,
                failures=(failure,),
            )
        )
        agent.runs = False

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), seconds=st.floats(0, 30))
    def a_node_has_to_go(self, data: st.DataObject, seconds: float) -> None:
        agent = self.agents[data.draw(st.sampled_from(sorted(self.agents)))]
        self.send(
            Drain(
                node_id=agent.node.id,
                incarnation=agent.node.incarnation,
                round=agent.round,
                seconds=seconds,
                reason="SIGTERM",
            )
        )

    @rule()
    def somebody_wants_a_check(self) -> None:
        self.send(RequestCheck(reason="a test"))

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

    @rule()
    def the_master_is_killed_and_started_again(self) -> None:
        self.journal.write(self.state, self.now)
        loaded, _ = self.journal.load(POLICY)
        assert loaded == self.state
        self.state = loaded
        self.live = Liveness.after_start(self.state, self.now)

    @invariant()
    def nobody_healthy_is_excluded(self) -> None:
        assert self.state.rendezvous.excluded == {}
        for agent in self.agents.values():
            assert agent.node.incarnation not in self.state.rendezvous.replaced

    @invariant()
    def worlds_are_as_the_settings_say(self) -> None:
        nodes = self.state.rendezvous
        ids = [member.id for member in nodes.world]
        assert ids == sorted(set(ids))
        assert len(ids) == SETTINGS.fitting(len(ids))
        assert nodes.active.keys() <= set(ids) - nodes.ready.keys()

    @invariant()
    def a_world_forms_when_the_nodes_are_there(self) -> None:
        nodes = self.state.rendezvous
        if not nodes.active and SETTINGS.fitting(len(nodes.candidates)):
            later = tick(nodes, self.now + 1000)
            assert later.round == nodes.round + 1
            assert later.active
            # Nodes that are held stay in it if the others are too few.
            held = later.active.keys() & nodes.held.keys()
            assert not held or not SETTINGS.fitting(len(later.active) - len(held))
            assert held <= {member.id for member in nodes.world}

    @invariant()
    def members_are_told_that_the_world_is_broken(self) -> None:
        nodes = self.state.rendezvous
        for number in nodes.active if len(nodes.active) < len(nodes.world) else ():
            told = restart_reason(nodes, number, nodes.round)
            assert told is not None
            assert told[0] is not Change.GROW

    @invariant()
    def each_failure_that_was_reported_is_charged_once_at_most(self) -> None:
        for number, charges in self.state.charges.items():
            assert charges.count <= sum(node_id == number for node_id, _ in self.failures)

    def teardown(self) -> None:
        """Whatever has happened, agents that go on behaving meet in one world."""
        for number in [*self.state.rendezvous.held]:
            self.deliver(NodeHeld(number, None))
        for _ in range(60):
            self.pass_time(1.0)
            self.all_agents_speak()
        size = SETTINGS.fitting(len(self.agents))
        running = [agent for agent in self.agents.values() if agent.runs]
        assert len(running) == size
        if size:
            world = self.state.rendezvous
            assert {agent.round for agent in running} == {world.round}
            assert [node.id for node in world.world] == sorted(agent.node.id for agent in running)
        self.journal.close()


TestJobs = Jobs.TestCase
TestJobs.settings = hypothesis_settings(max_examples=25, stateful_step_count=40, deadline=None)


def node(number: int) -> Node:
    return Node(id=number, incarnation="a", name=str(number), address="x", num_processes=1)


def run(policy: Policy = POLICY, num_nodes: int = 3, max_restarts: int = 3) -> JobState:
    """A job whose first round has begun at 100."""
    state = JobState(policy=policy)
    for number in range(num_nodes):
        event = joining(node(number), max_restarts=max_restarts)
        state = apply(state, event, 1.0 + number)
    state = apply(state, Tick(), 100.0)
    assert state.rendezvous.round == 1
    return state


def join(state: JobState, *numbers: int, now: float) -> JobState:
    """Nodes of the current round join again."""
    after = state.rendezvous.round
    for number in numbers:
        event = joining(node(number), after_round=after)
        state = apply(state, event, now)
    return state


def fail(
    state: JobState, number: int, now: float, message: str = "", *, exit_code: int = 1
) -> JobState:
    """The process of a node fails."""
    current = state.rendezvous.round
    failure = failure_of(number, round=current, exit_code=exit_code, time=now, message=message)
    event = ReportFailures(node_id=number, incarnation="a", round=current, failures=(failure,))
    return apply(state, event, now)


def shown_to(state: JobState, number: int, now: float) -> Content:
    """What a node that runs processes of round 1 has to do."""
    sender = Sender(node_id=number, incarnation="a", round=1)
    return content_of(apply(state, Tick(), now), sender)


def seen(state: JobState, now: float) -> Status:
    return status_of(state, Liveness.after_start(state, now), now)


def test_rounds_that_only_the_nodes_remember_are_counted() -> None:
    state = JobState(policy=POLICY)
    for number, after_round in ((0, 7), (1, 7)):
        event = joining(node(number), after_round=after_round)
        state = apply(state, event, 1.0)
    assert "node 0 comes from round 7, the journal knows only 0 rounds" in state.missing_rounds
    state = apply(state, Tick(), 100.0)
    assert (state.rendezvous.round, len(state.rendezvous.world)) == (8, 2)
    # An old copy of the journal, in which the world of an earlier round is active.
    state = run(num_nodes=2)
    for number in (0, 1):
        event = joining(node(number), after_round=5)
        state = apply(state, event, 200.0)
    assert (state.rendezvous.round, set(state.rendezvous.active)) == (6, {0, 1})
    assert [line.text for line in state.history if line.text.startswith("round")] == [
        "round 1: nodes 0, 1",
        "round 6: nodes 0, 1",
    ]


def test_a_world_whose_ranks_all_wait_grows_without_a_checkpoint() -> None:
    state = apply(apply(run(num_nodes=2), joining(node(2)), 200.0), joining(node(3)), 200.0)
    live = Liveness.after_start(state, 200.0)
    shown = []
    for now, waits in ((201.0, [False, False]), (202.0, [True, False]), (203.0, [True, True])):
        for number in (0, 1):
            ranks = {number: RankProgress(step=5, time=0.0, waits=waits[number])}
            beat = Beat(node_id=number, incarnation="a", round=1, ranks=ranks)
            for event in on_beat(live, state, beat, now):
                state = apply(state, event, now)
            shown.append(shown_to(state, number, now))
    for content in shown[:5]:
        assert isinstance(content, Assignment)
        assert (content.save, content.grow) == (True, True)
    assert isinstance(shown[5], Stop)
    assert shown[5].change is Change.GROW
    # A node that has to leave takes its memory along.
    state = apply(apply(run(num_nodes=2), joining(node(2)), 200.0), joining(node(3)), 200.0)
    drain = Drain(node_id=0, incarnation="a", round=1, seconds=60.0, reason="SIGTERM")
    state = apply(apply(state, drain, 201.0), RanksWait(1), 202.0)
    content = shown_to(state, 1, 203.0)
    assert isinstance(content, Assignment)
    assert (content.save, content.grow) == (True, False)


class TestRestartBudget:
    def test_it_is_described_in_the_same_words_everywhere(self) -> None:
        policy = msgspec.structs.replace(POLICY, restart_refill=100.0)
        state = fail(run(policy, num_nodes=2, max_restarts=2), 0, 200.0)
        words = "2 restarts per node, one is given back every 100 s"
        status = seen(state, 201.0)
        assert (status.restart_budget, status.max_restarts) == (words, 2)
        text = [line.text for line in state.history]
        assert text[0] == f"restart budget: {words}"
        assert any(line.endswith("; 1 of 2 restarts charged to its node") for line in text)

    def test_restarts_are_given_back(self) -> None:
        policy = msgspec.structs.replace(POLICY, restart_refill=100.0)
        state = run(policy, num_nodes=2, max_restarts=2)
        for now in (200.0, 250.0):
            state = join(fail(state, 0, now), 0, 1, now=now)
        assert [seen(state, at).nodes[0].num_charged for at in (299, 300, 399, 400)] == [2, 1, 1, 0]
        state = join(fail(state, 0, 320.0), 0, 1, now=320.0)
        assert [seen(state, at).nodes[0].num_charged for at in (399, 400, 500)] == [2, 1, 0]
        state = fail(state, 0, 399.0)
        assert state.rendezvous.outcome is Outcome.FAILED

    def test_they_are_not_unless_asked_for(self) -> None:
        state = run(num_nodes=2, max_restarts=1)
        state = join(fail(state, 0, 200.0), 0, 1, now=200.0)
        state = fail(state, 0, 1e9)
        assert state.rendezvous.outcome is Outcome.FAILED

    def test_restarts_after_hangs_are_given_back_too(self) -> None:
        policy = msgspec.structs.replace(POLICY, restart_refill=100.0)
        state = run(policy, num_nodes=2, max_restarts=1)
        for number, now in ((1, 200.0), (2, 350.0), (3, 360.0)):
            state = apply(state, HangDetected(number, "no rank has finished a step"), now)
            state = apply(state, StacksCollected(number), now)
            assert (state.rendezvous.outcome is None) == (number < 3)
            state = join(state, 0, 1, now=now)


def test_all_nodes_stop_as_soon_as_the_processes_of_one_have_failed() -> None:
    state = fail(run(num_nodes=2), 0, 110.0)
    # And node 0 has not joined yet.
    wanted = Stop(1, Change.RESTARTED, state.failures[-1].decision.reason)
    assert shown_to(state, 1, 110.5) == wanted
    again = join(state, 0, 1, now=111.0)
    assert (again.rendezvous.round, again.rendezvous.broken) == (2, None)
    assert fail(again, 0, 112.0).rendezvous.broken is not None


class TestCause:
    def test_a_lost_node_is_the_cause_of_what_its_peers_meet(self) -> None:
        state = fail(run(num_nodes=2), 0, 110.0, COLLATERAL)
        (failed,) = seen(state, 111.0).failures
        assert (failed.cause, failed.failures[0].node_id) == ("", 0)  # not known yet
        state = apply(state, NodeLost(node_id=1, incarnation="a"), 120.0)
        (failed,) = seen(state, 121.0).failures
        assert failed.cause == "node 1 is lost: no message came within the heartbeat timeout"
        assert failed.time == 110.0

    def test_a_process_that_failed_by_itself_stays_the_cause(self) -> None:
        state = fail(run(num_nodes=2), 0, 110.0, "ValueError: no such layer")
        state = apply(state, NodeLost(node_id=1, incarnation="a"), 120.0)
        (failed,) = seen(state, 121.0).failures
        assert failed.cause == ""

    def test_a_lost_node_is_shown_where_no_process_failed(self) -> None:
        state = apply(run(num_nodes=2), NodeLost(node_id=1, incarnation="a"), 120.0)
        (failed,) = seen(state, 121.0).failures
        assert (failed.cause[:14], failed.failures) == ("node 1 is lost", ())

    def test_a_node_that_leaves_is_no_failure_but_may_cause_some(self) -> None:
        leave = Leave(
            node_id=1, incarnation="a", round=1, outcome=Outcome.DRAINED, reason="SIGTERM"
        )
        state = apply(run(num_nodes=2), leave, 120.0)
        assert seen(state, 121.0).failures == ()
        (failed,) = seen(fail(state, 0, 121.0, COLLATERAL), 122.0).failures
        assert failed.cause == "node 1 leaves, drained: SIGTERM"


def test_goodput_does_not_fall_after_the_end() -> None:
    state = run(num_nodes=2)
    live = Liveness.after_start(state, 100.0)
    for step in range(1, 101):
        now = 100.0 + step
        beat = Beat(
            node_id=0, incarnation="a", round=1, ranks={0: RankProgress(step=step, time=0.0)}
        )
        assert on_beat(live, state, beat, now) == []
    for number in (0, 1):
        leave = Leave(
            node_id=number, incarnation="a", round=1, outcome=Outcome.SUCCEEDED, reason="done"
        )
        state = apply(state, leave, 200.0)
    at_end = status_of(state, live, 200.0)
    assert at_end.phase == "succeeded"
    assert at_end.goodput is not None
    assert 0.4 < at_end.goodput < 0.6
    later = status_of(state, live, 5000.0)
    assert (later.goodput, later.ended) == (at_end.goodput, 200.0)
    # Nor does it change when the master is restarted.
    (noted,) = events_of_time(live, state, 201.0)
    state = apply(state, noted, 201.0)
    assert events_of_time(live, state, 202.0) == []
    assert seen(state, 9000.0).goodput == at_end.goodput


def test_a_job_is_over_when_its_agents_are_silent_after_its_end() -> None:
    state = run(num_nodes=2)
    silence = state.policy.heartbeat_timeout
    live = Liveness.after_start(state, 100.0)
    assert not is_over(live, state, 1e9)
    for number in (0, 1):
        leave = Leave(
            node_id=number, incarnation="a", round=1, outcome=Outcome.SUCCEEDED, reason="done"
        )
        state = apply(state, leave, 200.0)
    assert not is_over(live, state, 200.0 + silence / 2)
    on_message(live, "a", 201.0)  # it is told that the job has ended
    assert not is_over(live, state, 200.5 + silence)
    assert is_over(live, state, 201.0 + silence)


def test_an_ended_job_stays_ended() -> None:
    ended = fail(run(max_restarts=0), 0, 120.0)
    assert ended.rendezvous.outcome is Outcome.FAILED
    for event in (
        joining(node(1), after_round=1),
        NodeLost(node_id=1, incarnation="a"),
        Leave(node_id=1, incarnation="a", round=1, outcome=Outcome.SUCCEEDED),
        NodeHeld(1, "its fan"),
        Tick(),
    ):
        assert apply(ended, event, 1e6).rendezvous == ended.rendezvous


def test_a_job_survives_its_encoding() -> None:
    state = fail(run(), 0, 120.0)
    state = apply(state, NodeLost(node_id=1, incarnation="a"), 121.0)
    assert msgspec.json.decode(msgspec.json.encode(state), type=JobState) == state


def test_a_node_that_is_excluded_by_hand_leaves_when_the_ranks_have_saved() -> None:
    state = apply(run(num_nodes=4), NodeHeld(3, "its fan"), 200.0)
    asked = shown_to(state, 0, 201.0)
    assert isinstance(asked, Assignment)
    assert (asked.save, asked.grow) == (True, False)
    [row] = [row for row in seen(state, 201.0).nodes if row.id == 3]
    assert (row.state, row.reason) == ("draining", "its fan")
    late = shown_to(state, 0, 206.0)  # without a save, after the time for it
    state = apply(state, CheckpointSaved(7), 202.0)
    for stop in (late, shown_to(apply(state, Tick(), 202.0), 0, 203.0)):
        assert isinstance(stop, Stop)
        assert (stop.change, stop.reason) == (Change.RESTARTED, "node 3 excluded by hand")
    state = apply(join(apply(state, Tick(), 203.0), 0, 1, 2, 3, now=204.0), Tick(), 204.0)
    # The world has a multiple of two nodes.
    assert [member.id for member in state.rendezvous.world] == [0, 1]
    assert state.charges == {}
    # Its agent waits, and knows why; so does one that starts anew.
    again = apply(state, joining(msgspec.structs.replace(node(3), incarnation="b")), 205.0)
    waits = shown_to(state, 3, 205.0)
    assert isinstance(waits, Waiting)
    assert content_of(again, Sender(node_id=3, incarnation="b", round=0)) == waits
    assert waits.reason == (
        "an operator has excluded it: its fan; it is used again after `remesh node readmit 3`"
    )
    assert seen(state, 206.0).nodes_by_state == {"active": 2, "excluded": 1, "ready": 1}
    state = apply(state, NodeHeld(3, None), 207.0)
    growing = shown_to(apply(state, CheckpointSaved(8), 208.0), 0, 209.0)
    assert isinstance(growing, Stop)


def saves(state: JobState, now: float) -> tuple[bool, bool]:
    """Whether node 0, which goes on, is asked to save, and whether only to grow."""
    content = shown_to(state, 0, now)
    assert isinstance(content, Assignment)
    return content.save, content.grow


def held_and_needed() -> JobState:
    """Node 1 is excluded by hand, but the job has only two; it has saved since."""
    state = apply(run(num_nodes=2), NodeHeld(1, "its fan"), 200.0)
    assert saves(state, 201.0) == (False, False)
    return apply(state, CheckpointSaved(7), 250.0)


def test_a_node_that_the_job_needs_stays_until_another_has_come_and_the_ranks_have_saved() -> None:
    state = apply(held_and_needed(), joining(node(2)), 301.0)
    assert saves(state, 302.0) == (True, False)
    saved = apply(apply(state, CheckpointSaved(8), 303.0), Tick(), 303.0)
    assert isinstance(shown_to(saved, 1, 304.0), Stop)
    # The other may go before: then a third is waited for, and all have saved when it has come.
    lost = apply(apply(state, NodeLost(node_id=2, incarnation="a"), 302.0), Tick(), 310.0)
    assert (saves(lost, 311.0), lost.save_request) == ((False, False), None)
    assert saves(apply(lost, joining(node(3)), 7000.0), 7001.0) == (True, False)
    # It may also be taken back before.
    state = apply(apply(run(num_nodes=4), NodeHeld(3, "its fan"), 200.0), NodeHeld(3, None), 201.0)
    assert saves(state, 202.0) == (False, False)
    assert isinstance(shown_to(state, 3, 300.0), Assignment)


def test_a_node_that_the_job_needs_stays_over_a_restart_but_not_with_a_new_agent() -> None:
    state = join(fail(held_and_needed(), 0, 300.0), 0, 1, now=301.0)
    assert [member.id for member in state.rendezvous.world] == [0, 1]
    assert state.rendezvous.round == 2
    state = join(fail(state, 0, 400.0), 0, now=401.0)
    again = joining(msgspec.structs.replace(node(1), incarnation="b"), after_round=2)
    state = apply(apply(state, again, 402.0), Tick(), 500.0)
    assert (state.rendezvous.round, state.rendezvous.active) == (2, {})
    state = apply(state, joining(msgspec.structs.replace(node(2), incarnation="c")), 501.0)
    assert [member.id for member in state.rendezvous.world] == [0, 2]


def test_while_an_excluded_node_stays_other_changes_wait_for_a_save_too() -> None:
    state = held_and_needed()
    drain = Drain(node_id=1, incarnation="a", round=1, seconds=60.0, reason="SIGTERM")
    assert saves(apply(state, drain, 300.0), 301.0) == (True, False)
    # A growth that waits for its save goes on as an exclusion.
    grows = apply(apply(run(num_nodes=2), joining(node(2)), 200.0), joining(node(3)), 200.0)
    assert saves(grows, 201.0) == (True, True)
    held = apply(grows, NodeHeld(1, "its fan"), 202.0)
    assert saves(held, 203.0) == (True, False)
    stop = shown_to(apply(held, CheckpointSaved(7), 204.0), 0, 205.0)
    assert isinstance(stop, Stop)
    assert stop.reason == "node 1 excluded by hand"
