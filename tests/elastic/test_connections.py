"""Connections that say nothing, or never a whole request, beside the nodes of a job."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from remesh.elastic.client import Client
from remesh.elastic.connections import IDLE_SECONDS, REQUEST_SECONDS, Connections
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import Master
from remesh.elastic.node import NodeClient
from remesh.elastic.protocol import Join, TestResult
from remesh.elastic.rendezvous import Settings
from remesh.elastic.server import QUIET_SECONDS, RepeatFilter, ServerOptions, ServerThread
from remesh.errors import MasterError
from tests.elastic.cluster import REMESH
from tests.elastic.test_master import ask, join, speaker
from tests.waiting import wait_until

HALF_OPEN = (b"", b"POST /v2/beat HT", b"POST /v2/beat HTTP/1.1\r\nHost: x\r\nContent-Le")
"""What connections say that never get to a whole request."""
HALF_A_BODY = (
    b"POST /v2/beat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b'Content-Length: 100\r\n\r\n{"node'
)


class TestWhichHaveToGo:
    def test_those_that_have_not_asked_in_time(self) -> None:
        connections = Connections(10)
        silent, asking, idle = (connections.open(0.0) for _ in range(3))
        asking.begin_request()
        idle.begin_request()
        idle.end_request(1.0)
        assert connections.overdue(REQUEST_SECONDS) == []
        assert connections.overdue(REQUEST_SECONDS + 1) == [silent]
        connections.close(silent)
        assert connections.overdue(IDLE_SECONDS + 1) == []
        assert connections.overdue(IDLE_SECONDS + 2) == [idle]

    def test_room_is_made_by_those_that_are_missed_least(self) -> None:
        connections = Connections(4)
        busy, idle, idle_since_long, silent = (connections.open(float(n)) for n in range(4))
        for connection in (busy, idle, idle_since_long):
            connection.begin_request()
        idle.end_request(9.0)
        idle_since_long.end_request(5.0)
        order = []
        while (least := connections.first_to_close()) is not None:
            order.append(least)
            connections.close(least)
        assert order == [silent, idle_since_long, idle]
        assert len(connections) == 1


@contextlib.contextmanager
def half_open(url: str, count: int, *, body: bool = False) -> Iterator[list[socket.socket]]:
    """Connections that never get to a whole request, and are opened anew when they are closed."""
    parts = urlsplit(url)
    texts = (HALF_A_BODY,) if body else HALF_OPEN
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            wire = stack.enter_context(
                socket.create_connection((str(parts.hostname), parts.port or 0), timeout=120)
            )
            with contextlib.suppress(OSError):  # it may have been closed to make room
                wire.sendall(texts[number % len(texts)])
            opened.append(wire)
        yield opened


class Beating:
    """A real agent's thread of heartbeats; the node waits for another one that never comes."""

    def __init__(self, url: str) -> None:
        first = Join(
            name="node",
            node_id=0,
            incarnation="a",
            address="127.0.0.1",
            num_processes=1,
            settings=Settings(min_nodes=2, max_nodes=2),
        )
        result = TestResult(passed=True, broken=False, seconds=0.0)
        self.is_over = False
        self.client = Client(url, patience=120.0, sleep=self._sleep)
        self.node = NodeClient(self.client, first, lambda _node, _test: result, beat_seconds=0.05)
        self.thread = threading.Thread(target=self._join, daemon=True)

    def _sleep(self, seconds: float) -> None:
        if self.is_over:
            raise MasterError("the test is over")
        time.sleep(seconds)

    def _join(self) -> None:
        with contextlib.suppress(MasterError):
            self.node.join()

    def close(self) -> None:
        self.is_over = True
        self.thread.join()
        self.node.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("body", [False, True])
def test_nodes_beat_beside_more_half_open_connections_than_the_master_may_have(
    tmp_path: Path, body: bool
) -> None:
    """The master may have 100 files open, and 300 connections never say what they want."""
    command = " ".join([*REMESH, "master", "--port", "0", "--heartbeat-timeout", "600"])
    with (tmp_path / "log").open("wb") as log:
        master = subprocess.Popen(
            ["bash", "-c", f"ulimit -n 100; exec {command}"], stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert master.stdout is not None
        url = master.stdout.readline().decode().strip()
        beating = Beating(url)
        with half_open(url, 300, body=body):
            beating.thread.start()
            watching = Client(url, patience=120.0)
            wait_until(lambda: [node.id for node in watching.status().nodes] == [0], "the join")
            num_requests = beating_of(watching)
            wait_until(lambda: beating_of(watching) > num_requests + 10, "ten beats")
            with half_open(url, 300, body=body):
                num_requests = beating_of(watching)
                wait_until(lambda: beating_of(watching) > num_requests + 10, "ten more")
            watching.close()
        master.kill()
        beating.close()
    finally:
        master.kill()
        master.communicate()
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) < 20, said
    assert any("too many connections are open" in line for line in said)


def beating_of(client: Client) -> int:
    """How often the master has been asked; the one that wants to know included."""
    import http.client

    parts = urlsplit(client.url)
    with contextlib.closing(
        http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    ) as wire:
        wire.request("GET", "/metrics")
        text = wire.getresponse().read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("remesh_requests_total ")]
    return int(float(line.split()[1]))


def test_wrong_tokens_shut_nobody_out() -> None:
    """Those that know the token come from the same address, as behind a gateway."""

    def make() -> Master:
        return Master(Policy(), Journal(":memory:"))

    options = ServerOptions(token="right", max_requests_per_second=1.0)
    with ServerThread(make, options) as server:
        with contextlib.closing(Client(server.url, token="wrong")) as stranger:
            for _ in range(50):
                with pytest.raises(MasterError):
                    stranger.status()
        with contextlib.closing(Client(server.url, token="right")) as known:
            assert known.status().phase == "waiting"


class TestRepeats:
    def test_a_message_is_said_once_and_how_often_it_was_repeated(self) -> None:
        now = 0.0
        quiet = RepeatFilter(lambda: now)

        def say(text: str, *args: object) -> str | None:
            record = logging.LogRecord("x", logging.WARNING, "", 0, text, args, None)
            return record.getMessage() if quiet.filter(record) else None

        assert say("from %s", "a") == "from a"
        assert [say("from %s", name) for name in "bcd"] == [None] * 3
        assert say("another") == "another"
        now = QUIET_SECONDS
        assert say("from %s", "e") == "from e (3 more like this since the last one)"
        assert say("from %s", "f") is None


def test_the_requests_of_a_node_are_counted_by_themselves() -> None:
    """Others behind the same address ask too often."""

    def make() -> Master:
        return Master(Policy(heartbeat_timeout=600.0), Journal(":memory:"))

    # A bucket for one request, which is full again after five seconds.
    with ServerThread(make, ServerOptions(max_requests_per_second=0.2)) as server:
        assert join(server.url, 0, wait=0.0)["type"] == "Waiting"
        while ask(server.url, "status", method="GET")[0] == 200:
            pass
        assert ask(server.url, "beat", speaker(0, 0))[0] == 200
