"""Connections that say nothing, or never a whole request, beside the nodes of a job."""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from remesh.elastic.client import Client
from remesh.elastic.protocol import PROTOCOL_VERSION
from remesh.elastic.server import QUIET_SECONDS, RepeatFilter
from tests.elastic.agents import SilentAgent, patient_status
from tests.elastic.cluster import MasterProcess
from tests.waiting import wait_until

ORDER = b"POST /v%d/node HTTP/1.1\r\nHost: x\r\n" % PROTOCOL_VERSION
HALF_OPEN = (b"", ORDER[:17], ORDER + b"Content-Le")
"""What connections say that never get to a whole request."""
HALF_A_BODY = ORDER + b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"node'


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


@pytest.mark.timeout(600)
def test_half_open_connections_are_closed_and_nodes_beat_beside_them(tmp_path: Path) -> None:
    """The master may have 400 files open, and 300 connections never say what they want."""
    options = ("--port", "0", "--heartbeat-timeout", "600")
    master = MasterProcess(tmp_path, *options, limit="ulimit -n 400")
    try:
        url = master.url
        agent = SilentAgent(url, 0)
        agent.say_join()
        watching = Client(url)
        for body in (False, True):  # there is room for the second 300 when the first are closed
            with half_open(url, 300, body=body) as opened:
                wait_until(
                    lambda: [node.id for node in patient_status(watching).nodes] == [0], "the join"
                )
                before = num_requests(watching)
                for _ in range(10):
                    agent.beat()
                wait_until(lambda: num_requests(watching) > before + 10, "ten beats")  # noqa: B023
                assert patient_status(watching).phase == "waiting"
                for wire in opened:  # what is left of them is an answer, or nothing
                    while wire.recv(4096):
                        pass
        agent.session.end(0.0)
    finally:
        master.kill()
    said = master.log().splitlines()
    assert len(said) < 20, said


def num_requests(client: Client) -> int:
    """How often the master has been asked; the one that wants to know included."""
    with urllib.request.urlopen(f"{client.url}/metrics", timeout=120) as reply:
        text = reply.read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("remesh_requests_total ")]
    return int(float(line.split()[1]))


def test_a_message_is_logged_once_a_minute() -> None:
    now = 0.0
    quiet = RepeatFilter(lambda: now)

    def say(text: str, *args: object) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "", 0, text, args, None)
        return record.getMessage() if quiet.filter(record) else None

    assert say("from %s", "a") == "from a"
    assert [say("from %s", name) for name in "bcd"] == [None] * 3
    assert say("another") == "another"
    now = QUIET_SECONDS
    assert say("from %s", "e") == "from e"
    assert say("from %s", "f") is None
