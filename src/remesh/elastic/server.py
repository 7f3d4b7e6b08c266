"""The master's sockets: HTTP requests with JSON bodies, the page, and the metrics.

Nodes send their requests as frames instead, on connections of the same port
(`remesh.elastic.frame_server`).

Any process that reaches the port can control the job, so the master listens on the loopback address
unless a token is set. It refuses requests that are too large, and too many requests of one node, or
of one address that is no node's. Requests without the token are limited by themselves, so they do
not use up the limits of others. The page holds no secrets; it asks for the token when its requests
are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from remesh.elastic import connections, frame_server, frames
from remesh.elastic.frame_server import (
    TOO_MANY,
    FrameServer,
    Opening,
    RateLimit,
    is_trusted,
    sender_of,
)
from remesh.elastic.master import Master, RequestError
from remesh.elastic.metrics import CONTENT_TYPE, render_metrics
from remesh.elastic.protocol import PROTOCOL_VERSION, PURPOSES, Problem, name_of
from remesh.elastic.status import Query, Status, overview_of, status_of

log = logging.getLogger(__name__)

MAX_WRONG_TOKENS = 2.0
"""Wrong tokens a second from one address that are answered as such."""
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
    max_requests_per_second: float = 2000.0
    """More of one node, or of one address that is no node's, are refused, to be sent again later.
    """

    def __post_init__(self) -> None:
        if not self.token and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"listening on {self.host} needs a token\n"
                "Without one, any process that reaches the port could control the job: give a "
                "token, or listen on 127.0.0.1"
            )


class RepeatFilter(logging.Filter):
    """Lets a log message pass once a minute, then with the number of its repeats.

    Those that differ only in their arguments are one message.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if a message is logged."""
        now, message = self._clock(), (record.levelno, str(record.msg))
        at, num_repeated = self._said.get(message, (None, 0))
        if at is not None and now - at < QUIET_SECONDS:
            self._said[message] = at, num_repeated + 1
            return False
        if len(self._said) >= MAX_MESSAGES:
            self._said = {}
        self._said[message] = now, 0
        if num_repeated:
            record.msg = f"{record.getMessage()} ({num_repeated} more like this since the last one)"
            record.args = ()
        return True


_encode = msgspec.json.Encoder().encode


def _reply(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=_encode(body), status=status, content_type="application/json", headers=headers
    )


def make_app(
    master: Master, options: ServerOptions, listener: connections.Listener, limit: RateLimit
) -> web.Application:
    """The web application of a server."""

    def seen() -> Status:
        return status_of(master.job, master.live, master.clock(), master.warnings)

    async def status(_request: web.Request) -> web.StreamResponse:
        return _reply(seen())

    async def overview(request: web.Request) -> web.StreamResponse:
        try:
            query = msgspec.convert(dict(request.query), Query, strict=False)
        except msgspec.ValidationError as error:
            return _reply(Problem(f"overview: {error}"), 400)
        now = master.clock()
        return _reply(overview_of(master.job, master.live, now, master.warnings, query))

    async def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=PAGE, content_type="text/html")

    async def metrics(_request: web.Request) -> web.StreamResponse:
        failing = not master.is_written
        text = render_metrics(seen(), master.num_requests, journal_failing=failing)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(
        middlewares=[_make_guard(master, options, listener, limit)],
        client_max_size=frame_server.MAX_REQUEST_BYTES,
    )
    app.router.add_get(f"/v{PROTOCOL_VERSION}/status", status)
    app.router.add_get(f"/v{PROTOCOL_VERSION}/overview", overview)
    app.router.add_get(f"/v{PROTOCOL_VERSION}/{frames.NAME}", _refuse_frames)
    app.router.add_post(f"/v{PROTOCOL_VERSION}/{{name}}", _make_post(master, limit, listener))
    app.router.add_route("*", r"/v{version:\d+}/{name}", _refuse_version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", page, name="page")
    return app


async def _refuse_version(request: web.Request) -> web.StreamResponse:
    version = request.match_info["version"]
    text = (
        f"the request is of version {version} of the protocol, this master speaks "
        f"{PROTOCOL_VERSION}; install the same remesh everywhere"
    )
    return _reply(Problem(text), 400)


async def _refuse_frames(_request: web.Request) -> web.StreamResponse:
    """A valid request for frames does not come here."""
    text = f"this master speaks the frames {frames.UPGRADE} to those that ask for them, or HTTP"
    return _reply(Problem(text), 426, {"Upgrade": frames.UPGRADE})


def _too_many() -> web.Response:
    return _reply(Problem(TOO_MANY), 429, {"Retry-After": "1"})


def _make_guard(
    master: Master, options: ServerOptions, listener: connections.Listener, limit: RateLimit
) -> Middleware:
    """Refuses requests without the token, too many of one address, and those that come too late."""
    wrong = RateLimit(MAX_WRONG_TOKENS)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        master.num_requests += 1
        given = request.headers.get("Authorization", "")
        trusted = is_trusted(given, options.token)
        is_page = request.match_info.route.name == "page"
        if not trusted and not is_page:
            if not wrong.allows(request.remote or ""):
                return _too_many()
            log.warning("a request from %s has not the token", request.remote)
            return _reply(Problem("the token is missing or wrong (Authorization: Bearer ...)"), 401)
        # What nodes send is limited by node.
        if request.method == "GET" and not is_page and not limit.allows(request.remote or ""):
            return _too_many()
        try:
            await asyncio.wait_for(request.read(), connections.REQUEST_SECONDS)
        except TimeoutError:
            reply = _reply(Problem("the request took too long to come"), 408)
            reply.force_close()
            return reply
        connection = listener.of(request.transport) if trusted else None
        if connection is not None:
            connection.begin_request()
        try:
            return await handler(request)
        finally:
            if connection is not None:
                connection.end_request(asyncio.get_running_loop().time())

    return guard


def _make_post(master: Master, limit: RateLimit, listener: connections.Listener) -> Handler:
    """Decodes a request, has the master answer it, and encodes the reply."""
    decoders: dict[str, Callable[[bytes], Any]] = {
        name_of(kind): msgspec.json.Decoder(kind).decode for kind in PURPOSES
    }

    async def post(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in decoders:
            return _reply(Problem(f"there is no request {name!r}"), 404)
        # Browsers send this type across sites only if they are allowed to, which they are not.
        if request.content_type != "application/json":
            return _reply(Problem("send application/json"), 415)
        try:
            asked = decoders[name](await request.read())
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            return _reply(Problem(f"{name}: {error}"), 400)
        if not limit.allows(sender_of(master, asked, request.remote or "")):
            return _too_many()
        try:
            connection = listener.of(request.transport)
            number = None if connection is None else connection.number
            return _reply(await master.answer(asked, number))
        except RequestError as error:
            return _reply(Problem(f"{name}: {error}"), error.status)

    return post


async def serve(
    master: Master,
    options: ServerOptions,
    on_ready: Callable[[str], None],
    *,
    end_with_job: bool = False,
) -> None:
    """Serve a master until this is cancelled."""
    try:
        async with _listening(master, options) as port:
            scheme = "https" if options.tls is not None else "http"
            on_ready(f"{scheme}://{options.host}:{port}")
            await master.keep_time(end_with_job=end_with_job)
    finally:
        await master.close()


@contextlib.asynccontextmanager
async def _listening(master: Master, options: ServerOptions) -> AsyncIterator[int]:
    """Listen as long as the context lasts; gives the port."""
    requests_log = logging.getLogger("remesh.elastic.requests")
    once = RepeatFilter()
    quiet = (requests_log, log, connections.log, frame_server.log)
    for logger in quiet:
        logger.addFilter(once)
    listener = connections.Listener(options.tls, master.close_connection)
    limit = RateLimit(options.max_requests_per_second)
    app = make_app(master, options, listener, limit)
    runner = web.AppRunner(app, access_log=None, logger=requests_log)
    await runner.setup()
    assert runner.server is not None
    frame = FrameServer(master=master, token=options.token, limit=limit, listener=listener)
    accept = functools.partial(Opening, frame, runner.server)
    try:
        yield listener.listen(accept, options.host, options.port)
    finally:
        await listener.close()
        frame.close()
        await runner.cleanup()
        for logger in quiet:
            logger.removeFilter(once)


class ServerThread:
    """A master that serves in a thread of this process, for jobs of one machine."""

    def __init__(self, make: Callable[[], Master], options: ServerOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        listening: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, options, listening), name="remesh-master", daemon=True
        )
        self._thread.start()
        self.url = listening.result()

    def _run(
        self, make: Callable[[], Master], options: ServerOptions, listening: Future[str]
    ) -> None:
        async def main() -> None:
            self._task = asyncio.current_task()
            await serve(make(), options, listening.set_result)

        try:
            self._loop.run_until_complete(main())
        except asyncio.CancelledError:
            pass  # close() asked for it
        except Exception as error:
            if listening.done():
                raise
            listening.set_exception(error)
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and wait until everything is written."""
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
