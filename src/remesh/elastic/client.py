"""Sends requests to the master: as frames (`remesh.elastic.frames`), or plain HTTP.

There is no event loop and no thread here, so that a launcher may start processes as it likes.
Connections are kept open for the next request. Each new one for the requests of a node asks for
frames, and stays one of HTTP if the master, or a proxy before it, speaks none. While the master
does not answer (it may be being restarted) a request is repeated for `patience` seconds: a repeated
request has no further effect.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from remesh.elastic import frames
from remesh.elastic.directories import token_of
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    PURPOSES,
    Join,
    NodeRequest,
    Problem,
    Request,
    name_of,
    reply_of,
)
from remesh.elastic.status import Status
from remesh.errors import MasterError, StorageError

__all__ = ["Client", "read_token"]

R = TypeVar("R")

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 15.0
"""Seconds for a reply, beyond `Request.wait`."""
PAUSE = 0.5
"""Seconds between two attempts."""
LOG_EVERY = 60.0
"""Seconds after which it is logged again that the master does not answer."""
_BUSY = (429, 502, 503, 504)
"""HTTP statuses that mean: send the request again."""


def read_token(path: str | None) -> str:
    """The token in a file, without the white space around it; empty without a file.

    Raises:
        StorageError: If the file cannot be read or is empty.
    """
    if path is None:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the token cannot be read: {path}: {error}") from error
    if not token:
        raise StorageError(f"{path} holds no token")
    if not token.isprintable():
        raise StorageError(f"{path}: a token is one line of printable characters; make another")
    return token


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The address of a master."""

    url: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class _Wire:
    """A connection."""

    connection: http.client.HTTPConnection
    """The connection; its socket alone is used if it speaks frames."""
    speaks_frames: bool  # whether it does

    def encode(self, request: Request[Any]) -> bytes:
        """A request as it is sent."""
        encode = msgspec.msgpack.encode if self.speaks_frames else msgspec.json.encode
        return encode(request)

    def close(self) -> None:
        """Close it."""
        self.connection.close()


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply as it came."""

    status: int  # its HTTP status
    body: bytes
    is_framed: bool  # whether it came as a frame

    def decode(self, kind: Any) -> Any:
        """The message in it."""
        if self.is_framed:
            return msgspec.msgpack.decode(self.body, type=kind)
        return msgspec.json.decode(self.body, type=kind)

    @property
    def problem(self) -> str:
        """The problem that a reply tells of."""
        try:
            text: str = self.decode(Problem).error
        except msgspec.MsgspecError:
            return f"HTTP status {self.status}"
        return text


class Client:
    """Sends requests to a master.

    Args:
        url: Where it is, `http://host:port`, as it prints it. Or the path of a file that holds
            this: text with a slash and without `://` is a path. The client waits for the file, and
            reads it again whenever the master does not answer: it may have restarted elsewhere.
        token: The master's token. Without one, that of a master which an agent (`remesh run`) of
            this user runs on this machine is found.
        tls_ca: A file of certificates to trust, for HTTPS; the system's by default.
        patience: Seconds for which a request is repeated while the master does not answer.
        clock: Seconds that never jump.
        sleep: Lets seconds pass.

    Raises:
        MasterError: If the URL is not valid, or the file does not appear.
        StorageError: If the file or the certificates cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        tls_ca: str | None = None,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._idle: list[_Wire] = []
        # Without a reply in time. The master takes an agent without connections for dead, so they
        # are closed when there is another one.
        self._late: list[_Wire] = []
        # Endpoints where the last new connection broke when it asked for frames, as some proxies
        # make it; the next one does not ask.
        self._without_frames: set[str] = set()
        self._tls_ca = tls_ca
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        self.patience = patience
        self._clock = clock
        self._sleep = sleep
        is_path = "/" in url and "://" not in url
        self._url_file = Path(url) if is_path else None
        self._file_problem = ""  # why the file could not be used when it was last read
        self._endpoint = self._at(self._await_url(self._url_file) if self._url_file else url)
        if not token and self._endpoint.host in ("127.0.0.1", "localhost"):
            token = token_of(self._endpoint.port)
        if token:
            self._headers["Authorization"] = f"Bearer {token}".encode()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        _close_all(self._idle)
        _close_all(self._late)

    @property
    def url(self) -> str:
        """The master's URL, as last known."""
        return self._endpoint.url

    def _at(self, url: str) -> _Endpoint:
        parts = _parts_of(url)
        assert parts.hostname is not None
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/")
        return _Endpoint(
            f"{parts.scheme}://{parts.netloc}{path}",
            parts.hostname,
            parts.port or (443 if is_https else 80),
            path,
            _trusting(self._tls_ca) if is_https else None,
        )

    def _await_url(self, file: Path) -> str:
        """Wait for the URL in a file."""
        began, is_said = self._clock(), False
        while not (url := _read_url(file)):
            if self._clock() - began >= self.patience:
                raise MasterError(f"{file} holds no URL of a master; is the master running?")
            if not is_said:
                is_said = True
                log.warning("waiting for a master, whose URL will be in %s", file)
            self._sleep(PAUSE)
        return url

    def _has_moved(self) -> bool:
        """True if the URL has changed; if so, requests go to the new one from now on.

        A file that cannot be used at the moment changes nothing: it is read again after the next
        request that is not answered.
        """
        if self._url_file is None:
            return False
        endpoint, problem = self._endpoint, ""
        try:
            url = _read_url(self._url_file)
            endpoint = self._at(url) if url else endpoint
        except (MasterError, StorageError) as error:
            problem = str(error)
        if problem and problem != self._file_problem:
            log.warning("%s; the master is still taken to be at %s", problem, self.url)
        self._file_problem = problem
        if endpoint.url == self._endpoint.url:
            return False
        log.warning("the master is at %s now; it was at %s", url, self.url)
        self._endpoint = endpoint
        self.close()
        return True

    def ask(
        self,
        request: Request[R],
        *,
        limit: float = REQUEST_TIMEOUT,
        patience: float | None = None,
    ) -> R:
        """Send a request until it is answered.

        Args:
            request: The request.
            limit: Seconds for a reply, beyond `request.wait`.
            patience: Seconds for which it is repeated; the client's by default.

        Returns:
            The reply, of the type that the class of the request names.

        Raises:
            MasterError: If it is refused, or no reply comes.
        """
        kind = type(request)
        found = self._repeat(name_of(kind), request, PURPOSES[kind], request.wait + limit, patience)
        reply: R = self._decode(found, reply_of(kind))
        return reply

    def status(self) -> Status:
        """The status of the job.

        Raises:
            MasterError: If the request is refused, or no reply comes.
        """
        found = self._repeat("status", None, "show the job", REQUEST_TIMEOUT, None)
        status: Status = self._decode(found, Status)
        return status

    def _repeat(
        self,
        name: str,
        request: Request[Any] | None,
        purpose: str,
        limit: float,
        patience: float | None,
    ) -> _Reply:
        """Send a request until it is answered."""
        patience = self.patience if patience is None else patience
        began, logged_at = self._clock(), None
        while True:
            endpoint = self._endpoint
            try:
                reply = self._send(name, request, limit)
                status = reply.status
                if status == http.HTTPStatus.OK:
                    if logged_at is not None:
                        waited = self._clock() - began
                        log.warning("the master answers again, after %.0f s", waited)
                    return reply
                problem = f"{endpoint.url}: {reply.problem}"
            except ssl.SSLCertVerificationError as error:
                raise MasterError(f"{endpoint.url} is not trusted: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                status = 0
                why = str(error) or type(error).__name__
                problem = f"the master at {endpoint.url} does not answer ({why})"
            waited = self._clock() - began
            if self._has_moved():
                continue
            if status and status not in _BUSY:
                raise MasterError(problem)
            if waited >= patience:
                if status:
                    raise MasterError(problem)
                raise MasterError(f"{problem}; is it running, and can this machine reach it?")
            if logged_at is None or waited - logged_at >= LOG_EVERY:
                logged_at = waited
                left = _duration(patience - waited)
                log.warning("%s; trying again for up to %s to %s", problem, left, purpose)
            self._sleep(PAUSE)

    def _decode(self, reply: _Reply, kind: Any) -> Any:
        try:
            return reply.decode(kind)
        except msgspec.MsgspecError as error:
            raise MasterError(
                f"the reply from {self.url} is not of a master of this version: {error}"
            ) from error

    def _send(self, name: str, request: Request[Any] | None, limit: float) -> _Reply:
        """Send a request once, and wait for its reply within a limit of seconds.

        The master may have closed a kept connection meanwhile, as servers do. The request is then
        sent on another one.
        """
        ends = time.monotonic() + limit
        while True:
            endpoint = self._endpoint
            may_frame = isinstance(request, NodeRequest | Join)
            found = self._take_idle(endpoint, may_frame=may_frame)
            wire, kept = found or _Wire(_connect(endpoint), speaks_frames=False), found is not None
            try:
                if not kept and may_frame:
                    wire = self._ask_for_frames(wire, endpoint, ends)
                reply = self._exchange(
                    wire, f"{endpoint.path}/v{PROTOCOL_VERSION}/{name}", request, ends
                )
            except BaseException as error:
                if isinstance(error, TimeoutError) and wire.connection.sock is not None:
                    self._late.append(wire)
                else:
                    wire.close()
                gone = isinstance(error, OSError | http.client.HTTPException)
                if kept and gone and not isinstance(error, TimeoutError):
                    continue
                raise
            return reply

    def _ask_for_frames(self, wire: _Wire, endpoint: _Endpoint, ends: float) -> _Wire:
        """The new connection, as one that speaks frames if the master does."""
        if endpoint.url in self._without_frames:
            self._without_frames.discard(endpoint.url)
            return wire
        _open(wire.connection, ends)
        try:
            speaks = frames.upgrade(wire.connection, endpoint.path, self._headers)
        except (OSError, http.client.HTTPException):
            self._without_frames.add(endpoint.url)
            raise
        return _Wire(wire.connection, speaks)

    def _exchange(
        self, wire: _Wire, target: str, request: Request[Any] | None, ends: float
    ) -> _Reply:
        connection, is_last = wire.connection, False
        body = None if request is None else wire.encode(request)
        _open(connection, ends)
        if wire.speaks_frames:
            assert body is not None
            status, text = frames.exchange(connection.sock, body, ends)
        else:
            method = "GET" if body is None else "POST"
            connection.request(method, target, body, self._headers)
            response = connection.getresponse()
            status, text, is_last = response.status, response.read(), response.will_close
        if status not in _BUSY:  # as a proxy is whose master is away
            _close_all(self._late)
        if is_last:
            connection.close()
        else:
            self._idle.append(wire)
        return _Reply(status, text, wire.speaks_frames)

    def _take_idle(self, endpoint: _Endpoint, *, may_frame: bool) -> _Wire | None:
        """A connection to an endpoint that no request uses; None if there is none."""
        for wire in reversed(self._idle):
            at = wire.connection.host, wire.connection.port
            if at == (endpoint.host, endpoint.port) and (may_frame or not wire.speaks_frames):
                with contextlib.suppress(ValueError):  # another thread has taken it
                    self._idle.remove(wire)
                    return wire
        return None

    def local_address(self) -> str:
        """The address of this machine as others on the master's network reach it.

        Raises:
            MasterError: If the master's host cannot be resolved and reached.
        """
        endpoint = self._endpoint
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # nothing is sent; this only chooses the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MasterError(f"the master at {endpoint.url} cannot be reached: {error}") from error


def _connect(endpoint: _Endpoint) -> http.client.HTTPConnection:
    if endpoint.tls is None:
        return http.client.HTTPConnection(endpoint.host, endpoint.port)
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, context=endpoint.tls)


def _open(connection: http.client.HTTPConnection, ends: float) -> None:
    """Connect, if it is not connected, and let what follows end by a time."""
    connection.timeout = _left_until(ends)
    if connection.sock is None:
        connection.connect()
    connection.sock.settimeout(_left_until(ends))


def _read_url(file: Path) -> str:
    """The URL in a file; empty if there is none yet."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the URL of the master cannot be read: {file}: {error}") from error


def _parts_of(url: str) -> SplitResult:
    """The parts of a master's URL."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_url = parts.scheme in ("http", "https") and parts.hostname is not None
        parts.port  # noqa: B018 - raises if it is none
    except ValueError:
        is_url = False
    if not is_url:
        raise MasterError(f"{url!r} is no URL of a master; it looks like http://host:port")
    return parts


def _close_all(connections: list[_Wire]) -> None:
    """Close connections; another thread may take some meanwhile."""
    with contextlib.suppress(IndexError):
        while True:
            connections.pop().close()


def _left_until(ends: float) -> float:
    """Seconds until a time; never 0, which would mean not to wait at all."""
    return max(ends - time.monotonic(), 0.001)


def _duration(seconds: float) -> str:
    """A time in words, for messages."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _trusting(certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:  # which errors of ssl are, too
        raise StorageError(f"{certificates}: cannot be used as certificates: {error}") from error
