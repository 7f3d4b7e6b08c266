"""What a node does on the wire: the master, or what answers for it, does as the test says."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.client import LOG_EVERY, Client, read_token
from remesh.elastic.heartbeat import Heartbeat, write_heartbeat
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import Master
from remesh.elastic.node import NodeClient, beat_limit, next_beat
from remesh.elastic.protocol import (
    Accepted,
    Beat,
    BeatReply,
    Join,
    Leave,
    Request,
    TestResult,
    Waiting,
)
from remesh.elastic.rendezvous import Outcome, Settings
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.errors import MasterError, StorageError
from tests.waiting import wait_until

BEAT = Beat(node_id=0, incarnation="a", round=1)


def held_port() -> socket.socket:
    """What holds a port: connections to it are refused, and no other process can listen there."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


class Wire:
    """Answers requests on real sockets, as a master that knows no frames.

    Args:
        answers: Given the name of a request and its number, the reply; None: none, ever.
        hang_up: Whether connections are closed after each answer, without a word.
        listener: What holds the port at which to listen; any by default.
        status: HTTP status of the answers.
    """

    def __init__(
        self,
        answers: Callable[[str, int], object],
        *,
        hang_up: bool = False,
        listener: socket.socket | None = None,
        status: int = 200,
    ) -> None:
        self._answers = answers
        self._status = status
        self._hang_up = hang_up
        self._listener = listener or held_port()
        self._listener.listen()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.names: list[str] = []
        self.num_connections = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._talk, args=(connection,)))
                self._threads[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            while head := lines.readline():
                name = head.split()[1].decode().rpartition("/")[2]
                length = 0
                while (line := lines.readline()).strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                lines.read(length)
                if name == "frames":
                    connection.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
                    continue
                self.names.append(name)
                reply = self._answers(name, len(self.names))
                if reply is None:
                    lines.read()  # until the other side gives up
                    return
                body = msgspec.json.encode(reply)
                head = b"HTTP/1.1 %d So\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % (self._status, len(body)))
                connection.sendall(body)
                if self._hang_up:
                    return

    def close(self) -> None:
        # accept() returns only if the socket is shut down, not if it is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def wire(answers: Callable[[str, int], object], **options: Any) -> Iterator[Wire]:
    wire = Wire(answers, **options)
    try:
        yield wire
    finally:
        wire.close()


def always_well(name: str, _number: int) -> object:
    return {"beat": BeatReply(), "leave": Accepted(), "join": Waiting(0, "more nodes")}[name]


class TestConnections:
    def test_they_are_kept_open(self) -> None:
        with wire(always_well) as master, contextlib.closing(Client(master.url)) as client:
            for _ in range(5):
                client.ask(BEAT)
            assert master.num_connections == 1

    def test_one_that_the_master_has_closed_is_replaced(self) -> None:
        with (
            wire(always_well, hang_up=True) as master,
            contextlib.closing(Client(master.url)) as client,
        ):
            for _ in range(3):
                client.ask(BEAT)
            assert master.num_connections == 3


def asked_to_join(request: Request[Any]) -> Waiting:
    """The reply to the first `Join` of a node; the second one ends the test's wait for it."""
    assert isinstance(request, Join)
    if request.node_id is None:
        return Waiting(0, "more nodes", heartbeat_timeout=0.4)
    raise MasterError("the test has seen enough")


def waiting_node(client: Client) -> NodeClient:
    """A node that has an id and sends heartbeats, as often as its master wants."""
    first = Join(
        name="a",
        node_id=None,
        incarnation="a",
        address="x",
        num_processes=1,
        settings=Settings(min_nodes=1, max_nodes=2),
    )
    result = TestResult(passed=True, broken=False, seconds=0.0)
    # Longer than a node may be silent.
    node = NodeClient(client, first, lambda _node, _test: result, beat_seconds=3600.0)
    with pytest.raises(MasterError, match="seen enough"):
        node.join()
    return node


class TestBeats:
    def test_one_that_is_not_answered_is_given_up_and_the_next_one_is_sent(self) -> None:
        hears = threading.Event()
        hears.set()

        def deaf_at_times(name: str, number: int) -> object:
            return always_well(name, number) if hears.is_set() else None

        with wire(deaf_at_times) as master, contextlib.closing(Client(master.url)) as client:
            client.ask(BEAT)  # from now on the connection is open and its language settled
            hears.clear()
            with pytest.raises(MasterError, match="does not answer"):
                client.ask(BEAT, limit=0.05)
            hears.set()
            client.ask(BEAT)
            assert master.num_connections == 2

    def test_a_node_gives_each_a_quarter_of_the_time_for_silence(self) -> None:
        limits: list[float] = []

        class Deaf(Client):
            def ask(
                self, request: Request[Any], *, limit: float = 0.0, patience: float | None = None
            ) -> Any:
                if isinstance(request, Beat):
                    assert patience == 0.0
                    limits.append(limit)
                    raise MasterError("lost")
                return asked_to_join(request)

        node = waiting_node(Deaf("http://127.0.0.1:1"))
        wait_until(lambda: len(limits) >= 3, "three heartbeats")
        node.close()
        assert set(limits) == {0.1}

    @pytest.mark.parametrize("error", [StorageError("no file"), ValueError("no sense"), OSError(5)])
    def test_an_error_of_one_does_not_end_the_next(
        self, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        beats: list[Beat] = []

        class Failing(Client):
            def ask(
                self, request: Request[Any], *, limit: float = 0.0, patience: float | None = None
            ) -> Any:
                if not isinstance(request, Beat):
                    return asked_to_join(request)
                beats.append(request)
                if len(beats) <= 2:
                    raise error
                return BeatReply()

        with caplog.at_level(logging.WARNING):
            node = waiting_node(Failing("http://127.0.0.1:1"))
            wait_until(lambda: len(beats) >= 4, "heartbeats after those that failed")
            node.close()
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            "a heartbeat is not sent; the next one follows",
            "heartbeats are answered again; 2 were not",
        ]
        assert caplog.records[0].exc_info is not None

    def test_a_file_that_cannot_be_read_keeps_no_other_rank_silent(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        beats: list[Beat] = []

        class Listening(Client):
            def ask(
                self, request: Request[Any], *, limit: float = 0.0, patience: float | None = None
            ) -> Any:
                if not isinstance(request, Beat):
                    return asked_to_join(request)
                beats.append(request)
                return BeatReply()

        unreadable, good = tmp_path / "0.json", tmp_path / "1.json"
        unreadable.mkdir()
        write_heartbeat(good, Heartbeat(7, None, 0.0, None))
        with caplog.at_level(logging.WARNING):
            node = waiting_node(Listening("http://127.0.0.1:1"))
            node.watch({0: str(unreadable), 1: str(good)})
            wait_until(lambda: sum(beat.ranks.keys() == {1} for beat in beats) > 1, "rank 1")
            node.close()
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith(
            f"a process is taken for one that reports nothing: cannot read {unreadable}: "
        )

    @given(
        silence=st.floats(0.1, 600),
        beat_seconds=st.floats(0.01, 600),
        lost=st.integers(0, 100),
        took=st.floats(0, 1),
    )
    def test_one_that_is_lost_does_not_make_a_node_silent(
        self, silence: float, beat_seconds: float, lost: int, took: float
    ) -> None:
        """Every answer takes some of its limit; one is lost, and waited for until the limit."""
        now, heard_at = 0.0, 0.0
        for number in range(lost + 3):
            began = now
            now += beat_limit(silence) * (1.0 if number == lost else took)
            if number != lost:
                assert now - heard_at < silence * 1.001
                heard_at = now
            now += next_beat(began, now, beat_seconds, silence)


class Time:
    """Passes only while a client sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarms: dict[float, Callable[[], None]] = {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.alarms if at <= self.now]:
            self.alarms.pop(at)()


LEAVE = Leave(node_id=0, incarnation="a", round=1, outcome=Outcome.SUCCEEDED)


class TestPatience:
    def client(self, time: Time, held: socket.socket, patience: float) -> Client:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        return Client(url, patience=patience, clock=time, sleep=time.sleep)

    def test_it_outlives_a_master_that_is_away_for_long(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        time, held = Time(), held_port()
        back: list[Wire] = []
        time.alarms[1800.0] = lambda: back.append(Wire(always_well, listener=held))
        client = self.client(time, held, 3600.0)
        with caplog.at_level(logging.WARNING):
            client.ask(LEAVE)
        client.close()
        back[0].close()
        first, *others, last = [record.getMessage() for record in caplog.records]
        assert first.startswith(f"the master at {back[0].url} does not answer (")
        assert first.endswith("; trying again for up to 60 min to leave the job")
        assert len(others) == pytest.approx(1800 / LOG_EVERY, abs=2)
        assert last == "the master answers again, after 1800 s"

    def test_it_ends(self) -> None:
        time = Time()
        refused = pytest.raises(MasterError, match="is it running, and can this machine reach it")
        with held_port() as held, refused:
            self.client(time, held, 100.0).ask(LEAVE)
        assert 100 <= time.now < 102

    def test_a_node_that_goes_in_any_case_has_little(self) -> None:
        time = Time()
        with held_port() as held, pytest.raises(MasterError):
            self.client(time, held, 3600.0).ask(LEAVE, patience=10.0)
        assert 10 <= time.now < 12


class TestUrlFile:
    def test_a_master_that_comes_back_elsewhere_is_found(self, tmp_path: Path) -> None:
        file = tmp_path / "url"
        with wire(always_well) as first:
            file.write_text(first.url + "\n")
            client = Client(str(file))
            client.ask(BEAT)
        with pytest.raises(MasterError, match="does not answer"):
            client.ask(BEAT)
        with wire(always_well) as second, contextlib.closing(client):
            file.write_text(second.url)
            client.ask(BEAT)
            client.ask(BEAT)
            assert client.url == second.url
            assert second.names == ["beat", "beat"]

    def test_one_that_refuses_because_it_is_another_job_s_is_left(self, tmp_path: Path) -> None:
        file = tmp_path / "url"
        with wire(always_well, status=401) as other, wire(always_well) as own:
            file.write_text(other.url)
            client = Client(str(file))
            file.write_text(own.url)
            client.ask(BEAT)
            client.close()
            assert (other.names, own.names) == (["beat"], ["beat"])

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"ftp://nowhere", None])
    def test_one_that_cannot_be_used_for_a_while_is_read_again(
        self, content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        time, file = Time(), tmp_path / "url"
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(held_port())
            file.write_text(f"http://127.0.0.1:{held.getsockname()[1]}")
            client = Client(str(file), patience=60.0, clock=time, sleep=time.sleep)
            stack.callback(client.close)
            file.unlink()
            file.mkdir() if content is None else file.write_bytes(content)

            def come_back() -> None:
                file.rmdir() if content is None else file.unlink()
                file.write_text(stack.enter_context(wire(always_well)).url)

            time.alarms[20.0] = come_back
            with caplog.at_level(logging.WARNING):
                client.ask(BEAT)
        said = [record.getMessage() for record in caplog.records]
        assert sum("the master is still taken to be at http://127" in text for text in said) == 1

    def test_it_is_awaited(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        time, file = Time(), tmp_path / "url"
        time.alarms[10.0] = file.touch

        def come() -> None:
            file.write_text("http://127.0.0.1:1\n")

        time.alarms[20.0] = come
        with caplog.at_level(logging.WARNING):
            client = Client(str(file), patience=60.0, clock=time, sleep=time.sleep)
        assert client.url == "http://127.0.0.1:1"
        assert 20 <= time.now < 22
        (said,) = [record.getMessage() for record in caplog.records]
        assert said == f"waiting for a master, whose URL will be in {file}"

    def test_it_is_not_awaited_for_ever(self, tmp_path: Path) -> None:
        time = Time()
        with pytest.raises(MasterError, match="holds no URL of a master; is the master running"):
            Client(str(tmp_path / "url"), patience=60.0, clock=time, sleep=time.sleep)
        assert 60 <= time.now < 62

    def test_what_cannot_be_read_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="the URL of the master cannot be read"):
            Client(str(tmp_path))
        (tmp_path / "url").write_text("ftp://nowhere")
        with pytest.raises(MasterError, match="is no URL of a master"):
            Client(str(tmp_path / "url"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b" \n", "holds no token"),
        (b"two\nlines", "one line of printable"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_token(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(text)
    with pytest.raises(StorageError, match=message):
        read_token(str(file))


@pytest.mark.parametrize("url", ["ftp://head", "http://head:port", "http://[::1", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(MasterError, match="is no URL of a master"):
        Client(url)


class TestOneLine:
    """What goes wrong before a node has joined ends `remesh run` with one line, not a traceback."""

    @pytest.fixture(autouse=True)
    def _leave_the_process_as_it_is(self) -> Iterator[None]:
        before, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
        yield
        signal.signal(signal.SIGTERM, before)
        os.environ.clear()
        os.environ.update(environment)

    def errors_of_run(self, caplog: pytest.LogCaptureFixture, *options: str) -> str:
        """The last error that was logged, of a node that cannot join."""
        from remesh.elastic import launch

        with pytest.raises(SystemExit) as ending:
            launch.main([*options, "--no-python", "true"])
        assert ending.value.code == 1
        return caplog.records[-1].getMessage()

    def test_a_missing_master(self, caplog: pytest.LogCaptureFixture) -> None:
        with held_port() as held:
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            said = self.errors_of_run(caplog, "--master", url, "--master-patience", "0")
        assert said.startswith(f"the master at {url} does not answer")

    def test_a_wrong_token(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        token = tmp_path / "token"
        token.write_text("wrong")

        def make() -> Master:
            return Master(Policy(), Journal(":memory:"))

        with ServerThread(make, ServerOptions(token="right")) as server:
            options = ("--master", server.url, "--token-file", str(token))
            assert "the token is missing or wrong" in self.errors_of_run(caplog, *options)

    def test_an_address_of_no_node(self) -> None:
        from remesh.elastic import launch

        options = ["--master", "http://127.0.0.1:1", "--local-addr", "no such host"]
        with pytest.raises(SystemExit, match="the address 'no such host' of this node cannot be"):
            launch.main([*options, "--no-python", "true"])
