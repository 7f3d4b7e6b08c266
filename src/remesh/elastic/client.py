"""What agents use to ask the master: plain HTTP requests of the standard library.

There is no event loop and no thread here, so that a launcher may start processes as it likes. While
the master is away (it may be being restarted) a request is repeated until `patience` is over:
every request does the same a second time.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

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

_T = TypeVar("_T")

_decode_join: Callable[[bytes], JoinReply] = msgspec.json.Decoder(JoinReply).decode

REQUEST_TIMEOUT = 15.0
"""Seconds for an answer, beyond what the request itself wants to wait."""
PAUSE = 0.5
"""Seconds between two attempts."""


def read_token(path: str | None) -> str:
    """The token in a file, without the white space around it; empty without a file.

    Raises:
        StorageError: If the file cannot be read or is empty.
    """
    if path is None:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StorageError(f"the token cannot be read: {error}") from error
    if not token:
        raise StorageError(f"{path} holds no token")
    return token


class Client:
    """Asks a master.

    Args:
        url: Where it is, `http://host:port`, as it prints it.
        token: What it wants to know.
        tls_ca: A file of certificates to trust, for HTTPS; the system's by default.
        patience: Seconds for which a master that is away is asked again.

    Raises:
        MasterError: If the URL is none.
        StorageError: If the certificates cannot be read.
    """

    def __init__(
        self, url: str, *, token: str = "", tls_ca: str | None = None, patience: float = 0.0
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise MasterError(f"{url!r} is no URL of a master; it looks like http://host:port")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host = parts.hostname
        self._port = parts.port
        self._tls = _trusting(tls_ca) if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._patience = patience

    def join(self, request: JoinRequest) -> JoinReply:
        """Be ready for the next round."""
        return self._ask("join", request, _decode_join, request.wait)

    def beat(self, request: BeatRequest) -> BeatReply:
        """Say that the node lives."""
        return self._ask("beat", request, _decoder(BeatReply))

    def failed(self, request: FailedRequest) -> Ruling:
        """Say that processes failed."""
        return self._ask("failed", request, _decoder(Ruling))

    def leave(self, request: LeaveRequest) -> None:
        """Say that the node goes."""
        self._ask("leave", request, _decoder(Accepted))

    def drain(self, request: DrainRequest) -> None:
        """Say that the node has to go soon."""
        self._ask("drain", request, _decoder(Accepted))

    def put(self, request: PutRequest) -> None:
        """Leave a word for the other nodes."""
        self._ask("put", request, _decoder(Accepted))

    def get(self, request: GetRequest) -> str | None:
        """Ask for a word; None if it is not there in time."""
        return self._ask("get", request, _decoder(Value), request.wait).value

    def tested(self, request: TestedRequest) -> None:
        """Say how a test went."""
        self._ask("tested", request, _decoder(Accepted))

    def stacks(self, request: StacksRequest) -> None:
        """Say where the processes were."""
        self._ask("stacks", request, _decoder(Accepted))

    def check(self, reason: str) -> None:
        """Have all nodes tested before the next round."""
        self._ask("check", CheckRequest(reason=reason), _decoder(Accepted))

    def status(self) -> Status:
        """Everything there is to see."""
        return self._ask("status", None, _decoder(Status))

    def _ask(
        self, name: str, request: object, decode: Callable[[bytes], _T], wait: float = 0.0
    ) -> _T:
        """Send a request until it is answered.

        Raises:
            MasterError: If it is refused, or nobody answers.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                status, text = self._send(name, request, wait)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= deadline:
                    raise MasterError(
                        f"the master at {self.url} does not answer ({error}); is it running, and "
                        "can this machine reach it?"
                    ) from error
                time.sleep(PAUSE)
                continue
            if status == http.HTTPStatus.OK:
                try:
                    return decode(text)
                except msgspec.MsgspecError as error:
                    raise MasterError(
                        f"what answers at {self.url} is no master of this version: {error}"
                    ) from error
            busy = status in (http.HTTPStatus.TOO_MANY_REQUESTS, 502, 503, 504)
            if not busy or time.monotonic() >= deadline:
                raise MasterError(f"{self.url}: {_problem(status, text)}")
            time.sleep(PAUSE)

    def _send(self, name: str, request: object, wait: float) -> tuple[int, bytes]:
        connection = self._connect(wait + REQUEST_TIMEOUT)
        try:
            body = None if request is None else msgspec.json.encode(request)
            method = "GET" if request is None else "POST"
            connection.request(method, f"/v1/{name}", body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=timeout, context=self._tls
        )

    def local_address(self) -> str:
        """The address of this machine as others on the master's network reach it.

        Raises:
            MasterError: If the master's name is not known.
        """
        port = self._port or (443 if self._tls is not None else 80)
        try:
            family, kind, proto, _name, address = socket.getaddrinfo(
                self._host, port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # nothing is sent; this only chooses the way
                return str(probe.getsockname()[0])
        except OSError as error:
            raise MasterError(f"there is no way to the master at {self.url}: {error}") from error


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
