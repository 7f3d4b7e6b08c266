"""What agents use to ask the master: plain HTTP requests of the standard library.

There is no event loop and no thread here, so that a launcher may start processes as it likes.
Connections are kept open for the next request. While the master is away (it may be being restarted)
a request is repeated until `patience` is over: every request does the same a second time. A beat is
sent once, since the next one is newer.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from remesh.elastic.failures import Ruling
from remesh.elastic.protocol import (
    Accepted,
    BeatReply,
    BeatRequest,
    CheckRequest,
    DrainRequest,
    FailedRequest,
    GetRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Problem,
    PutRequest,
    StacksRequest,
    TestedRequest,
    Value,
)
from remesh.elastic.status import Status
from remesh.errors import MasterError, StorageError

__all__ = ["Client", "read_token"]

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_decode_join: Callable[[bytes], JoinReply] = msgspec.json.Decoder(JoinReply).decode

REQUEST_TIMEOUT = 15.0
"""Seconds for an answer, beyond what the request itself wants to wait."""
PAUSE = 0.5
"""Seconds between two attempts."""
SAY_EVERY = 60.0
"""Seconds after which it is said again that the master is away."""

_PURPOSES = {
    "join": "join the next round",
    "failed": "report processes that failed",
    "leave": "say that this node goes",
    "drain": "say that this node has to go",
    "put": "tell the other nodes where to meet",
    "get": "learn where the nodes meet",
    "tested": "report a test",
    "stacks": "send the stacks of the processes",
}
"""What requests are for, in messages that say what is waited for."""
_BUSY = (429, 502, 503, 504)
"""HTTP statuses of a master that answers later."""


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
class _Place:
    """Where a master is."""

    url: str
    host: str
    port: int
    tls: ssl.SSLContext | None


class Client:
    """Asks a master.

    Args:
        url: Where it is, `http://host:port`, as it prints it; or the path of a file that holds the
            URL. Text with a slash and without `://` is a path. The file is awaited, and read again
            whenever the master does not answer, since a master may come back elsewhere.
        token: What it wants to know.
        tls_ca: A file of certificates to trust, for HTTPS; the system's by default.
        patience: Seconds for which a master that is away is asked again.
        clock: Seconds that never jump.
        sleep: Lets seconds pass.

    Raises:
        MasterError: If the URL is none, or the file does not come.
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
        self._idle: list[http.client.HTTPConnection] = []
        self._tls_ca = tls_ca
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}".encode()
        self.patience = patience
        self._clock = clock
        self._sleep = sleep
        is_path = "/" in url and "://" not in url
        self._url_file = Path(url) if is_path else None
        self._place = self._at(self._await_url(self._url_file) if self._url_file else url)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    @property
    def url(self) -> str:
        """Where the master is, as far as is known."""
        return self._place.url

    def _at(self, url: str) -> _Place:
        parts = _parts_of(url)
        assert parts.hostname is not None
        is_https = parts.scheme == "https"
        return _Place(
            f"{parts.scheme}://{parts.netloc}",
            parts.hostname,
            parts.port or (443 if is_https else 80),
            _trusting(self._tls_ca) if is_https else None,
        )

    def _await_url(self, file: Path) -> str:
        """The URL in a file, as soon as there is one."""
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
        """Whether the master has come back elsewhere; if so, it is asked there from now on."""
        url = _read_url(self._url_file) if self._url_file else ""
        place = self._at(url) if url else self._place
        if place.url == self.url:
            return False
        log.warning("the master is at %s now; it was at %s", place.url, self.url)
        self._place = place
        self.close()
        return True

    def join(self, request: JoinRequest, patience: float | None = None) -> JoinReply:
        """Be ready for the next round."""
        return self._ask("join", request, _decode_join, wait=request.wait, patience=patience)

    def beat(self, request: BeatRequest, limit: float = REQUEST_TIMEOUT) -> BeatReply:
        """Say that the node lives, once.

        Args:
            request: What to say.
            limit: Seconds for an answer.
        """
        return self._ask("beat", request, _decoder(BeatReply), limit=limit, patience=0.0)

    def failed(self, request: FailedRequest) -> Ruling:
        """Say that processes failed."""
        return self._ask("failed", request, _decoder(Ruling))

    def leave(self, request: LeaveRequest, patience: float | None = None) -> None:
        """Say that the node goes."""
        self._ask("leave", request, _decoder(Accepted), patience=patience)

    def drain(self, request: DrainRequest, patience: float | None = None) -> None:
        """Say that the node has to go soon."""
        self._ask("drain", request, _decoder(Accepted), patience=patience)

    def put(self, request: PutRequest) -> None:
        """Leave a word for the other nodes."""
        self._ask("put", request, _decoder(Accepted))

    def get(self, request: GetRequest) -> str | None:
        """Ask for a word; None if it is not there in time."""
        return self._ask("get", request, _decoder(Value), wait=request.wait).value

    def tested(self, request: TestedRequest) -> None:
        """Say how a test went."""
        self._ask("tested", request, _decoder(Accepted))

    def stacks(self, request: StacksRequest, patience: float | None = None) -> None:
        """Say where the processes were."""
        self._ask("stacks", request, _decoder(Accepted), patience=patience)

    def check(self, reason: str) -> None:
        """Have all nodes tested before the next round."""
        self._ask("check", CheckRequest(reason=reason), _decoder(Accepted))

    def status(self) -> Status:
        """Everything there is to see."""
        return self._ask("status", None, _decoder(Status))

    def _ask(
        self,
        name: str,
        request: object,
        decode: Callable[[bytes], _T],
        *,
        wait: float = 0.0,
        limit: float = REQUEST_TIMEOUT,
        patience: float | None = None,
    ) -> _T:
        """Send a request until it is answered.

        Args:
            name: Which request.
            request: Its body; None asks without one.
            decode: Reads the answer.
            wait: Seconds for which the request itself asks the master to wait.
            limit: Seconds for an answer beyond that.
            patience: Seconds for which it is sent again; the client's by default.

        Raises:
            MasterError: If it is refused, or no answer comes.
        """
        patience = self.patience if patience is None else patience
        began, said_at = self._clock(), None
        while True:
            try:
                status, text = self._send(name, request, wait + limit)
                problem = f"{self.url}: {_problem(status, text)}"
            except ssl.SSLCertVerificationError as error:
                raise MasterError(f"{self.url} is not trusted: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                status, text = 0, b""
                why = str(error) or type(error).__name__
                problem = f"the master at {self.url} does not answer ({why})"
            waited = self._clock() - began
            if status == http.HTTPStatus.OK:
                if said_at is not None:
                    log.warning("the master answers again, after %.0f s", waited)
                return self._decode(decode, text)
            if self._has_moved():
                continue
            if status and status not in _BUSY:
                raise MasterError(problem)
            if waited >= patience:
                if status:
                    raise MasterError(problem)
                raise MasterError(f"{problem}; is it running, and can this machine reach it?")
            if said_at is None or waited - said_at >= SAY_EVERY:
                said_at = waited
                purpose, left = _PURPOSES.get(name, name), _duration(patience - waited)
                log.warning("%s; this node waits up to %s for it to %s", problem, left, purpose)
            self._sleep(PAUSE)

    def _decode(self, decode: Callable[[bytes], _T], text: bytes) -> _T:
        try:
            return decode(text)
        except msgspec.MsgspecError as error:
            raise MasterError(
                f"what answers at {self.url} is no master of this version: {error}"
            ) from error

    def _send(self, name: str, request: object, limit: float) -> tuple[int, bytes]:
        """Send a request once; the status and the body of its answer, within a limit of seconds.

        A kept connection may have been closed by the master meanwhile, as servers do. That says
        nothing of the master: the request goes on another one.
        """
        ends = time.monotonic() + limit
        while True:
            try:
                connection, kept = self._idle.pop(), True
            except IndexError:
                connection, kept = self._connect(), False
            try:
                answer = self._exchange(connection, name, request, ends)
            except BaseException as error:
                connection.close()
                gone = isinstance(error, OSError | http.client.HTTPException)
                if kept and gone and not isinstance(error, TimeoutError):
                    continue
                raise
            return answer

    def _exchange(
        self, connection: http.client.HTTPConnection, name: str, request: object, ends: float
    ) -> tuple[int, bytes]:
        connection.timeout = _left_until(ends)
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(_left_until(ends))
        body = None if request is None else msgspec.json.encode(request)
        method = "GET" if request is None else "POST"
        connection.request(method, f"/v1/{name}", body, self._headers)
        response = connection.getresponse()
        text = response.read()
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        return response.status, text

    def _connect(self) -> http.client.HTTPConnection:
        place = self._place
        if place.tls is None:
            return http.client.HTTPConnection(place.host, place.port)
        return http.client.HTTPSConnection(place.host, place.port, context=place.tls)

    def local_address(self) -> str:
        """The address of this machine as others on the master's network reach it.

        Raises:
            MasterError: If the master's name is not known.
        """
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                self._place.host, self._place.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # nothing is sent; this only chooses the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MasterError(f"there is no way to the master at {self.url}: {error}") from error


def _read_url(file: Path) -> str:
    """The URL in a file; empty if there is none yet.

    Raises:
        StorageError: If the file cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the URL of the master cannot be read: {file}: {error}") from error


def _parts_of(url: str) -> SplitResult:
    """The parts of a master's URL.

    Raises:
        MasterError: If it is none.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_url = parts.scheme in ("http", "https") and parts.hostname is not None
        parts.port  # noqa: B018 - raises if it is none
    except ValueError:
        is_url = False
    if not is_url:
        raise MasterError(f"{url!r} is no URL of a master; it looks like http://host:port")
    return parts


def _left_until(ends: float) -> float:
    """Seconds until a moment; never 0, which would mean not to wait at all."""
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


def _decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    return msgspec.json.Decoder(kind).decode


def _problem(status: int, text: bytes) -> str:
    try:
        return msgspec.json.decode(text, type=Problem).error
    except msgspec.MsgspecError:
        return f"HTTP status {status}"
