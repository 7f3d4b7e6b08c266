"""Asks the master by HTTP, as people and other programs do.

Agents have sessions (`remesh.elastic.session`), and get the address of the master from here.

There is no event loop and no thread here.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from remesh.elastic.directories import token_of
from remesh.elastic.protocol import PROTOCOL_VERSION, Problem, SetNode
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
HINT = "; is it running, and can this machine reach it?"


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


class Client:
    """Where a master is, and requests to it.

    Args:
        url: Where it is, `http://host:port`, as it prints it. Or the path of a file that holds
            this: text without `://` is a path if it has a slash, or there is such a file. The
            client waits for the file, and reads it again whenever the master does not answer: it
            may have restarted elsewhere.
        token: The master's token. Without one, that of a master which an agent (`remesh run`) of
            this user runs on this machine is found.
        tls_ca: A file of certificates to trust, for HTTPS; the system's by default.
        patience: Seconds for which the file is awaited, and an agent waits for the master.
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
        is_path = "://" not in url and ("/" in url or Path(url).is_file())
        self._url_file = Path(url) if is_path else None
        self._file_problem = ""  # why the file could not be used when it was last read
        self.tls: ssl.SSLContext | None = None
        self.url = self._at(self._await_url(self._url_file) if self._url_file else url)
        host, port = _host_of(self.url)
        if not token and host in ("127.0.0.1", "localhost"):
            token = token_of(port)
        self.authorization = {"Authorization": f"Bearer {token}"} if token else {}

    def url_of(self, name: str) -> str:
        return f"{self.url}/v{PROTOCOL_VERSION}/{name}"

    def _at(self, url: str) -> str:
        """The URL of a master, with which secure connections are prepared."""
        parts, file = _parts_of(url), self._tls_ca
        try:
            self.tls = ssl.create_default_context(cafile=file) if parts.scheme == "https" else None
        except OSError as error:  # which errors of ssl are, too
            raise StorageError(f"{file}: cannot be used as certificates: {error}") from error
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"

    def _await_url(self, file: Path) -> str:
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
        url, problem = self.url, ""
        try:
            found = _read_url(self._url_file)
            url = self._at(found) if found else url
        except (MasterError, StorageError) as error:
            problem = str(error)
        if problem and problem != self._file_problem:
            log.warning("%s; the master is still taken to be at %s", problem, self.url)
        self._file_problem = problem
        if url == self.url:
            return False
        log.warning("the master is at %s now; it was at %s", url, self.url)
        self.url = url
        return True

    def status(self) -> Status:
        """The status of the job.

        Raises:
            MasterError: If the request is refused, or no reply comes.
        """
        return self._answer("status", Status)

    def set_node(self, node: str, *, is_used: bool, reason: str = "") -> None:
        """Exclude a node, by name or id, or use it again.

        Raises:
            MasterError: If the request is refused, or no reply comes.
        """
        self._answer("node", dict, SetNode(node=node, is_used=is_used, reason=reason))

    def _answer(self, name: str, kind: type[T], body: object = None) -> T:
        """The answer to a request; a master that has moved is asked where it is now."""
        try:
            text = self._send(name, body)
        except MasterError:
            if not self.has_moved():
                raise
            text = self._send(name, body)
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MasterError(
                f"the reply from {self.url} is not of a master of this version: {error}"
            ) from error

    def _send(self, name: str, body: object) -> bytes:
        """Send a request once, to this host whatever the reply says; the body of the reply."""
        data = None if body is None else msgspec.json.encode(body)
        # Tokens may be of any script; http.client writes Latin-1.
        headers = {key: text.encode().decode("latin-1") for key, text in self.authorization.items()}
        headers["Content-Type"] = "application/json"
        host, port = _host_of(self.url)
        try:
            connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT)
            if self.tls is not None:
                connection = http.client.HTTPSConnection(
                    host, port, timeout=REQUEST_TIMEOUT, context=self.tls
                )
            with contextlib.closing(connection):
                path = urlsplit(self.url_of(name)).path
                connection.request("GET" if data is None else "POST", path, data, headers)
                reply = connection.getresponse()
                status, text = reply.status, reply.read()
        except ssl.SSLCertVerificationError as error:
            raise MasterError(not_trusted(self.url, error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise MasterError(f"{no_answer(self.url, error)}{HINT}") from error
        if status == http.HTTPStatus.OK:
            return text
        problem = f"HTTP status {status}"
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            problem = msgspec.json.decode(text, type=Problem).error
        raise MasterError(f"{self.url}: {problem}")

    def refusal(self, name: str) -> str:
        """Why a request is refused, as the master says it."""
        try:
            self._send(name, None)
        except MasterError as error:
            return str(error)
        return f"{self.url} does not refuse any more"

    def local_address(self) -> str:
        """The address of this machine as others on the master's network reach it.

        Raises:
            MasterError: If the master's host cannot be resolved and reached.
        """
        host, port = _host_of(self.url)
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # nothing is sent; this only chooses the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MasterError(f"the master at {self.url} cannot be reached: {error}") from error


def no_answer(url: str, error: Exception) -> str:
    """That a master does not answer, and why."""
    text = f"the master at {url} does not answer ({str(error) or type(error).__name__})"
    # That is how one with TLS ends what does not begin with it.
    is_cut = url.startswith("http:") and "Disconnected" in type(error).__name__
    return f"{text}\nIf it has --tls-cert, its URL begins with https" if is_cut else text


def not_trusted(url: str, error: Exception) -> str:
    """That the certificate of a master is not trusted, and why."""
    return (
        f"{url} is not trusted\n{error}\n"
        "Name the certificate that signs its own with --tls-ca; the URL has a host that is in it"
    )


def _host_of(url: str) -> tuple[str, int]:
    parts = _parts_of(url)
    assert parts.hostname is not None
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _read_url(file: Path) -> str:
    """The URL in a file; empty if there is none yet."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the URL of the master cannot be read: {file}: {error}") from error


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_url = parts.scheme in ("http", "https") and parts.hostname is not None
        parts.port  # noqa: B018 - raises if it is none
    except ValueError:
        is_url = False
    if not is_url:
        raise MasterError(f"{url!r} is no URL of a master; it looks like http://host:port")
    return parts
