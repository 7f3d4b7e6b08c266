"""The master's sockets: the sessions of agents, the page, the status and the metrics.

Any process that reaches the port can control the job, so the master listens on the loopback address
unless a token is set. It refuses requests that are too large. Connections that send no request are
closed after some seconds. The page holds no secrets; it asks for the token when its requests are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from itertools import count
from typing import Any, Self
from weakref import WeakSet

import msgspec
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from remesh.elastic.master import Connection, Master, RefusedError
from remesh.elastic.metrics import CONTENT_TYPE, render_metrics
from remesh.elastic.protocol import PROTOCOL_VERSION, Instruction, Message, Problem, SetNode
from remesh.elastic.status import OF_A_PAGE, OF_ALL, Limits, Status, status_of

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
"""Time for a connection's first request, TLS included, and for the body of each."""
IDLE_SECONDS = 75.0
"""How long a connection of HTTP may wait for the next request."""
SWEEP_SECONDS = 1.0
"""Time between two looks at which connections have sent no request."""
MAX_WAITING = 4096
"""Connections that the system keeps until they are accepted."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MAX_MESSAGE_BYTES = 8 << 20
"""Larger messages are refused."""
QUIET_SECONDS = 60.0
"""Seconds for which a message of the log is not logged again."""
MAX_MESSAGES = 1000
"""Messages after which all are forgotten."""
PAGE = (
    resources.files(__package__)
    .joinpath("page.html")
    .read_text(encoding="utf-8")
    .replace("PROTOCOL_VERSION", str(PROTOCOL_VERSION))
)
"""One HTML page that fetches the status every second, and nothing else. It holds no secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the master can be reached."""

    host: str = "127.0.0.1"  # address that it listens on
    port: int = 0  # port; 0 for any free one
    token: str = ""  # what requests must carry; empty: nothing, on the loopback address only
    tls: ssl.SSLContext | None = None  # certificate and key, if it speaks HTTPS

    def __post_init__(self) -> None:
        if not self.token and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"listening on {self.host} needs a token\n"
                "Without one, any process that reaches the port could control the job: give a "
                "token, or listen on 127.0.0.1"
            )

    def url(self, port: int) -> str:
        """Where others find it."""
        scheme = "https" if self.tls is not None else "http"
        # Others reach no address that stands for all of this machine, and no certificate names it.
        is_any = self.host in ("0.0.0.0", "::")  # noqa: S104 - only compared
        host = socket.gethostname() if is_any else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class RepeatFilter(logging.Filter):
    """Lets a log message pass once a minute; those that differ in their arguments are one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[int, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, message = self._clock(), (record.levelno, str(record.msg))
        if now - self._said.get(message, -math.inf) < QUIET_SECONDS:
            return False
        if len(self._said) >= MAX_MESSAGES:
            self._said = {}
        self._said[message] = now
        return True


_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
_numbers = count()


def _reply(body: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


def is_trusted(given: str, token: str) -> bool:
    """True if a request carries the server's token."""
    if not token:
        return True
    # Bytes that are no text are kept in this way.
    sent = given.encode(errors="surrogateescape")
    return hmac.compare_digest(sent, f"Bearer {token}".encode())


class AgentSocket:
    """The session of one agent: a WebSocket.

    Each message is passed to the master at once. The master does not wait for an agent that does
    not read: the newest instruction replaces one that has not been sent. When the agent closes the
    session, the master closes it too, as soon as the journal has what the agent has said. Data that
    is no message ends the session.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self._socket = web.WebSocketResponse(
            autoclose=False, compress=False, max_msg_size=MAX_MESSAGE_BYTES
        )
        self._connection = Connection(next(_numbers), self._give, self.end)
        self._unsent = b""
        self._is_ended = False
        self._changed = asyncio.Event()

    def _give(self, what: Instruction | Problem) -> None:
        self._unsent = msgspec.msgpack.encode(what)
        self._changed.set()

    def end(self) -> None:
        """End the session, after what is not sent yet."""
        self._is_ended = True
        self._changed.set()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Let the agent speak until one side ends the session."""
        await self._socket.prepare(request)
        sending = asyncio.create_task(self._send())
        try:
            async for message in self._socket:
                if self._is_ended:
                    break
                if message.type is not WSMsgType.BINARY:
                    raise msgspec.DecodeError("it is no binary message")
                said = _decode(message.data)
                self._master.num_messages += 1
                self._master.on_message(self._connection, said)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("a session with %s is ended, it sent no message: %s", request.remote, error)
            self._refuse(Problem(str(error)))
        except RefusedError as error:
            self._refuse(Problem(str(error), error.again))
        finally:
            self._master.end_session(self._connection, by_peer=not self._is_ended)
            if not self._is_ended:
                await self._master.written()
            self.end()
            await sending
        return self._socket

    def _refuse(self, problem: Problem) -> None:
        self._give(problem)
        self.end()

    async def _send(self) -> None:
        """Send the newest instruction whenever there is another one."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            unsent, self._unsent = self._unsent, b""
            try:
                if unsent:
                    await self._socket.send_bytes(unsent)
                elif self._is_ended:
                    await self._socket.close()
                    return
            except ConnectionError:  # the other end has gone, as the reader learns
                return
            if self._is_ended:
                self._changed.set()


class Server:
    """What the master answers at its port."""

    def __init__(self, master: Master, options: ServerOptions) -> None:
        self._master = master
        self._options = options
        self._sockets: WeakSet[AgentSocket] = WeakSet()
        self._known: set[Any] = set()  # connections with a valid request

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_MESSAGE_BYTES)
        prefix = f"/v{PROTOCOL_VERSION}"
        app.router.add_get(f"{prefix}/session", self._session, name="session")
        app.router.add_get(f"{prefix}/status", self._status)
        app.router.add_post(f"{prefix}/node", self._set_node)
        app.router.add_route("*", r"/v{version:\d+}/{name}", _refuse_other)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/", _page, name="page")
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the token, and late ones."""
        self._master.num_messages += 1
        given, name = request.headers.get("Authorization", ""), request.match_info.route.name
        if name != "page" and not is_trusted(given, self._options.token):
            log.warning("a request from %s has not the token", request.remote)
            text = "the token is missing or wrong: --token-file, or Authorization: Bearer ..."
            return _reply(Problem(text), 401)
        try:
            if name != "session":
                await asyncio.wait_for(request.read(), REQUEST_SECONDS)
        except TimeoutError:
            reply = _reply(Problem("the request took too long to come"), 408)
            reply.force_close()
            return reply
        self._known.add(request.protocol)
        return await handler(request)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" not in request.headers:
            text = "a session is a WebSocket; a proxy before the master must forward its upgrade"
            return _reply(Problem(text), 426)
        agent = AgentSocket(self._master)
        self._sockets.add(agent)
        return await agent.serve(request)

    def end_sessions(self) -> None:
        for agent in list(self._sockets):
            agent.end()

    def _seen(self, limits: Limits = OF_ALL) -> Status:
        master = self._master
        return status_of(master.job, master.live, master.clock(), master.warnings, limits)

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return _reply(self._seen(OF_A_PAGE if "page" in request.query else OF_ALL))

    async def _set_node(self, request: web.Request) -> web.StreamResponse:
        """Follow an order of an operator, and answer when the journal has it."""
        # Browsers send this type across sites only if they are allowed to, which they are not.
        if request.content_type != "application/json":
            return _reply(Problem("send application/json"), 415)
        try:
            self._master.set_node(msgspec.json.decode(await request.read(), type=SetNode))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _reply(Problem(f"node: {error}"), 400)
        except RefusedError as error:
            return _reply(Problem(str(error)), 409)
        await self._master.written()
        return _reply({})

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        failing = not self._master.is_written
        text = render_metrics(self._seen(), self._master.num_messages, journal_failing=failing)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def close_silent(self, server: web.Server) -> None:
        """Close connections that have not sent a request in time, until this is cancelled."""
        since: dict[Any, float] = {}
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now, connections = time.monotonic(), set(server.connections)
            self._known &= connections
            since = {each: since.get(each, now) for each in connections - self._known}
            for each, at in since.items():
                if now - at > REQUEST_SECONDS:
                    each.force_close()


async def _page(_request: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE, content_type="text/html")


async def _refuse_other(request: web.Request) -> web.StreamResponse:
    version, name = request.match_info["version"], request.match_info["name"]
    if version == str(PROTOCOL_VERSION):
        return _reply(Problem(f"there is no request {request.method} {name!r}"), 404)
    text = (
        f"the request is of version {version} of the protocol, this master speaks "
        f"{PROTOCOL_VERSION}; install the same remesh everywhere"
    )
    return _reply(Problem(text), 400)


async def serve(
    master: Master,
    options: ServerOptions,
    on_ready: Callable[[str], None],
    *,
    end_with_job: bool = False,
) -> None:
    """Serve a master until this is cancelled."""
    requests_log, once = logging.getLogger("remesh.elastic.requests"), RepeatFilter()
    server = Server(master, options)
    runner = web.AppRunner(
        server.make_app(),
        access_log=None,
        logger=requests_log,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=1.0,
    )
    async with contextlib.AsyncExitStack() as stack:  # left in the opposite order
        stack.push_async_callback(master.close)
        for logger in (requests_log, log, logging.getLogger("asyncio")):
            logger.addFilter(once)
            stack.callback(logger.removeFilter, once)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.callback(server.end_sessions)
        assert runner.server is not None
        stack.callback(asyncio.create_task(server.close_silent(runner.server)).cancel)
        port = await _listen(runner, options)
        on_ready(options.url(port))
        await master.keep_time(end_with_job=end_with_job)


async def _listen(runner: web.AppRunner, options: ServerOptions) -> int:
    """Listen at all addresses of a host, on one port, which is returned."""
    host, port, is_open = options.host, options.port, False
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _kind, _proto, _name, address in dict.fromkeys(found):
        try:
            opened = socket.create_server((str(address[0]), port), family=family)
        except OSError as error:
            if error.errno in _NO_SUCH_ADDRESS:
                continue  # a name may have addresses of a family that the machine has not
            raise
        site = web.SockSite(runner, opened, ssl_context=options.tls, backlog=MAX_WAITING)
        await site.start()
        port, is_open = port or opened.getsockname()[1], True
    if not is_open:
        raise OSError(f"this machine has no address {host}")
    return port


class ServerThread:
    """A master that serves in a thread of this process, for jobs of one machine."""

    def __init__(self, master: Master, options: ServerOptions) -> None:
        listening: Future[str] = Future()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(
            target=self._run, args=(master, options, listening), name="remesh-master", daemon=True
        )
        self._thread.start()
        self.url = listening.result()

    def _run(self, master: Master, options: ServerOptions, listening: Future[str]) -> None:
        async def main() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._stop = functools.partial(loop.call_soon_threadsafe, task.cancel)
            await serve(master, options, listening.set_result)

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            pass  # close() asked for it
        except Exception as error:
            if listening.done():
                raise
            listening.set_exception(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and wait until everything is written."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._stop()
        self._thread.join()
