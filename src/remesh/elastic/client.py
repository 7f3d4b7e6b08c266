"""Asks the master by HTTP, as people and other programs do.

Agents have sessions (`remesh.elastic.session`), and get the address of the master from here.

There is no event loop and no thread here. While the master does not answer (it may be being
restarted) a request is repeated for `patience` seconds: a repeated request has no further effect.
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

from remesh.elastic.directories import token_of
from remesh.elastic.protocol import PROTOCOL_VERSION, Problem, RequestCheck
from remesh.elastic.status import Status
from remesh.errors import MasterError, StorageError

__all__ = ["Client", "read_token"]

T = TypeVar("T")

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 15.0
"""Seconds for a reply."""
PAUSE = 0.5
"""Seconds between two attempts."""
LOG_EVERY = 60.0
"""Seconds after which it is logged again that the master does not answer."""
BUSY = (429, 502, 503, 504)
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
class Endpoint:
    """The address of a master."""

    url: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None


class Client:
    """Where a master is, and requests to it.

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
        self._tls_ca = tls_ca
        self.patience = patience
        self._clock = clock
        self._sleep = sleep
        is_path = "/" in url and "://" not in url
        self._url_file = Path(url) if is_path else None
        self._file_problem = ""  # why the file could not be used when it was last read
        self.endpoint = self._at(self._await_url(self._url_file) if self._url_file else url)
        if not token and self.endpoint.host in ("127.0.0.1", "localhost"):
            token = token_of(self.endpoint.port)
        self.authorization = {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def url(self) -> str:
        """The master's URL, as last known."""
        return self.endpoint.url

    def path(self, name: str) -> str:
        """The path of a request."""
        return f"{self.endpoint.path}/v{PROTOCOL_VERSION}/{name}"

    def _at(self, url: str) -> Endpoint:
        parts = _parts_of(url)
        assert parts.hostname is not None
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/")
        return Endpoint(
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

    def has_moved(self) -> bool:
        """True if the URL has changed; if so, requests go to the new one from now on.

        A file that cannot be used at the moment changes nothing: it is read again after the next
        request that is not answered.
        """
        if self._url_file is None:
            return False
        endpoint, problem = self.endpoint, ""
        try:
            url = _read_url(self._url_file)
            endpoint = self._at(url) if url else endpoint
        except (MasterError, StorageError) as error:
            problem = str(error)
        if problem and problem != self._file_problem:
            log.warning("%s; the master is still taken to be at %s", problem, self.url)
        self._file_problem = problem
        if endpoint.url == self.endpoint.url:
            return False
        log.warning("the master is at %s now; it was at %s", url, self.url)
        self.endpoint = endpoint
        return True

    def status(self) -> Status:
        """The status of the job.

        Raises:
            MasterError: If the request is refused, or no reply comes.
        """
        return self._repeat("status", None, Status, "show the job")

    def request_check(self, reason: str) -> None:
        """Have all nodes tested before the next round.

        Raises:
            MasterError: If the request is refused, or no reply comes.
        """
        self._repeat("check", RequestCheck(reason=reason), dict, "request a check of all nodes")

    def _repeat(self, name: str, body: object, kind: type[T], purpose: str) -> T:
        """Send a request until it is answered."""
        began, logged_at = self._clock(), None
        while True:
            endpoint = self.endpoint
            try:
                status, text = self._send(name, body)
                if status == http.HTTPStatus.OK:
                    if logged_at is not None:
                        waited = self._clock() - began
                        log.warning("the master answers again, after %.0f s", waited)
                    return self._decode(text, kind)
                problem = f"{endpoint.url}: {_problem_in(status, text)}"
            except ssl.SSLCertVerificationError as error:
                raise MasterError(f"{endpoint.url} is not trusted: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                status, problem = 0, no_answer(endpoint, error)
            waited = self._clock() - began
            if self.has_moved():
                continue
            if status and (status not in BUSY or waited >= self.patience):
                raise MasterError(problem)
            if waited >= self.patience:
                raise MasterError(f"{problem}; is it running, and can this machine reach it?")
            if logged_at is None or waited - logged_at >= LOG_EVERY:
                logged_at = waited
                left = duration(self.patience - waited)
                log.warning("%s; trying again for up to %s to %s", problem, left, purpose)
            self._sleep(PAUSE)

    def _decode(self, text: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MasterError(
                f"the reply from {self.url} is not of a master of this version: {error}"
            ) from error

    def _send(self, name: str, body: object) -> tuple[int, bytes]:
        """Send a request once; the status and the body of the reply."""
        endpoint = self.endpoint
        connection = _connect(endpoint)
        headers: dict[str, str | bytes] = {
            key: value.encode() for key, value in self.authorization.items()
        }
        headers["Content-Type"] = "application/json"
        try:
            method = "GET" if body is None else "POST"
            sent = None if body is None else msgspec.json.encode(body)
            connection.request(method, self.path(name), sent, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def refusal(self, name: str) -> str:
        """Why a request is refused, as the master says it."""
        try:
            return _problem_in(*self._send(name, None))
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__

    def local_address(self) -> str:
        """The address of this machine as others on the master's network reach it.

        Raises:
            MasterError: If the master's host cannot be resolved and reached.
        """
        endpoint = self.endpoint
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # nothing is sent; this only chooses the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MasterError(f"the master at {endpoint.url} cannot be reached: {error}") from error


def no_answer(endpoint: Endpoint, error: Exception) -> str:
    """That a master does not answer, and why."""
    return f"the master at {endpoint.url} does not answer ({str(error) or type(error).__name__})"


def _problem_in(status: int, text: bytes) -> str:
    """The problem that a reply tells of."""
    try:
        return msgspec.json.decode(text, type=Problem).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"HTTP status {status}"


def _connect(endpoint: Endpoint) -> http.client.HTTPConnection:
    host, port, limit = endpoint.host, endpoint.port, REQUEST_TIMEOUT
    if endpoint.tls is None:
        return http.client.HTTPConnection(host, port, timeout=limit)
    return http.client.HTTPSConnection(host, port, timeout=limit, context=endpoint.tls)


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


def duration(seconds: float) -> str:
    """A time in words, for messages."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _trusting(certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:  # which errors of ssl are, too
        raise StorageError(f"{certificates}: cannot be used as certificates: {error}") from error
