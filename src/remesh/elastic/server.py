"""The master's sockets: HTTP requests with JSON bodies, the page, and the metrics.

Whoever can reach the port can steer the job, so the master listens on the loopback address unless a
token is set, and refuses requests that are too large or too many. The page itself holds no secrets;
it asks for the token when its requests are refused.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from remesh.elastic.master import Master, RequestError
from remesh.elastic.metrics import CONTENT_TYPE, render_metrics
from remesh.elastic.page import PAGE
from remesh.elastic.protocol import (
    BeatRequest,
    CheckRequest,
    DrainRequest,
    FailedRequest,
    GetRequest,
    JoinRequest,
    LeaveRequest,
    Problem,
    PutRequest,
    StacksRequest,
    TestedRequest,
)
from remesh.elastic.status import status_of
from remesh.errors import StorageError

BURST_SECONDS = 5.0
"""How long an address may be silent and then ask for all of that time at once."""
MAX_ADDRESSES = 10_000
"""Addresses after which those that are silent are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the master can be reached.

    Attributes:
        host: Address that it listens on.
        port: Port; 0 for any free one.
        token: What requests must know; empty: nothing, on the loopback address only.
        tls: Certificate and key, if it speaks HTTPS.
        max_request_bytes: Larger requests are refused.
        max_requests_per_second: More from one address are refused for a moment.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    tls: ssl.SSLContext | None = None
    max_request_bytes: int = 8 << 20
    max_requests_per_second: float = 2000.0

    def __post_init__(self) -> None:
        if not self.token and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"listening on {self.host} without a token would let everybody steer the job; "
                "give a token, or listen on 127.0.0.1"
            )


_REQUESTS: dict[str, type] = {
    "join": JoinRequest,
    "beat": BeatRequest,
    "failed": FailedRequest,
    "leave": LeaveRequest,
    "drain": DrainRequest,
    "put": PutRequest,
    "get": GetRequest,
    "tested": TestedRequest,
    "stacks": StacksRequest,
    "check": CheckRequest,
}


class RateLimit:
    """A bucket of requests for each address, filled at a steady rate.

    It holds what fills it in `BURST_SECONDS`: nodes meet all at once, and then beat steadily.

    Args:
        per_second: Requests a second and address.
        clock: Seconds that never jump.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    @property
    def num_addresses(self) -> int:
        """Addresses that are remembered."""
        return len(self._buckets)

    def allows(self, address: str) -> bool:
        """Whether a request that comes from an address now is answered."""
        now, most = self._clock(), self._per_second * BURST_SECONDS
        if len(self._buckets) >= MAX_ADDRESSES:
            # Whoever has not asked for so long has a full bucket again, as one never heard of.
            self._buckets = {
                other: (left, at)
                for other, (left, at) in self._buckets.items()
                if now - at < BURST_SECONDS
            }
        left, at = self._buckets.get(address, (most, now))
        left = min(left + (now - at) * self._per_second, most)
        allowed = left >= 1
        self._buckets[address] = (left - allowed, now)
        return allowed


_encode = msgspec.json.Encoder().encode


def _reply(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=_encode(body), status=status, content_type="application/json", headers=headers
    )


def make_app(master: Master, options: ServerOptions) -> web.Application:
    """The web application of a master."""

    async def status(_request: web.Request) -> web.StreamResponse:
        return _reply(status_of(master.state, master.live, master.clock()))

    async def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=PAGE, content_type="text/html")

    async def metrics(_request: web.Request) -> web.StreamResponse:
        now = status_of(master.state, master.live, master.clock())
        text = render_metrics(now, master.num_requests)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(
        middlewares=[_make_guard(master, options)], client_max_size=options.max_request_bytes
    )
    app.router.add_post("/v1/{name}", _make_post(master))
    app.router.add_get("/v1/status", status)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", page)
    return app


def _make_guard(master: Master, options: ServerOptions) -> Middleware:
    """Turns away who asks too often, or does not know the token."""
    limit = RateLimit(options.max_requests_per_second)
    wanted = f"Bearer {options.token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        master.num_requests += 1
        if not limit.allows(request.remote or ""):
            return _reply(Problem("too many requests; ask again later"), 429, {"Retry-After": "1"})
        given = request.headers.get("Authorization", "").encode()
        is_open = request.path == "/" or not options.token
        if not is_open and not hmac.compare_digest(given, wanted):
            return _reply(Problem("the token is missing or wrong (Authorization: Bearer ...)"), 401)
        return await handler(request)

    return guard


def _make_post(master: Master) -> Handler:
    """Decodes a request, asks the master, and encodes the reply."""
    decoders: dict[str, Callable[[bytes], Any]] = {
        name: msgspec.json.Decoder(kind).decode for name, kind in _REQUESTS.items()
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
        try:
            return _reply(await getattr(master, name)(asked))
        except RequestError as error:
            return _reply(Problem(f"{name}: {error}"), error.status)
        except StorageError as error:
            return _reply(Problem(f"{name}: {error}"), 503)

    return post


async def serve(master: Master, options: ServerOptions, on_ready: Callable[[str], None]) -> None:
    """Serve a master until this is cancelled.

    Args:
        master: The master.
        options: How it can be reached.
        on_ready: Is given its URL as soon as it listens.
    """
    runner = web.AppRunner(make_app(master, options), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, options.host, options.port, ssl_context=options.tls, backlog=4096
        )
        await site.start()
        _host, port = runner.addresses[0][:2]
        scheme = "https" if options.tls is not None else "http"
        on_ready(f"{scheme}://{options.host}:{port}")
        await master.keep_time()
    finally:
        await runner.cleanup()
        await master.close()


class ServerThread:
    """A master that serves in a thread of this process, for jobs of one machine.

    Args:
        make: Makes the master; called in the thread.
        options: How it can be reached.

    Attributes:
        url: Where it is reached.

    Raises:
        OSError: If it cannot listen.
    """

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
