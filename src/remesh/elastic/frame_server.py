"""The master's side of `remesh.elastic.frames`.

Each connection begins as `Opening`, which reads the first request. A whole upgrade with the right
token makes it one of frames; everything else is given to the HTTP server as it came, which answers
or refuses it. The limits of requests and connections are those of HTTP. What is no frame ends its
connection, and is logged.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from remesh.elastic import frames
from remesh.elastic.connections import Connection, Listener
from remesh.elastic.master import Master, RequestError
from remesh.elastic.protocol import PROTOCOL_VERSION, PURPOSES, Problem, Request, name_of

log = logging.getLogger(__name__)

BURST_SECONDS = 5.0
"""A sender that was silent may send the requests of so many seconds at once."""
MAX_SENDERS = 10_000
"""Senders after which those that are silent are forgotten."""
TOO_MANY = "too many requests; ask again later"
MAX_REQUEST_BYTES = 8 << 20
"""Larger requests are refused."""
MAX_HEAD_BYTES = 8192
"""Longer heads of requests are left to the HTTP server."""
_ACCEPTED = (
    f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {frames.UPGRADE}\r\n\r\n"
).encode()
_TARGET = f"/v{PROTOCOL_VERSION}/{frames.NAME}"

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Request[Any]] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, PURPOSES)
).decode


class RateLimit:
    """A bucket of requests for each sender, filled at a steady rate.

    It holds what fills it in `BURST_SECONDS`: nodes meet all at once, and then beat steadily.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._most = MAX_SENDERS

    def allows(self, sender: str) -> bool:
        """True if a request that a sender makes now is answered."""
        now, most = self._clock(), self._per_second * BURST_SECONDS
        if len(self._buckets) >= self._most:
            # A sender that was silent for so long has a full bucket again, as an unknown one.
            self._buckets = {
                other: (left, at)
                for other, (left, at) in self._buckets.items()
                if now - at < BURST_SECONDS
            }
            self._most = max(MAX_SENDERS, 2 * len(self._buckets))
        left, at = self._buckets.get(sender, (most, now))
        left = min(left + (now - at) * self._per_second, most)
        allowed = left >= 1
        self._buckets[sender] = (left - allowed, now)
        return allowed


def is_trusted(given: str, token: str) -> bool:
    """True if a request carries the server's token."""
    if not token:
        return True
    # Bytes that are no text are kept in this way.
    sent = given.encode(errors="surrogateescape")
    return hmac.compare_digest(sent, f"Bearer {token}".encode())


def sender_of(master: Master, request: Request[Any], address: str) -> str:
    """The sender by which a request is counted: a node, or an address that is no node's."""
    nodes, node_id = master.job.rendezvous, getattr(request, "node_id", None)
    if nodes is None or node_id is None:
        return address
    incarnation: str = getattr(request, "incarnation", "")
    return incarnation if nodes.newest.get(node_id) == incarnation else address


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameServer:
    """The state that all connections with frames share."""

    master: Master
    token: str  # what requests must carry; empty: nothing
    limit: RateLimit  # limits the requests of each sender
    listener: Listener  # the connections
    opened: set[_Framed] = field(default_factory=set)  # those that speak frames

    def close(self) -> None:
        """Close the connections that speak frames."""
        for one in list(self.opened):
            one.close()

    def is_upgrade(self, head: bytes) -> bool:
        """True if this is the head of a valid request for frames."""
        lines = head.decode("utf-8", errors="surrogateescape").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target, _, version = rest.partition(" ")
        if (method, target, version) != ("GET", _TARGET, "HTTP/1.1"):
            return False
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        wants = headers.get("upgrade") == frames.UPGRADE
        return wants and is_trusted(headers.get("authorization", ""), self.token)


class Opening(asyncio.Protocol):
    """A connection whose protocol is not known yet."""

    def __init__(self, server: FrameServer, http: Callable[[], asyncio.Protocol]) -> None:
        self._server = server
        self._http = http
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Some of the first request has come."""
        self._data += data
        self._look()

    def _look(self) -> None:
        """Decide which protocol the connection speaks, if enough has come for that."""
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        connection = self._server.listener.of(transport)
        if connection is None:  # with TLS, data may come before the listener knows of it
            asyncio.get_running_loop().call_soon(self._look)
            return
        if b"GET".startswith(self._data[:3]) and len(self._data) <= MAX_HEAD_BYTES:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return
            if self._server.is_upgrade(head):
                self._server.master.num_requests += 1
                connection.begin_request()
                connection.end_request(asyncio.get_running_loop().time())
                transport.write(_ACCEPTED)
                _go_on(transport, _Framed(self._server, connection), rest)
                return
        _go_on(transport, self._http(), self._data)


def _go_on(transport: asyncio.Transport, protocol: asyncio.Protocol, data: bytes) -> None:
    """Let another protocol go on with a connection, from some data on."""
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    if data:
        protocol.data_received(data)


class _Framed(asyncio.Protocol):
    """A connection that speaks frames."""

    def __init__(self, server: FrameServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._data = b""
        self._requests: list[bytes] = []
        self._unsent: list[bytes] = []
        self._running: asyncio.Task[None] | None = None
        self._is_full = False
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection speaks frames from now on."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._server.opened.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection is closed."""
        self._server.opened.discard(self)
        if self._running is not None:
            self._running.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()
        if self._running is not None:
            self._running.cancel()

    def pause_writing(self) -> None:
        """The client does not read its replies: no more requests are answered."""
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has read them."""
        self._is_full = False
        self._transport.resume_reading()
        self._serve()

    def data_received(self, data: bytes) -> None:
        """Some of a frame, or some frames, have come."""
        try:
            found, self._data = frames.split(self._data + data, MAX_REQUEST_BYTES)
            if any(status for status, _body in found):
                raise frames.FrameError("a request has the status 0")
        except frames.FrameError as error:
            self._refuse(error)
            return
        self._requests += (body for _status, body in found)
        if not self._data:
            self._connection.partial_since = None
        elif found or self._connection.partial_since is None:
            self._connection.partial_since = self._loop.time()
        if len(self._requests) > 1 and self._running is not None:
            self._transport.pause_reading()
        self._serve()

    def _serve(self) -> None:
        """Answer the requests that have come, until one has to wait."""
        while self._requests and self._running is None and not self._is_full:
            body = self._requests.pop(0)
            try:
                request = _decode(body)
            except msgspec.ValidationError as error:
                self._reply(Problem(str(error)), 400)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._refuse(error)
                return
            else:
                self._answer(request)
        self._connection.since = self._loop.time()
        self._send()

    def _refuse(self, error: Exception) -> None:
        """End the connection, because of what came by it."""
        log.warning("a connection from %s is closed, it sent no frame: %s", self._address, error)
        self._requests = []
        self._transport.abort()

    def _reply(self, reply: object, status: int = 200) -> None:
        self._unsent.append(frames.pack(_encode(reply), status))

    def _send(self) -> None:
        """Send the replies, those of requests that came together in one go."""
        if self._unsent:
            replies, self._unsent = self._unsent, []
            self._transport.write(b"".join(replies))

    def _answer(self, request: Request[Any]) -> None:
        """Answer a request now, or begin to."""
        master = self._server.master
        master.num_requests += 1
        if not self._server.limit.allows(sender_of(master, request, self._address)):
            self._reply(Problem(TOO_MANY), 429)
            return
        reply = master.answer_now(request, self._connection.number)
        if reply is not None:
            self._reply(reply)
            return
        self._connection.begin_request()
        self._running = self._loop.create_task(self._answer_later(request))

    async def _answer_later(self, request: Request[Any]) -> None:
        try:
            self._reply(await self._server.master.answer(request, self._connection.number))
        except RequestError as error:
            self._reply(Problem(f"{name_of(type(request))}: {error}"), error.status)
        except Exception:
            log.exception("%s cannot be answered", name_of(type(request)))
            self._reply(Problem("the master cannot answer this; its log says why"), 500)
        finally:
            self._connection.end_request(self._loop.time())
            self._running = None
        if not self._is_full:
            self._transport.resume_reading()
        self._serve()
