"""Sessions of agents: what breaks them, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.client import HINT, Client
from remesh.elastic.node import LEAVE_PATIENCE, NodeClient
from remesh.elastic.nodes import Node, Outcome, Settings
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    HEARTBEAT_TIMEOUT,
    PROTOCOL_VERSION,
    Assignment,
    Beat,
    Content,
    Instruction,
    JobEnded,
    Join,
    Leave,
    Message,
    Problem,
    ReportFailures,
    TestResult,
    Waiting,
)
from remesh.elastic.server import ServerOptions
from remesh.elastic.session import Session
from remesh.errors import MasterError
from tests.elastic.agents import Served, failure_of, join_of, serving
from tests.elastic.test_client import always_well, wire
from tests.elastic.test_secure import make_certificate
from tests.waiting import wait_until

SETTINGS = Settings(min_nodes=2, max_nodes=2)
JOIN = join_of(0, name="n", incarnation="a", num_processes=8, settings=SETTINGS)
BEAT = Beat(node_id=0, incarnation="a", round=1, ranks={0: RankProgress(step=1, time=-0.1)})
NODE = Node(id=0, incarnation="a", name="n", address="", num_processes=8)
PLACED = Assignment(1, 0, 1, 0, 8, NODE)
ENDED = JobEnded(Outcome.FAILED, "no restart left")
RESULT = TestResult(passed=True, broken=False)
LEAVE = Leave(node_id=0, incarnation="a", round=1, outcome=Outcome.SUCCEEDED)
ENCODED = [msgspec.msgpack.encode(message) for message in (JOIN, BEAT)]

NO_MESSAGES = {
    "no MessagePack": b"\xc1\xc1",
    "half of a message": ENCODED[1][:-3],
    "nested lists": b"\x82\xa4type\xa4beat\xa4else" + b"\x91" * 200_000 + b"\x90",
    "another message": msgspec.msgpack.encode({"type": "dance"}),
    "a wrong field": msgspec.msgpack.encode({"type": "beat", "node_id": "x"}),
    "text": "beat",
    "text that is no UTF-8": ENCODED[0].replace(b"\xa1n", b"\xa1\xff", 1),
}


def talk(url: str, sent: list[bytes | str]) -> list[Instruction | Problem]:
    """What the master says to an agent until it ends the session."""

    async def main() -> list[Instruction | Problem]:
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{url}/v{PROTOCOL_VERSION}/session") as wire,
        ):
            for one in sent:
                await (wire.send_str(one) if isinstance(one, str) else wire.send_bytes(one))
            said = [message.data async for message in wire]
        return [msgspec.msgpack.decode(one, type=Instruction | Problem) for one in said]

    return asyncio.run(main())


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_what_is_no_message_ends_its_session_and_no_other(
    data: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as served, caplog.at_level(logging.WARNING):
        served.agent(0).say_join()
        served.agent(0).waiting()
        (problem,) = talk(served.url, [data])
        assert isinstance(problem, Problem)
        assert not problem.again
        served.beat(0)
        assert served.agent(0).session.silence == 0
    assert "a session with 127.0.0.1 is ended, it sent no message" in caplog.text


@contextlib.contextmanager
def upgraded(url: str, after: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has asked for a session, and sent some bytes after that."""
    head = f"GET /v{PROTOCOL_VERSION}/session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), 120) as wire:
        wire.sendall(head.encode() + after)
        yield wire


def test_any_bytes_after_the_upgrade_harm_nothing(served: Served) -> None:
    @given(st.binary(max_size=100))
    def play(data: bytes) -> None:
        with upgraded(served.url, data) as wire:
            wire.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while wire.recv(1 << 16):
                    pass

    play()
    assert served.get("status")[0] == 200


def test_one_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr("remesh.elastic.server.MAX_MESSAGE_BYTES", 1000)
    assert talk(served.url, [bytes(2000)]) == []


NOT_TRUSTED = r"is not trusted\n.*certificate(.|\n)* with --tls-ca"


def test_a_session_over_https(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    options = ServerOptions(token="right", tls=tls)
    with serving(options=options, heartbeat_timeout=HEARTBEAT_TIMEOUT) as served:
        for trusted, error in ((str(certificate), ""), (None, NOT_TRUSTED)):
            client = Client(served.url, token="right", tls_ca=trusted)
            if error:
                with pytest.raises(MasterError, match=error):
                    client.status()
            with session_of(client) as session:
                session.say(JOIN)
                if error:
                    with pytest.raises(MasterError, match=error):
                        session.wait(lambda newest: newest, 60.0)
                else:
                    assert session.wait(lambda newest: newest, 60.0).content == WAITS
        plain = Client(served.url.replace("https", "http"), token="right")
        with pytest.raises(MasterError, match="its URL begins with https"):
            plain.status()
        with session_of(plain) as session, pytest.raises(MasterError, match="begins with https"):
            session.wait(lambda newest: newest, 0.0)


WAITS = Waiting("1 nodes are ready, the world has 2 to 2 in multiples of 1")


@contextlib.contextmanager
def session_of(client: Client, beat: Callable[[], Beat | None] = lambda: None) -> Iterator[Session]:
    session = Session(client, beat, lambda: 3600.0)
    try:
        yield session
    finally:
        session.end(0.0)


def shown(number: int, content: Content) -> Instruction:
    """An instruction for node 0."""
    return Instruction(number=number, node_id=0, content=content)


class Fake:
    """A master that answers each message with the next of its replies, or again with the last.

    A reply is the content of an instruction, an instruction or a problem, or a function that makes
    it of the message; None ends the session.
    """

    def __init__(self, *replies: Any) -> None:
        self._replies = list(replies)
        self.heard: list[Message] = []
        self.num_sessions = 0
        self.url = ""
        self._ready = threading.Event()
        self._over: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _session(self, request: aiohttp.web.Request) -> aiohttp.web.WebSocketResponse:
        wire = aiohttp.web.WebSocketResponse()
        await wire.prepare(request)
        self.num_sessions += 1
        async for message in wire:
            self.heard.append(msgspec.msgpack.decode(message.data, type=Message))
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            if callable(reply):
                reply = reply(self.heard[-1])
            if reply is None:
                break
            if not isinstance(reply, Instruction | Problem):
                reply = shown(len(self.heard), reply)
            await wire.send_bytes(msgspec.msgpack.encode(reply))
        return wire

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = aiohttp.web.Application()
        app.router.add_get(f"/v{PROTOCOL_VERSION}/session", self._session)
        runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site.port}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


class TestRepeats:
    def test_what_holds_is_said_again_in_a_new_session(self) -> None:
        with Fake(None, None, WAITS) as master, session_of(Client(master.url)) as session:
            session.say(JOIN)
            assert session.wait(lambda newest: newest.content, 60.0) == WAITS
            session.say(BEAT)
            assert master.heard[:3] == [JOIN] * 3
            assert master.num_sessions == 3

    def test_failures_hold_until_the_node_is_in_another_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("remesh.elastic.session.PAUSE", 3600.0)

        def says(message: Message) -> Instruction | None:
            if isinstance(message, Join):
                content = ENDED if message.after_round else PLACED
                return shown(3 if message.after_round else 1, content)
            is_lost = isinstance(message, ReportFailures) and master.num_sessions == 1
            return None if is_lost else shown(2, WAITS)

        with Fake(says) as master:
            client = Client(master.url, patience=60.0)
            node = NodeClient(client, JOIN, lambda _test: RESULT, beat_seconds=3600.0)
            assert node.join() == PLACED
            node.say(ReportFailures, failures=(failure_of(0),))
            wait_until(lambda: node.silence > 0, "the end of the session")
            assert node.join() == ENDED
            node.close()
            said = [type(one) for one in master.heard if not isinstance(one, Beat)]
            assert said == [Join, ReportFailures, ReportFailures, Join]

    def test_a_master_that_sends_an_agent_away_is_not_asked_again_at_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("remesh.elastic.session.PAUSE", 3600.0)
        away = Problem("later", again=True)
        with Fake(away) as master, caplog.at_level(logging.WARNING):
            with session_of(Client(master.url)) as session:
                session.say(JOIN)
                wait_until(lambda: "later; trying again" in caplog.text, "the end of the session")
                session.hurry()
                wait_until(lambda: master.num_sessions == 2, "another session")
            assert master.num_sessions <= 3  # the end may begin one

    @pytest.mark.parametrize(
        ("replies", "number"),
        [
            pytest.param((5, 3, 7), 7, id="an older one replaces no newer one"),
            pytest.param((5, None, 3), 3, id="another master may count from a lower one on"),
        ],
    )
    def test_numbers_of_instructions(self, replies: tuple[int | None, ...], number: int) -> None:
        said = [each and shown(each, Waiting(str(each))) for each in replies]
        with Fake(*said) as master, session_of(Client(master.url)) as session:
            for place in range(3):
                session.say(BEAT)
                wait_until(lambda: len(master.heard) > place, "the message")  # noqa: B023
            found = session.wait(lambda one: one if one.number == number else None, 60.0)
            assert found.content == Waiting(str(number))

    def test_text_that_cannot_be_sent_is_an_error_of_its_sender(self) -> None:
        with Fake(WAITS) as master, session_of(Client(master.url)) as session:
            with pytest.raises(MasterError, match="Join cannot be sent"):
                session.say(msgspec.structs.replace(JOIN, name="x\udcff"))
            session.say(JOIN)
            assert session.wait(lambda newest: newest.content, 60.0) == WAITS

    def test_a_session_that_fails_is_told_to_those_who_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_session: Session, _http: object) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(Session, "_try_once", fail)
        session = Session(Client("http://127.0.0.1:1"), lambda: None, lambda: 3600.0)
        with pytest.raises(MasterError, match=r"the session with the master is lost: .*injected"):
            session.wait(lambda newest: newest, 60.0)

    def test_what_is_said_before_the_end_is_confirmed(self) -> None:
        with Fake(WAITS) as master:
            session = Session(Client(master.url), lambda: None, lambda: 3600.0)
            session.say(LEAVE)
            assert session.end(60.0)
            assert master.heard == [LEAVE]

    def test_so_is_what_is_said_while_earlier_messages_are_sent(self) -> None:
        made = threading.Event()
        ended: list[Future[bool]] = []

        def beat() -> None:
            """The thread of the session is at sending; meanwhile the node leaves."""
            made.wait()
            if not ended:
                session.say(LEAVE)
                ended.append(pool.submit(session.end, 60.0))
                wait_until(lambda: session._ends is not None, "the node ends its session")

        with Fake(WAITS) as master, ThreadPoolExecutor(1) as pool:
            session = Session(Client(master.url), beat, lambda: 3600.0)
            made.set()
            wait_until(lambda: bool(ended), "a heartbeat is due")
            assert ended[0].result()
            assert master.heard == [LEAVE]

    def test_without_a_master_it_is_not(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            session = Session(Client(url), lambda: None, lambda: 3600.0)
            session.say(LEAVE)
            with pytest.raises(MasterError, match="is it running, and can this machine reach it"):
                session.wait(lambda newest: newest, 0.0)
            assert not session.end(0.0)

    def test_a_master_that_stops_while_it_refuses_is_asked_after_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with wire(always_well, status=503) as master:
            client = Client(master.url)
            monkeypatch.setattr(client, "refusal", lambda _name: f"no answer{HINT}")
            with session_of(client) as session, pytest.raises(MasterError) as raised:
                session.wait(lambda newest: newest, 0.0)
        assert str(raised.value) == f"no answer{HINT}"

    def test_a_master_that_comes_back_elsewhere_is_found(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "url"
        with Fake(WAITS) as first:
            file.write_text(first.url)
            session = Session(Client(str(file)), lambda: None, lambda: 3600.0)
            session.say(JOIN)
            session.wait(lambda newest: newest, 60.0)
        with Fake(WAITS) as second, caplog.at_level(logging.WARNING):
            file.write_text(second.url)
            wait_until(lambda: "the master answers again, after" in caplog.text, "the session")
            assert second.heard == [JOIN]
            assert session.end(60.0)
        assert "; trying again" in caplog.text
        assert f"the master is at {second.url} now; it was at {first.url}" in caplog.text


def test_an_agent_that_does_not_read_is_not_waited_for(served: Served) -> None:
    with upgraded(served.url):
        places = served.join_all([0, 1])
        assert {place.round for place in places.values()} == {1}


def waiting_node(url: str) -> NodeClient:
    """A node that has an id and sends heartbeats, as often as its master wants."""
    first = join_of(0, node_id=None, settings=Settings(min_nodes=1, max_nodes=2))
    # Longer than a node may be silent.
    node = NodeClient(Client(url), first, lambda _test: RESULT, beat_seconds=3600.0)

    def join() -> None:
        with contextlib.suppress(MasterError):
            node.join()

    threading.Thread(target=join, daemon=True).start()
    # The other thread takes it from the first instruction, which may be there before.
    wait_until(lambda: node._node_id is not None, "its id")
    return node


def test_a_node_that_comes_after_the_end_says_that_it_trains_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Fake(ENDED) as master:
        node = NodeClient(Client(master.url), JOIN, lambda _test: RESULT)
        assert node.join() == ENDED
        node.close()
    assert "before this node joined: it trains nothing\nFor a new job start a master" in caplog.text


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_node_that_goes_in_any_case_has_little_patience(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    end = Session.end

    def end_at_once(session: Session, seconds: float) -> bool:
        asked.append(seconds)
        return end(session, 0.0) or True

    with Fake(QUICK) as master:
        node = waiting_node(master.url)
        monkeypatch.setattr(Session, "end", end_at_once)
        node.leave(outcome, "")
        assert asked == [node.client.patience if outcome is Outcome.SUCCEEDED else LEAVE_PATIENCE]


def beats_of(master: Fake) -> list[Beat]:
    return [message for message in master.heard if isinstance(message, Beat)]


QUICK = msgspec.structs.replace(shown(1, Waiting("more nodes")), heartbeat_timeout=0.4)


def test_each_heartbeat_says_that_the_next_follows_in_a_quarter_of_the_time_for_silence() -> None:
    with Fake(QUICK) as master:
        node = waiting_node(master.url)
        wait_until(lambda: len(beats_of(master)) >= 3, "three heartbeats")
        node.close()
    assert {beat.pause for beat in beats_of(master)} == {0.1}
