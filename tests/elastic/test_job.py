"""The job's machine, with heartbeats and answers, under everything that can happen."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remesh.elastic import events
from remesh.elastic.failures import ProcessFailure
from remesh.elastic.job import Policy, State, apply, start
from remesh.elastic.journal import Journal
from remesh.elastic.live import Live, events_of_time, hear, hear_beat
from remesh.elastic.protocol import BeatRequest, Placed, RankBeat, Test
from remesh.elastic.rendezvous import Node, Outcome, Settings
from remesh.elastic.replies import beat_reply, join_reply, places_of

SETTINGS = Settings(min_nodes=2, max_nodes=5, node_unit=2, last_call=5.0, join_timeout=1e12)
POLICY = Policy(heartbeat_timeout=10.0, save_grace=5.0, check_timeout=20.0)
COLLATERAL = "RuntimeError: Connection closed by peer"


@dataclass(slots=True)
class Agent:
    """An agent that behaves: it knows only what it was told."""

    node: Node
    round: int = 0
    runs: bool = False


class Jobs(RuleBasedStateMachine):
    """Agents that join, beat, fail, leave and die; a network that loses, repeats and reorders.

    The clock jumps, and the master is killed and started again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = start(POLICY)
        self.now = 1000.0
        self.live = Live.after_start(self.state, self.now)
        self.journal = Journal(":memory:")
        self.agents: dict[int, Agent] = {}
        self.num_started = 0
        self.sent: list[events.Event] = []
        self.own_failures: set[tuple[int, int]] = set()

    def deliver(self, event: events.Event) -> None:
        self.state = apply(self.state, event, self.now)
        self.journal.append([(self.now, event)])

    def send(self, event: events.Event) -> None:
        self.sent.append(event)
        self.deliver(event)

    def ask_to_join(self, agent: Agent, *, answered: bool) -> None:
        node = agent.node
        hear(self.live, node.id, node.incarnation, self.now)
        self.send(
            events.Join(
                node=node, after_round=agent.round, settings=SETTINGS, max_restarts=1_000_000
            )
        )
        if not answered:
            return
        match join_reply(self.state, node, places_of(self.state)):
            case Placed(round=number):
                agent.round, agent.runs = number, True
            case Test(check=check, test_round=test_round):
                self.send(
                    events.Tested(
                        node_id=node.id,
                        incarnation=node.incarnation,
                        check=check,
                        test_round=test_round,
                        passed=True,
                        broken=False,
                        seconds=1.0,
                        message="",
                    )
                )
            case other:
                assert other is None, f"a healthy node is answered {other}"

    def beat(self, agent: Agent, *, answered: bool) -> None:
        node = agent.node
        request = BeatRequest(
            node_id=node.id,
            incarnation=node.incarnation,
            round=agent.round,
            ranks={node.id: RankBeat(step=int(self.now), age=0.0)} if agent.runs else {},
        )
        hear(self.live, node.id, node.incarnation, self.now)
        for event in hear_beat(self.live, self.state, request, self.now):
            self.deliver(event)
        reply = beat_reply(self.state, request, self.now)
        assert reply.over is None
        if answered and agent.runs and reply.restart is not None:
            agent.runs = False

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for event in events_of_time(self.live, self.state, self.now):
            self.deliver(event)
        self.deliver(events.Tick())

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
            events.Leave(
                node_id=agent.node.id,
                incarnation=agent.node.incarnation,
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
        failure = ProcessFailure(
            node_id=number,
            round=agent.round,
            rank=number,
            local_rank=0,
            exit_code=-9 if own else 1,
            time=self.now,
            message="" if own else COLLATERAL,
        )
        if own:
            self.own_failures.add((number, agent.round))
        self.send(
            events.Fail(
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
            events.Drain(
                node_id=agent.node.id,
                incarnation=agent.node.incarnation,
                seconds=seconds,
                reason="SIGTERM",
            )
        )

    @rule()
    def somebody_wants_a_check(self) -> None:
        self.send(events.WantCheck("asked for"))

    @rule(step=st.integers(0, 100))
    def a_checkpoint_is_made(self, step: int) -> None:
        self.send(events.Saved(step))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_old_message_arrives(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.sent)))

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(seconds=st.floats(-1e6, 1e6))
    def the_clock_jumps(self, seconds: float) -> None:
        self.now += seconds

    @rule(snapshot=st.booleans())
    def the_master_is_killed_and_started_again(self, snapshot: bool) -> None:
        if snapshot:
            self.journal.snapshot(self.state, self.now)
        loaded, _ = self.journal.load(POLICY)
        assert loaded == self.state
        self.state = loaded
        self.live = Live.after_start(self.state, self.now)

    @invariant()
    def nobody_healthy_is_excluded(self) -> None:
        if self.state.rendezvous is not None:
            assert self.state.rendezvous.excluded == {}
            for agent in self.agents.values():
                assert agent.node.incarnation not in self.state.rendezvous.replaced

    @invariant()
    def only_own_failures_that_were_reported_are_charged(self) -> None:
        for number, charged in self.state.charges.items():
            assert charged <= sum(node_id == number for node_id, _ in self.own_failures)

    def teardown(self) -> None:
        """Whatever has happened, agents that go on behaving meet in one world."""
        for _ in range(60):
            self.pass_time(1.0)
            self.all_agents_speak()
        size = SETTINGS.fitting(len(self.agents))
        running = [agent for agent in self.agents.values() if agent.runs]
        assert len(running) == size
        if size:
            world = self.state.rendezvous
            assert world is not None
            assert {agent.round for agent in running} == {world.round}
            assert [node.id for node in world.world] == sorted(agent.node.id for agent in running)
        self.journal.close()


TestJobs = Jobs.TestCase
TestJobs.settings = hypothesis_settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_a_job_survives_its_encoding() -> None:
    state = start(POLICY)
    for number in range(3):
        node = Node(id=number, incarnation="a", name=str(number), address="x", num_processes=1)
        event = events.Join(node=node, after_round=0, settings=SETTINGS, max_restarts=3)
        state = apply(state, event, 1.0 + number)
    state = apply(state, events.Tick(), 100.0)
    assert state.rendezvous is not None
    assert state.rendezvous.round == 1
    assert msgspec.json.decode(msgspec.json.encode(state), type=State) == state
