"""A server that stands before an object store and does to requests what networks and stores do.

It forwards each request to the server behind it, and then asks a plan what is to go wrong. Bytes
are flipped in the objects that are read only: those that are sent are covered by the checksums of
S3's requests, which moto does not compare.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args
from urllib.parse import urlsplit

Fault = Literal[
    "refuse",  # 500 or 503, and the server behind has not heard of it
    "lose",  # the same, and the server behind has done it
    "reset",  # the connection is reset; the server behind has not heard of it
    "reset late",  # the same, and the server behind has done it
    "cut",  # the answer ends in the middle
    "flip",  # a bit of an object that is read is another
    "drip",  # the answer comes in small pieces
    "delay",  # it comes late
    "repeat",  # the server behind gets the request twice
    "stall",  # there is no answer until the proxy ends; not among those that a plan draws
]
FAULTS: tuple[Fault, ...] = tuple(fault for fault in get_args(Fault) if fault != "stall")
_HOP_HEADERS = {"connection", "content-length", "transfer-encoding", "date", "server"}


class Plan:
    """Draws what goes wrong, from a seed.

    Attributes:
        rate: Which share of the requests meets a fault.
        faults: Of which kinds; each of them comes before one comes again.
        met: How many requests have met each kind.
    """

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._next: list[Fault] = []
        self.rate = 0.0
        self.faults = FAULTS
        self.met: Counter[Fault] = Counter()

    def draw(self) -> tuple[Fault | None, float]:
        """A fault, if there is one; and a number from 0 to 1 that says more about it."""
        with self._lock:
            if self._chance.random() >= self.rate:
                return None, 0.0
            if not self._next:
                self._next = self._chance.sample(self.faults, len(self.faults))
            fault = self._next.pop()
            self.met[fault] += 1
            return fault, self._chance.random()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing is printed."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault, chance = self.server.plan.draw()
        if fault == "reset":
            self._reset()
            return
        if fault == "refuse":
            self._refuse(chance)
            return
        if fault == "stall":
            self.server.ended.wait()
            self.close_connection = True
            return
        if fault == "delay":
            time.sleep(chance * 0.05)
        if fault == "repeat":
            self._forward(body)
        answer, data = self._forward(body)
        if fault == "lose":
            self._refuse(chance)
        elif fault == "reset late":
            self._reset()
        else:
            self._send(answer, data, fault, chance)

    def _forward(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(*self.server.behind, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "content-length", "expect"}:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _send(self, answer: HTTPResponse, data: bytes, fault: Fault | None, chance: float) -> None:
        place = int(chance * len(data))
        is_object = self.command == "GET" and answer.getheader("ETag") is not None
        if fault == "flip" and is_object and data:
            flipped = bytearray(data)
            flipped[place] ^= 1 << (place % 8)
            data = bytes(flipped)
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        length = str(len(data)) if self.command != "HEAD" else answer.getheader("Content-Length")
        if length is not None and answer.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[:place])
            self.close_connection = True
        elif fault == "drip":
            size = max(1, -(-len(data) // 8))
            for start in range(0, len(data), size):
                self.wfile.write(data[start : start + size])
                time.sleep(0.005)
        else:
            self.wfile.write(data)

    def _refuse(self, chance: float) -> None:
        self.send_response_only(500 if chance < 0.5 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - the base class's names


class FaultyProxy(ThreadingHTTPServer):
    """The proxy.

    Args:
        endpoint: URL of the server behind it.
        plan: What goes wrong.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, plan: Plan) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        found = urlsplit(endpoint)
        assert found.hostname is not None
        self.behind = (found.hostname, found.port)
        self.plan = plan
        self.ended = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away in the middle of an answer are no error."""


@contextmanager
def faulty_proxy(endpoint: str, plan: Plan) -> Iterator[FaultyProxy]:
    with FaultyProxy(endpoint, plan) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.ended.set()
            proxy.shutdown()
            thread.join()
