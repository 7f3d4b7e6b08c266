"""The master over real sockets, with a real journal."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec
import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic import frames
from remesh.elastic.client import Client
from remesh.elastic.frame_server import MAX_SENDERS, RateLimit
from remesh.elastic.job import Job, NodeEvent, Policy
from remesh.elastic.journal import Journal
from remesh.elastic.live import ALIVE_SECONDS, hear
from remesh.elastic.master import Master
from remesh.elastic.protocol import PURPOSES, Beat, Join, name_of
from remesh.elastic.rendezvous import Settings
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.errors import MasterError, StorageError
from tests.waiting import wait_until

SETTINGS = {"min_nodes": 2, "max_nodes": 4, "node_unit": 1, "last_call": 0.2, "join_timeout": 60}


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


_KEPT: dict[str, dict[str, http.client.HTTPConnection]] = {}
"""The connection of each agent, by the server's URL and its incarnation: one that lives has one."""
_LOCK = threading.Lock()


@contextmanager
def start(
    tmp_path: Path,
    options: ServerOptions | None = None,
    *,
    clock: Clock | None = None,
    **policy: Any,
) -> Iterator[ServerThread]:
    def make() -> Master:
        return Master(Policy(**policy), Journal(tmp_path / "journal.sqlite"), clock)

    with ServerThread(make, options or ServerOptions()) as server, connections_kept(server.url):
        yield server


@contextmanager
def connections_kept(url: str) -> Iterator[None]:
    """Keep a connection for each agent that asks below a URL, for one without has died."""
    _KEPT[url] = {}
    yield
    for connection in _KEPT.pop(url).values():
        connection.close()


_FRAMED: set[str] = set()
"""Servers to which nodes send their requests as frames."""


@pytest.fixture(params=["http", "frames"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with start(tmp_path, heartbeat_timeout=600.0) as server:
        if request.param == "frames":
            _FRAMED.add(server.url)
        yield server
        _FRAMED.discard(server.url)


def ask(
    url: str, name: str, body: object = None, token: str = "", method: str = "POST"
) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=900)
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if url in _FRAMED and isinstance(body, dict) and name in NAMES:
        status, reply = ask_by_frame(connection, name, body)
    else:
        connection.request(method, f"{parts.path}/v2/{name}", json.dumps(body), headers)
        response = connection.getresponse()
        status, reply = response.status, json.loads(response.read())
    done: http.client.HTTPConnection | None = connection
    server = next((kept for kept in list(_KEPT) if f"{url}/".startswith(f"{kept}/")), None)
    if isinstance(body, dict) and "incarnation" in body and server is not None:
        agent, kept = body["incarnation"], _KEPT[server]
        with _LOCK:
            done, kept[agent] = kept.get(agent), connection
    if done is not None:
        done.close()
    return status, reply


NAMES = {name_of(kind) for kind in PURPOSES}


def ask_by_frame(
    connection: http.client.HTTPConnection, name: str, body: dict[str, Any]
) -> tuple[int, Any]:
    assert frames.upgrade(connection, "", {})
    ranks = {int(rank): report for rank, report in body.get("ranks", {}).items()}
    request = body | {"type": name} | ({"ranks": ranks} if ranks else {})
    ends = time.monotonic() + 900
    status, text = frames.exchange(connection.sock, msgspec.msgpack.encode(request), ends)
    return status, msgspec.msgpack.decode(text)


def join(url: str, number: int, after_round: int = 0, **changes: object) -> Any:
    body = {
        "name": f"host-{number}",
        "node_id": number,
        "incarnation": f"{number}a",
        "address": "127.0.0.1",
        "num_processes": 2,
        "after_round": after_round,
        "settings": SETTINGS,
        "wait": 30.0,
    } | changes
    while True:  # as a node does, which asks again when it was not answered in time
        status, reply = ask(url, "join", body)
        assert status == 200, reply
        if reply["type"] != "Waiting" or not body["wait"]:
            return reply


def join_all(
    url: str, numbers: list[int], after_round: int = 0, **changes: object
) -> dict[int, Any]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        replies = pool.map(lambda number: join(url, number, after_round, **changes), numbers)
        return dict(zip(numbers, replies, strict=True))


def speaker(number: int, round_of_node: int) -> dict[str, object]:
    return {"node_id": number, "incarnation": f"{number}a", "round": round_of_node}


def beat(url: str, number: int, round_of_node: int, **ranks: object) -> Any:
    body = speaker(number, round_of_node) | {"ranks": ranks}
    return ask(url, "beat", body)[1]


def test_nodes_get_their_places_by_id(server: ServerThread) -> None:
    replies = join_all(server.url, [7, 3])
    assert [replies[number]["node_rank"] for number in (3, 7)] == [0, 1]
    assert replies[7] | {"leader": None} == {
        "type": "Assignment",
        "node_id": 7,
        "round": 1,
        "node_rank": 1,
        "num_nodes": 2,
        "first_rank": 2,
        "world_size": 4,
        "leader": None,
        "heartbeat_timeout": 600.0,
    }
    assert replies[7]["leader"]["id"] == 3


def test_names_keep_their_ids(tmp_path: Path) -> None:
    clock = Clock()
    with start(tmp_path, heartbeat_timeout=600.0, clock=clock) as server:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(join, server.url, 0, name="b", node_id=None, wait=0.0)
            second = pool.submit(join, server.url, 1, name="a", node_id=None, wait=0.0)
            ids = {first.result()["node_id"], second.result()["node_id"]}
        assert ids == {0, 1}
        before = first.result()["node_id"]
        clock.now += ALIVE_SECONDS + 1  # the agent before it has died
        again = join(server.url, 0, name="b", node_id=None, incarnation="new", wait=0.0)
        assert again["node_id"] == before


class TestTwoAgentsThatWouldBeOneNode:
    settings = SETTINGS | {"min_nodes": 4}

    def ask(self, url: str, incarnation: str, **changes: object) -> tuple[int, Any]:
        body = {
            "name": "host",
            "node_id": None,
            "incarnation": incarnation,
            "address": "127.0.0.1",
            "num_processes": 1,
            "after_round": 0,
            "settings": self.settings,
            "wait": 0.0,
        }
        return ask(url, "join", body | changes)

    def beat(self, url: str, number: int, incarnation: str) -> None:
        body = {"node_id": number, "incarnation": incarnation, "round": 0}
        assert ask(url, "beat", body)[0] == 200

    def test_under_one_name_each_gets_an_id(self, tmp_path: Path) -> None:
        clock = Clock()
        with start(tmp_path, clock=clock, heartbeat_timeout=600.0) as server:
            assert self.ask(server.url, "a")[1]["node_id"] == 0
            status, reply = self.ask(server.url, "b")
            assert (status, "died or will be heard soon" in reply["error"]) == (503, True)
            clock.now += 1
            self.beat(server.url, 0, "a")
            assert self.ask(server.url, "b")[1]["node_id"] == 1
            for incarnation, number in (("a", 0), ("b", 1)):
                assert self.ask(server.url, incarnation, node_id=number)[1]["type"] == "Waiting"
            # The second dies and starts again: it keeps its id while the first lives.
            clock.now += ALIVE_SECONDS + 1
            self.beat(server.url, 0, "a")
            assert self.ask(server.url, "c")[0] == 503
            clock.now += 1
            self.beat(server.url, 0, "a")
            assert self.ask(server.url, "c")[1]["node_id"] == 1
            nodes = ask(server.url, "status", method="GET")[1]["nodes"]
            assert [(node["id"], node["name"]) for node in nodes] == [(0, "host"), (1, "host (2)")]

    def test_many_under_one_name_do_not_wait_for_each_other(self, tmp_path: Path) -> None:
        clock = Clock()
        with start(tmp_path, clock=clock, heartbeat_timeout=600.0) as server:
            assert self.ask(server.url, "a")[1]["node_id"] == 0
            assert [self.ask(server.url, other)[0] for other in "bcbc"] == [503] * 4
            clock.now += 1
            self.beat(server.url, 0, "a")
            assert self.ask(server.url, "b")[1]["node_id"] == 1
            assert self.ask(server.url, "c")[0] == 503  # whether b lives is not known yet
            clock.now += 1
            self.beat(server.url, 1, "b")
            assert self.ask(server.url, "c")[1]["node_id"] == 2

    def test_under_one_id_the_second_is_refused(self, tmp_path: Path) -> None:
        clock = Clock()
        with start(tmp_path, clock=clock, heartbeat_timeout=600.0) as server:
            assert self.ask(server.url, "a", node_id=3)[0] == 200
            assert self.ask(server.url, "b", name="other", node_id=3)[0] == 503
            clock.now += 1
            self.beat(server.url, 3, "a")
            status, reply = self.ask(server.url, "b", name="other", node_id=3)
            assert status == 409
            assert "node id 3 belongs to another agent, which lives" in reply["error"]
            clock.now += ALIVE_SECONDS + 1
            assert self.ask(server.url, "b", name="other", node_id=3)[0] == 200


def test_words_of_a_round(server: ServerThread) -> None:
    join_all(server.url, [0, 1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server.url, "get", speaker(1, 1) | {"key": "k", "wait": 30})
        put = ask(server.url, "put", speaker(0, 1) | {"key": "k", "value": "host:1"})
        assert put == (200, {})
        assert waiting.result() == (200, {"value": "host:1"})
    assert ask(server.url, "get", speaker(1, 0) | {"key": "k", "wait": 0})[0] == 409


def test_a_failure_restarts_the_others_and_charges_one(server: ServerThread) -> None:
    join_all(server.url, [0, 1])
    failure = {
        "node_id": 1,
        "round": 1,
        "rank": 2,
        "local_rank": 0,
        "exit_code": -9,
        "time": 1.0,
    }
    asked = speaker(1, 1) | {"failures": [failure]}
    status, decision = ask(server.url, "failures", asked)
    assert (status, decision["action"], decision["charged"]) == (200, "restart", True)
    assert ask(server.url, "failures", asked)[1] == decision  # heard twice, charged once
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(join, server.url, 1, 1)
        while beat(server.url, 0, 1).get("restart") != "restarted":
            pass
        assert join(server.url, 0, 1)["round"] == 2
        assert back.result()["round"] == 2
    status_now = ask(server.url, "status", method="GET")[1]
    charged = {node["id"]: node["num_charged"] for node in status_now["nodes"]}
    assert charged == {0: 0, 1: 1}
    assert status_now["failures"][0]["failures"][0]["signal"] == "SIGKILL"


def test_a_silent_node_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    with start(tmp_path, clock=clock, heartbeat_timeout=10.0) as server:
        join_all(server.url, [0, 1], settings=SETTINGS | {"max_nodes": 2})
        clock.now += 6
        assert beat(server.url, 0, 1)["restart"] is None
        clock.now += 6
        while (reply := beat(server.url, 0, 1))["restart"] is None:
            pass
        assert reply["restart"] == "lost"
        assert reply["reason"] == "node 1 left or died"


def test_a_pause_between_steps_is_said_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with start(tmp_path, clock=clock, heartbeat_timeout=1e6) as server:
        # At most two, so that the world begins without a last call, which no clock would end.
        join_all(server.url, [0, 1], settings=SETTINGS | {"max_nodes": 2})
        for step in (1, 2):
            clock.now += 1
            beat(server.url, 0, 1, **{"0": {"step": step, "age": 0.0}})
        clock.now += 100
        with caplog.at_level(logging.WARNING):
            wait_until(lambda: "it may hang" in caplog.text, "the warning")
        shown = CliRunner().invoke(cli, ["status", server.url]).output
    (said,) = [each for each in caplog.records if "it may hang" in each.getMessage()]
    assert said.getMessage() == "no rank has finished a step for 100 s; it may hang"
    assert "warning: no rank has finished a step for 100 s" in shown
    assert "2, the last one 100 s ago" in shown


class TestNodesOfAMasterThatStoodStill:
    """What a node says must count before its silence does."""

    def master_of_two(self, clock: Clock, journal: Journal) -> Master:
        master = Master(Policy(heartbeat_timeout=10.0), journal, clock)
        for number in (0, 1):
            request = Join(
                node_id=number,
                incarnation=f"{number}a",
                name="",
                address="x",
                num_processes=1,
                settings=Settings(min_nodes=2, max_nodes=2),
                max_restarts=0,
            )
            master.apply(request)
            hear(master.live, number, f"{number}a", clock())
        assert active_in(master) == {0, 1}
        return master

    def test_they_are_not_lost_before_they_can_be_heard(self) -> None:
        clock = Clock()
        with closing(Journal(":memory:")) as journal:
            master = self.master_of_two(clock, journal)
            clock.now += 60
            master.tick(late=59.75)
            assert active_in(master) == {0, 1}
            clock.now += 11
            hear(master.live, 0, "0a", clock())
            master.tick()
            assert active_in(master) == {0}

    def test_nor_while_they_wait_for_the_journal(self) -> None:
        clock = Clock()

        class SlowJournal(Journal):
            def write(self, job: Job, time: float) -> None:
                clock.now += 60
                super().write(job, time)

        async def beat_both(master: Master) -> None:
            beats = [Beat(node_id=number, incarnation=f"{number}a", round=1) for number in (0, 1)]
            await asyncio.gather(*map(master.answer, beats))
            master.tick()

        with closing(SlowJournal(":memory:")) as journal:
            master = self.master_of_two(clock, journal)
            asyncio.run(beat_both(master))
            assert active_in(master) == {0, 1}


def active_in(master: Master) -> set[int]:
    """Ids of the nodes that train."""
    assert master.job.rendezvous is not None
    return set(master.job.rendezvous.active)


def test_growing_waits_for_a_checkpoint(server: ServerThread) -> None:
    join_all(server.url, [0, 1])
    progress = {"step": 5, "age": 0.0, "saved_step": 4}
    assert beat(server.url, 0, 1, **{"0": progress}) == {"reason": "", "restart": None} | {
        "save": False,
        "grow": False,
        "dump": 0,
        "outcome": None,
    }
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(join, server.url, 2)
        while not (reply := beat(server.url, 0, 1))["save"]:
            pass
        assert reply["restart"] is None
        reply = beat(server.url, 0, 1, **{"0": progress | {"step": 6, "saved_step": 6}})
        assert reply["restart"] == "grow"
        join_all(server.url, [0, 1], after_round=1)
        assert late.result()["num_nodes"] == 3


def test_a_job_whose_nodes_succeed_is_over(server: ServerThread) -> None:
    join_all(server.url, [0, 1])
    for number in (0, 1):
        ask(server.url, "leave", speaker(number, 1) | {"outcome": "succeeded"})
    assert beat(server.url, 0, 1)["outcome"] == "succeeded"
    assert join(server.url, 5)["type"] == "JobEnded"


def test_a_check_finds_the_faulty_node_before_training(tmp_path: Path) -> None:
    # No world has fewer than four nodes: it does not depend on time who is in it.
    settings = SETTINGS | {"min_nodes": 4}

    def take_part(url: str, number: int) -> Any:
        while True:
            reply = join(url, number, settings=settings)
            if reply["type"] == "Waiting":
                continue
            if reply["type"] != "NodeTest":
                return reply
            group = [member["id"] for member in reply["group"]]
            body = {
                "check": reply["check"],
                "test_round": reply["test_round"],
                "result": {
                    "passed": len(group) == 1 or 2 not in group,
                    "broken": False,
                    "seconds": 1.0,
                },
            }
            ask(url, "test", speaker(number, 0) | body)

    with (
        start(tmp_path, check=True, heartbeat_timeout=600.0, check_timeout=600.0) as server,
        ThreadPoolExecutor(5) as pool,
    ):
        parts = [pool.submit(take_part, server.url, number) for number in range(4)]
        rejected = parts[2].result()
        assert rejected["type"] == "Rejected"
        assert "check 1: failed with node 0" in rejected["reason"]
        parts[2] = pool.submit(take_part, server.url, 4)
        replies = [part.result() for part in parts]
        assert [reply["type"] for reply in replies] == ["Assignment"] * 4
        assert [reply["node_rank"] for reply in replies] == [0, 1, 3, 2]


class TestRestart:
    def test_nothing_is_lost(self, tmp_path: Path) -> None:
        with start(tmp_path, heartbeat_timeout=600.0) as server:
            join_all(server.url, [0, 1])
            ask(server.url, "put", speaker(0, 1) | {"key": "k", "value": "v"})
            before = ask(server.url, "status", method="GET")[1]
        with start(tmp_path, heartbeat_timeout=600.0) as server:
            after = ask(server.url, "status", method="GET")[1]
            assert after["history"] == before["history"]
            assert [node["state"] for node in after["nodes"]] == ["active", "active"]
            assert ask(server.url, "get", speaker(1, 1) | {"key": "k", "wait": 0})[1] == {
                "value": "v"
            }
            assert beat(server.url, 1, 1)["restart"] is None

    def test_a_join_before_it_counts_after_it(self, tmp_path: Path) -> None:
        with start(tmp_path, heartbeat_timeout=600.0) as server:
            assert join(server.url, 0, wait=0.0)["type"] == "Waiting"
        with start(tmp_path, heartbeat_timeout=600.0) as server:
            assert join(server.url, 1)["type"] == "Assignment"
            assert join(server.url, 0)["node_rank"] == 0

    def test_two_masters_on_one_journal_are_refused(self, tmp_path: Path) -> None:
        refused = pytest.raises(StorageError, match="is another master running")
        with start(tmp_path), refused, start(tmp_path):
            pass


class TestRefusals:
    def test_without_the_token(self, tmp_path: Path) -> None:
        with start(tmp_path, ServerOptions(token="secret")) as server:
            assert ask(server.url, "status", method="GET")[0] == 401
            assert ask(server.url, "status", method="GET", token="wrong")[0] == 401
            assert ask(server.url, "status", method="GET", token="secret")[0] == 200

    def test_tokens_may_be_written_in_any_script(self, tmp_path: Path) -> None:
        token = "clé-ключ"
        with start(tmp_path, ServerOptions(token=token)) as server:
            assert Client(server.url, token=token).status().phase == "waiting"
            for wrong in ("clé", "ключ", "x"):
                with pytest.raises(MasterError, match="token is missing or wrong"):
                    Client(server.url, token=wrong).status()
            parts = urlsplit(server.url)
            with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as wire:
                wire.request("GET", "/v2/status", headers={"Authorization": b"Bearer \xff\xfe"})
                assert wire.getresponse().status == 401

    def test_listening_everywhere_without_a_token(self) -> None:
        with pytest.raises(ValueError, match="any process that reaches the port could control"):
            ServerOptions(host="0.0.0.0")

    def test_other_settings_than_the_job(self, server: ServerThread) -> None:
        join(server.url, 0, wait=0.0)
        status, reply = ask(
            server.url,
            "join",
            {
                "name": "x",
                "node_id": 1,
                "incarnation": "b",
                "address": "a",
                "num_processes": 1,
                "after_round": 0,
                "settings": SETTINGS | {"max_nodes": 8},
            },
        )
        assert status == 409
        assert "start all nodes with the same options" in reply["error"]

    def test_what_is_no_request(self, server: ServerThread) -> None:
        assert ask(server.url, "beat", {"node_id": "seven"})[0] == 400
        assert ask(server.url, "dance", {})[0] == 404

    def test_another_version_of_the_protocol(self, server: ServerThread) -> None:
        parts = urlsplit(server.url)
        with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as wire:
            headers = {"Content-Type": "application/json"}
            wire.request("POST", "/v1/join", "{}", headers)
            response = wire.getresponse()
            assert response.status == 400
            assert "install the same remesh everywhere" in json.loads(response.read())["error"]

    def test_too_much(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("remesh.elastic.frame_server.MAX_REQUEST_BYTES", 1000)
        with start(tmp_path) as server:
            parts = urlsplit(server.url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
            connection.request(
                "POST", "/v2/beat", b"x" * 2000, {"Content-Type": "application/json"}
            )
            assert connection.getresponse().status == 413
            connection.close()

    def test_too_often(self, tmp_path: Path) -> None:
        # A bucket for one request, which is full again after five seconds.
        with start(tmp_path, ServerOptions(max_requests_per_second=0.2)) as server:
            statuses = [ask(server.url, "status", method="GET")[0] for _ in range(30)]
            assert statuses[0] == 200
            assert 429 in statuses


class TestRateLimit:
    def test_a_thousand_nodes_behind_one_address_are_never_refused(self) -> None:
        now = 0.0
        limit = RateLimit(ServerOptions().max_requests_per_second, lambda: now)
        for second in range(20):
            now = float(second)
            # At first each joins twice, leaves or asks for a word, and beats; then it only beats.
            for _ in range(4 * 1000 if second == 0 else 1000):
                assert limit.allows("10.0.0.1")

    def test_who_asks_too_often_does_not_shut_out_others(self) -> None:
        now = 0.0
        limit = RateLimit(1.0, lambda: now)
        assert [limit.allows("a") for _ in range(7)] == [True] * 5 + [False] * 2
        assert limit.allows("b")
        now = 2.0
        assert [limit.allows("a") for _ in range(3)] == [True, True, False]

    def test_senders_that_are_silent_are_forgotten(self) -> None:
        now = 0.0
        limit = RateLimit(1.0, lambda: now)
        for number in range(MAX_SENDERS):
            limit.allows(str(number))
        now = 100.0
        assert limit.allows("x")
        assert len(limit._buckets) == 1


def test_every_request_has_an_answer() -> None:
    """A row without an event, or an answer of its own, would fail at its first request only."""
    with closing(Journal(":memory:")) as journal:
        master = Master(Policy(), journal)
        answered = {*master._answers, *get_args(NodeEvent)}
    assert answered == set(PURPOSES)
    assert len({name_of(kind) for kind in PURPOSES}) == len(PURPOSES)
