"""The master over real sockets, with a real journal."""

from __future__ import annotations

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic.client import Client
from remesh.elastic.job import JobState, Policy
from remesh.elastic.journal import Journal
from remesh.elastic.liveness import BEAT_SECONDS, CONFIRM_SECONDS, on_message
from remesh.elastic.master import Connection, Master, RefusedError
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    Beat,
    JobEnded,
    NodeTest,
    Rejected,
    ReportTest,
    Stop,
    TestResult,
)
from remesh.elastic.server import ServerOptions
from remesh.errors import MasterError, StorageError
from tests.elastic.agents import SETTINGS, Clock, Served, SilentAgent, ask, join_of, serving
from tests.waiting import wait_until

LONG = 600.0
OF_TWO = msgspec.structs.replace(SETTINGS, max_nodes=2)
"""The world begins without a last call, which no clock would end."""


def test_nodes_get_their_places_by_id(served: Served) -> None:
    places = served.join_all([7, 3])
    assert [places[number].node_rank for number in (3, 7)] == [0, 1]
    leader = places[7].leader
    assert places[7] == Assignment(1, 1, 2, 2, 4, leader)
    assert leader.id == 3


OVERDUE = BEAT_SECONDS + CONFIRM_SECONDS + 1


class TestTwoAgentsThatWouldBeOneNode:
    @pytest.fixture(autouse=True)
    def _serve(self) -> Iterator[None]:
        self.clock = Clock()
        with serving(clock=self.clock) as self.served:
            yield

    def start(self, incarnation: str, node_id: int | None = None) -> SilentAgent:
        agent = self.served.agent(len(self.served.agents), incarnation)
        settings = msgspec.structs.replace(SETTINGS, min_nodes=4)
        agent.say_join(name="host", node_id=node_id, settings=settings)
        return agent

    def refusal_of(self, agent: SilentAgent) -> str:
        with pytest.raises(MasterError) as refused:
            agent.session.wait(lambda newest: newest, 0.0)
        return str(refused.value)

    def test_under_one_name_each_gets_an_id(self) -> None:
        first = self.start("a")
        assert first.waits_as() == 0
        assert [self.start(name).waits_as() for name in "bc"] == [1, 2]
        nodes = self.served.get("status")[1]["nodes"]
        names = ["host", "host (2)", "host (3)"]
        assert [(node["id"], node["name"]) for node in nodes] == list(enumerate(names))
        # The second dies and starts again: it keeps its id while the first lives.
        self.clock.now += OVERDUE
        self.served.beat(0)
        assert self.start("d").waits_as() == 1

    def test_under_one_id_the_second_is_refused(self) -> None:
        first = self.start("a", 0)
        assert first.waits_as() == 0
        self.served.master.live.agents["a"].pause = 6.0  # of a job that sends few heartbeats
        self.clock.now += 5.0
        second = self.start("b", 0)
        assert "died or will be heard soon" in self.refusal_of(second)
        self.clock.now += 1.0
        self.served.beat(0)
        wait_until(
            lambda: "node id 0 belongs to another agent, which lives" in self.refusal_of(second),
            "it is refused",
        )
        self.clock.now += 7.1
        wait_until(lambda: second.session.newest is not None, "it has the id now")
        assert second.waits_as() == 0
        assert first.shown(Rejected).reason == "another agent has taken over node id 0"

    def test_one_that_has_ended_just_now_may_begin_another_session(self) -> None:
        first = self.start("a", 3)
        assert first.waits_as() == 3
        first.session.end(0.0)
        second = self.start("b", 3)
        assert "died or will be heard soon" in self.refusal_of(second)
        self.clock.now += OVERDUE
        assert second.waits_as() == 3


def test_a_silent_node_is_lost() -> None:
    clock = Clock()
    with serving(clock=clock, heartbeat_timeout=10.0) as served:
        served.join_all([0, 1], settings=OF_TWO)
        clock.now += 6
        served.beat(0)
        clock.now += 6
        stop = served.agent(0).shown(Stop)
        assert stop.reason == "node 1 left or died"
        # It lives, and learns in its next session that it is not in the world any more.
        wait_until(lambda: served.agent(1).session.silence > 0, "its session ends")
        served.agent(1).beat()
        assert served.agent(1).shown(Stop).reason == "round 1 is over for node 1"


def test_a_pause_between_steps_is_shown() -> None:
    clock = Clock()
    with serving(clock=clock, heartbeat_timeout=1e6) as served:
        served.join_all([0, 1], settings=OF_TWO)
        for step in (1, 2):
            clock.now += 1
            served.beat(0, {0: RankProgress(step=step, time=0.0)})
        clock.now += 100
        shown = CliRunner().invoke(cli, ["status", served.url]).output
        with urllib.request.urlopen(f"{served.url}/metrics") as reply:
            metrics = reply.read().decode()
    assert "2, the last one 100 s ago" in shown
    assert "remesh_step_age_seconds 100.0" in metrics


class TestNodesOfAMasterThatStoodStill:
    """What a node says must count before its silence does."""

    @contextmanager
    def master_of_two(self, clock: Clock, journal: type[Journal] = Journal) -> Iterator[Master]:
        with closing(journal(":memory:")) as opened:
            master = Master(Policy(heartbeat_timeout=10.0), opened, clock)
            for number in (0, 1):
                master.apply(join_of(number, settings=Settings(min_nodes=2, max_nodes=2)))
                on_message(master.live, f"{number}a", clock())
            assert active_in(master) == {0, 1}
            yield master

    def beat(self, master: Master, session: int, node: int = 0) -> None:
        connection = Connection(session, lambda _: None, lambda: self.ended.append(session))
        master.on_message(connection, Beat(node_id=node, incarnation=f"{node}a", round=1))

    @pytest.fixture(autouse=True)
    def _count_ended_sessions(self) -> None:
        self.ended: list[int] = []

    def test_they_are_not_lost_before_they_can_be_heard(self) -> None:
        clock = Clock()
        with self.master_of_two(clock) as master:
            clock.now += 60
            master.tick(late=59.75)
            assert active_in(master) == {0, 1}
            clock.now += 11
            on_message(master.live, "0a", clock())
            master.tick()
            assert active_in(master) == {0}

    def test_nor_while_they_wait_for_the_journal(self) -> None:
        clock = Clock()

        class SlowJournal(Journal):
            def write(self, job: JobState, time: float) -> None:
                clock.now += 60
                super().write(job, time)

        async def beat_both(master: Master) -> None:
            for session in (0, 1):
                self.beat(master, session, node=session)
            await master.written()
            for session in (0, 1):
                self.beat(master, session, node=session)
            master.tick()

        with self.master_of_two(clock, SlowJournal) as master:
            asyncio.run(beat_both(master))
            assert active_in(master) == {0, 1}

    def test_a_session_is_ended_when_its_agent_speaks_in_another(self) -> None:
        """The first may look open for hours, if the network was cut."""

        async def speak_twice(master: Master) -> None:
            for session in (0, 1):
                self.beat(master, session)
            await master.written()

        with self.master_of_two(Clock()) as master:
            asyncio.run(speak_twice(master))
        assert self.ended == [0]

    def test_an_agent_that_is_refused_is_not_remembered(self) -> None:
        with self.master_of_two(Clock()) as master:
            other = Settings(min_nodes=3, max_nodes=3)
            message = join_of(7, node_id=None, incarnation="x", settings=other)
            said = "other options than the job\nIt has --nnodes 3:3, the job --nnodes 2:2;"
            with pytest.raises(RefusedError, match=said):
                master.on_message(Connection(0, lambda _: None, lambda: None), message)
            assert "x" not in master.live.agents


def active_in(master: Master) -> set[int]:
    """Ids of the nodes that train."""
    return set(master.job.active)


def test_an_operator_takes_a_node_out_and_back(tmp_path: Path) -> None:
    def order(served: Served, *words: str) -> str:
        done = CliRunner().invoke(cli, ["node", *words, "--master", served.url])
        return done.output

    journal = tmp_path / "journal"
    with serving(journal, save_grace=0.0) as served:
        served.join_all([0, 1, 2])
        for name in ("host-9", "9" * 5000, "01"):
            known = f"the job has no node {name}; it has host-0, host-1"
            assert known in order(served, "exclude", name)
        assert "not excluded by hand" in order(served, "readmit", "host-1")
        assert "is excluded; see" in order(served, "exclude", "host-1", "--reason", "its fan")
        assert served.agent(0).shown(Stop).reason == "node 1 excluded by hand"
        served.agent(1).say_join()
        assert served.join_all([0, 2])[2].num_nodes == 2
        assert "its fan" in served.agent(1).waiting().reason
        assert "cannot go on without node 2" in order(served, "exclude", "2")
        status = served.master.job
    with serving(journal, save_grace=0.0) as served:
        assert served.master.job.held == status.held == {1: "its fan"}
        assert ask(served.url, "node", {"node": 1})[0] == 400
        assert "may be used again" in order(served, "readmit", "1")
        served.join_all([0, 1, 2], after_round=2)
        for number in range(3):
            served.agent(number).leave(Outcome.SUCCEEDED)
        served.agent(0).shown(JobEnded)
        assert "the job has succeeded" in order(served, "exclude", "1")


def test_the_end_of_a_session_says_that_the_master_has_what_was_said(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as served:
        served.join_all([0, 1])
        served.agent(1).leave(Outcome.FAILED)
        assert served.agent(1).session.end(LONG)
        assert active_in(served.master) == {0}
        history = served.master.job.history
    with closing(Journal(tmp_path / "journal")) as journal:
        assert journal.load(Policy())[0].history == history


def test_a_check_finds_the_faulty_node_before_training() -> None:
    # No world has fewer than four nodes: it does not depend on time who is in it.
    settings = msgspec.structs.replace(SETTINGS, min_nodes=4)

    def take_part(agent: SilentAgent) -> Assignment | Rejected:
        while True:
            content = agent.next_content()
            if isinstance(content, Assignment | Rejected):
                return content
            if isinstance(content, NodeTest):
                group = [member.id for member in content.group]
                passed = len(group) == 1 or 2 not in group
                result = TestResult(passed=passed, broken=False)
                report = ReportTest(
                    **agent.sender(),
                    check=content.check,
                    test_round=content.test_round,
                    result=result,
                )
                agent.session.say(report)

    with serving(check=True, check_timeout=LONG) as served:
        for number in range(4):
            served.agent(number).say_join(settings=settings)
        with ThreadPoolExecutor(5) as pool:
            parts = [pool.submit(take_part, served.agent(number)) for number in range(4)]
            rejected = parts[2].result()
            assert isinstance(rejected, Rejected)
            assert "check 1: failed with node 0" in rejected.reason
            served.agent(4).say_join(settings=settings)
            parts[2] = pool.submit(take_part, served.agent(4))
            places = [part.result() for part in parts]
    ranks = [place.node_rank for place in places if isinstance(place, Assignment)]
    assert ranks == [0, 1, 3, 2]


class TestRestart:
    def test_instructions_go_on_with_higher_numbers(self, tmp_path: Path) -> None:
        numbers = []
        for _ in range(3):
            with serving(tmp_path / "journal") as served:
                served.agent(0).say_join()
                served.agent(0).waiting()
                newest = served.agent(0).session.newest
                assert newest is not None
                numbers.append(newest.number)
        assert numbers == sorted(set(numbers))

    def test_two_masters_on_one_journal_are_refused(self, tmp_path: Path) -> None:
        refused = pytest.raises(StorageError, match="is another master running")
        with serving(tmp_path / "journal"), refused, serving(tmp_path / "journal"):
            pass


class TestRefusals:
    @pytest.mark.parametrize(
        "host", ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    )
    def test_tokens_may_be_written_in_any_script(self, host: str) -> None:
        token = "clé-ключ"
        with serving(options=ServerOptions(host=host, token=token)) as served:
            assert Client(served.url, token=token).status().phase == "waiting"
            served.agent(0).say_join()
            assert served.agent(0).waits_as() == 0
            for wrong in ("clé", "ключ", "x"):
                with pytest.raises(MasterError, match="token is missing or wrong"):
                    Client(served.url, token=wrong).status()
            parts = urlsplit(served.url)
            with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as wire:
                headers = {"Authorization": b"Bearer \xff\xfe"}
                wire.request("GET", f"/v{PROTOCOL_VERSION}/status", headers=headers)
                assert wire.getresponse().status == 401

    def test_the_url_of_one_that_listens_everywhere_names_this_machine(self) -> None:
        url = ServerOptions(host="0.0.0.0", token="right").url(29400)
        assert url == f"http://{socket.gethostname()}:29400"

    def test_listening_everywhere_without_a_token(self) -> None:
        with pytest.raises(ValueError, match="any process that reaches the port could control"):
            ServerOptions(host="0.0.0.0")

    def test_what_is_no_request(self, served: Served) -> None:
        assert ask(served.url, "node", {"node": 7})[0] == 400
        assert ask(served.url, "dance", {})[0] == 404
        assert ask(served.url, "dance")[0] == 404
        status, reply = ask(served.url, "session")
        assert (status, "a proxy before the master must forward" in reply["error"]) == (
            426,
            True,
        )

    def test_another_version_of_the_protocol(self, served: Served) -> None:
        status, reply = ask(served.url, "join", {}, version=1)
        assert status == 400
        assert "install the same remesh everywhere" in reply["error"]

    def test_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("remesh.elastic.server.MAX_MESSAGE_BYTES", 1000)
        with serving() as served:
            with pytest.raises(urllib.error.HTTPError, match="413") as refused:
                urllib.request.urlopen(f"{served.url}/v{PROTOCOL_VERSION}/node", b"x" * 2000)
            refused.value.close()
