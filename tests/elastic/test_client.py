"""How the master is asked by HTTP; what answers does as the test says."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from remesh.elastic.client import Client, read_token
from remesh.elastic.job import JobState, Policy
from remesh.elastic.liveness import Liveness
from remesh.elastic.status import status_of
from remesh.errors import MasterError, StorageError
from tests.elastic.cluster import run_job

WAITING = JobState(policy=Policy())


def held_port() -> socket.socket:
    """What holds a port: connections to it are refused, and no other process can listen there."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


class Wire(ThreadingHTTPServer):
    """Answers requests on real sockets: `answers` gives the reply to the name of a request."""

    def __init__(
        self, answers: Callable[[str], object], *, status: int = 200, location: str = ""
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers, self.status, self.location = answers, status, location
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.names: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wire = self.server
        assert isinstance(wire, Wire)
        wire.names.append(self.path.rpartition("/")[2])
        body = msgspec.json.encode(wire.answers(wire.names[-1]))
        self.send_response(wire.status)
        if wire.location:
            self.send_header("Location", wire.location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def wire(answers: Callable[[str], object], **options: Any) -> Iterator[Wire]:
    with Wire(answers, **options) as wire:
        serving = threading.Thread(target=wire.serve_forever)
        serving.start()
        try:
            yield wire
        finally:
            wire.shutdown()
            serving.join()


def always_well(_name: str) -> object:
    return status_of(WAITING, Liveness.after_start(WAITING, 0.0), 0.0)


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


class TestUrlFile:
    def test_one_that_refuses_because_it_is_another_job_s_is_left(self, tmp_path: Path) -> None:
        file = tmp_path / "url"
        with wire(always_well, status=401) as other, wire(always_well) as own:
            file.write_text(other.url)
            client = Client(str(file))
            file.write_text(own.url)
            client.status()
            assert (other.names, own.names) == (["status"], ["status"])

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"ftp://nowhere", None])
    def test_one_that_cannot_be_used_for_a_while_is_read_again(
        self, content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "url"
        with held_port() as held, wire(always_well) as own, caplog.at_level(logging.WARNING):
            file.write_text(f"http://127.0.0.1:{held.getsockname()[1]}")
            client = Client(str(file))
            file.unlink()
            file.mkdir() if content is None else file.write_bytes(content)
            for _ in range(3):
                with pytest.raises(MasterError, match="is it running, and can this machine reach"):
                    client.status()
            file.rmdir() if content is None else file.unlink()
            file.write_text(own.url)
            client.status()
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

    def test_it_may_be_named_without_a_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("url").write_text("http://127.0.0.1:1\n")
        assert Client("url").url == "http://127.0.0.1:1"

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


def test_a_redirect_takes_the_token_to_no_other_host() -> None:
    with wire(always_well) as other, wire(always_well, status=302, location=other.url) as first:
        with pytest.raises(MasterError, match="HTTP status 302"):
            Client(first.url, token="secret").status()
        assert other.names == []


class TestOneLine:
    """What goes wrong before a node has joined ends `remesh run` with one line, not a traceback."""

    def said_by_run(self, directory: Path, *options: str) -> str:
        """What is said of a node that cannot join."""
        code, output = run_job(directory, *options, "--no-python", "true")
        assert code == 1
        assert "Traceback" not in output
        return output

    def test_a_missing_master(self, tmp_path: Path) -> None:
        with held_port() as held:
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            said = self.said_by_run(tmp_path, "--master", url, "--master-patience", "0")
        assert f"the master at {url} does not answer" in said

    def test_an_address_of_no_node(self, tmp_path: Path) -> None:
        options = ("--master", "http://127.0.0.1:1", "--local-addr", "no such host")
        said = self.said_by_run(tmp_path, *options)
        assert "the address 'no such host' of this node cannot be resolved" in said
