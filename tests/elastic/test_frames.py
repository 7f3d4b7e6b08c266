"""The requests of nodes as frames, beside HTTP."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic import frames
from remesh.elastic.client import Client
from remesh.elastic.connections import REQUEST_SECONDS, Connections
from remesh.elastic.frame_server import FrameServer
from remesh.elastic.frames import FrameError, pack, split
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import Master
from remesh.elastic.protocol import Beat, Join, RankReport, Waiting
from remesh.elastic.rendezvous import Settings
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.errors import MasterError
from tests.elastic.test_secure import OPENSSL, SUBJECT
from tests.waiting import wait_until

JOIN = Join(
    name="n",
    node_id=0,
    incarnation="a",
    address="127.0.0.1",
    num_processes=8,
    settings=Settings(min_nodes=2, max_nodes=2),
)
BEAT = Beat(node_id=0, incarnation="a", round=1, ranks={0: RankReport(step=1, age=0.1)})


def make() -> Master:
    return Master(Policy(heartbeat_timeout=600.0), Journal(":memory:"))


@contextlib.contextmanager
def start(options: ServerOptions | None = None) -> Iterator[ServerThread]:
    with ServerThread(make, options or ServerOptions()) as server:
        yield server


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with start() as server:
        yield server


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies of the requests that are sent as frames."""
    seen, exchange = [], frames.exchange

    def note(wire: socket.socket, body: bytes, ends: float) -> tuple[int, bytes]:
        seen.append(body)
        return exchange(wire, body, ends)

    monkeypatch.setattr(frames, "exchange", note)
    return seen


class TestFrames:
    @given(st.lists(st.tuples(st.integers(0, 600), st.binary(max_size=50))), st.data())
    def test_they_may_be_cut_anywhere(
        self, sent: list[tuple[int, bytes]], data: st.DataObject
    ) -> None:
        wire = b"".join(pack(body, status) for status, body in sent)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)))))
        found, rest = [], b""
        for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            more, rest = split(rest + wire[begin:end], 50)
            found += more
        assert (found, rest) == (sent, b"")

    @given(st.binary(max_size=200))
    def test_whatever_comes_is_frames_and_a_rest_or_no_frame(self, data: bytes) -> None:
        try:
            found, rest = split(data, 64)
        except FrameError:
            return
        assert b"".join(pack(body, status) for status, body in found) + rest == data
        assert len(rest) < 64 + frames.HEADER.size

    def test_one_that_is_too_large_is_refused_before_it_has_come(self) -> None:
        with pytest.raises(FrameError, match="1000 bytes is announced, at most 999"):
            split(pack(bytes(1000))[: frames.HEADER.size], 999)


@contextlib.contextmanager
def raw(server: ServerThread, token: str = "") -> Iterator[socket.socket]:
    """A connection that speaks frames."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    with contextlib.closing(connection):
        assert frames.upgrade(connection, "", {"Authorization": f"Bearer {token}"})
        yield connection.sock


def read_all(wire: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := wire.recv(1 << 16):
            data += more
    return data


NO_FRAMES = {
    "a body that is too large": frames.HEADER.pack(1 << 30, 0),
    "a status": pack(msgspec.msgpack.encode(BEAT), 200),
    "no MessagePack": pack(b"\xc1\xc1"),
    "half of a message": pack(msgspec.msgpack.encode(BEAT)[:-3]),
    "nested lists": pack(b"\x82\xa4type\xa4beat\xa4else" + b"\x91" * 200_000 + b"\x90"),
    "HTTP": b"POST /v2/beat HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("data", NO_FRAMES.values(), ids=NO_FRAMES.keys())
def test_what_is_no_frame_ends_its_connection_and_no_other(
    server: ServerThread, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(Client(server.url)) as client, caplog.at_level(logging.WARNING):
        assert isinstance(client.ask(JOIN), Waiting)
        with raw(server) as wire:
            wire.sendall(data)
            assert read_all(wire) == b""
        assert isinstance(client.ask(JOIN), Waiting)
    assert "a connection from 127.0.0.1 is closed, it sent no frame" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


DAMAGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4)


def damaged(data: bytes, damages: list[tuple[int, int]]) -> bytes:
    """Bytes of which some are others."""
    changed = bytearray(data)
    for place, value in damages:
        changed[place % len(data)] = value
    return bytes(changed)


def test_any_bytes_after_the_upgrade_harm_nothing(server: ServerThread) -> None:
    sound = pack(msgspec.msgpack.encode(JOIN)) + pack(msgspec.msgpack.encode(BEAT))

    @given(st.binary(max_size=100) | DAMAGES.map(lambda damages: damaged(sound, damages)))
    def play(data: bytes) -> None:
        with raw(server) as wire:
            wire.sendall(data)
            wire.shutdown(socket.SHUT_WR)
            read_all(wire)

    play()
    with raw(server) as wire:
        body = msgspec.msgpack.encode(BEAT)
        assert frames.exchange(wire, body, time.monotonic() + 120)[0] == 200


def test_a_request_that_does_not_fit_is_refused_as_by_http(server: ServerThread) -> None:
    with raw(server) as wire:
        for body in ({"type": "beat", "node_id": "x"}, {"type": "unknown"}, [1]):
            status, reply = frames.exchange(
                wire, msgspec.msgpack.encode(body), time.monotonic() + 120
            )
            assert status == 400
            assert "error" in msgspec.msgpack.decode(reply)


def test_requests_that_come_together_are_answered_in_order(server: ServerThread) -> None:
    """Also while one of them has to wait."""
    waits = msgspec.structs.replace(JOIN, wait=0.2)
    with raw(server) as wire:
        wire.sendall(b"".join(pack(msgspec.msgpack.encode(one)) for one in (waits, BEAT, JOIN)))
        data = b""
        found: list[dict[str, object]] = []
        while len(found) < 3:
            data += wire.recv(1 << 16)
            found = [msgspec.msgpack.decode(body) for _status, body in split(data, 1 << 20)[0]]
    assert [one.get("type", "beat") for one in found] == ["Waiting", "beat", "Waiting"]


def test_the_requests_of_a_node_are_frames_and_others_http(
    server: ServerThread, exchanged: list[bytes]
) -> None:
    with contextlib.closing(Client(server.url)) as client:
        client.ask(JOIN)
        assert client.ask(BEAT).restart is not None
        assert len(exchanged) == 2
        assert client.status().phase == "waiting"
        assert len(exchanged) == 2


@pytest.mark.skipif(OPENSSL is None, reason="no openssl")
def test_frames_over_https(tmp_path: Path, exchanged: list[bytes]) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    assert OPENSSL is not None
    command = [OPENSSL, "req", "-x509", "-nodes", "-days", "2", *SUBJECT, "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    with start(ServerOptions(token="right", tls=tls)) as server:
        for number in range(10):
            client = Client(server.url, token="right", tls_ca=str(certificate))
            with contextlib.closing(client):
                assert isinstance(client.ask(JOIN), Waiting)
            assert len(exchanged) == number + 1


class TestTokens:
    def test_a_wrong_one_is_refused_as_by_http(self) -> None:
        with start(ServerOptions(token="right")) as server:
            wrong, refused = Client(server.url, token="wrong"), "the token is missing or wrong"
            with contextlib.closing(wrong), pytest.raises(MasterError, match=refused):
                wrong.ask(JOIN)
            with contextlib.closing(Client(server.url, token="right")) as client:
                assert isinstance(client.ask(JOIN), Waiting)


class TestWithoutFrames:
    def test_a_master_of_another_version(
        self, monkeypatch: pytest.MonkeyPatch, exchanged: list[bytes]
    ) -> None:
        monkeypatch.setattr(FrameServer, "is_upgrade", lambda _server, _head: False)
        with start() as server, contextlib.closing(Client(server.url)) as client:
            for _ in range(2):
                assert isinstance(client.ask(JOIN), Waiting)
        assert exchanged == []

    def test_a_proxy_that_breaks_connections_that_ask_for_frames(
        self, server: ServerThread, exchanged: list[bytes]
    ) -> None:
        """A client that may send its request once, twice at most, is answered by HTTP."""
        with proxy_without_upgrades(server.url) as url:
            client = Client(url, patience=60.0, sleep=lambda _: None)
            with contextlib.closing(client):
                assert isinstance(client.ask(JOIN), Waiting)
        assert exchanged == []


@contextlib.contextmanager
def proxy_without_upgrades(url: str) -> Iterator[str]:
    """What closes each connection that asks for another protocol, and passes on one other."""
    parts = urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                wire, _address = listener.accept()
                with wire:
                    data = wire.recv(1 << 16)
                    if b"Upgrade" in data:
                        continue
                    with socket.create_connection((str(parts.hostname), parts.port or 0)) as master:
                        while b"}}" not in data:
                            data += wire.recv(1 << 16)
                        master.sendall(data)
                        wire.sendall(master.recv(1 << 16))
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


class TestLimits:
    def test_half_a_frame_is_awaited_as_long_as_half_a_request(self) -> None:
        connections = Connections(10)
        connection = connections.open(1.0)
        connection.begin_request()
        connection.end_request(1.0)
        connection.partial_since = 2.0
        assert connections.overdue(2.0 + REQUEST_SECONDS) == []
        assert connections.overdue(2.1 + REQUEST_SECONDS) == [connection]

    def test_requests_are_counted_with_those_of_http(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A bucket for one request, which is full again after twelve days.
        monkeypatch.setattr("remesh.elastic.frame_server.BURST_SECONDS", 2.0**20)
        with start(ServerOptions(max_requests_per_second=2.0**-20)) as server:
            client = Client(server.url)
            with contextlib.closing(client):
                assert isinstance(client.ask(JOIN), Waiting)
                for _ in range(2):  # the first is of the node, and no longer of its address
                    with contextlib.suppress(MasterError):
                        client.ask(BEAT)
                with pytest.raises(MasterError, match="too many requests"):
                    client.ask(BEAT)
                with pytest.raises(MasterError, match="too many requests"):
                    client.status()

    def test_connections_are_closed_with_the_server(self) -> None:
        with start() as server, raw(server) as wire:
            closing = threading.Thread(target=server.close)
            closing.start()
            assert read_all(wire) == b""
            closing.join()

    def test_a_client_that_reads_no_reply_is_not_answered_without_end(
        self, server: ServerThread
    ) -> None:
        sent = pack(msgspec.msgpack.encode(BEAT)) * 1000
        with raw(server) as wire:
            wire.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                for _ in range(1000):
                    wire.sendall(sent)
                raise AssertionError("100 MB of requests were taken without their replies")
        with contextlib.closing(Client(server.url)) as client:
            wait_until(lambda: client.ask(JOIN) is not None, "another client's reply")
