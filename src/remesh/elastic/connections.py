"""The master's open connections: how many there may be, and which are closed first.

Idle connections must not keep the nodes of a job from their master. A connection has some seconds
to send a whole request. At the limit, one is closed for the next: first those that have never sent
a valid request, then those that wait for their next one, the longest silent first. Connections
whose request is being answered stay open.

`Connections` decides which, without sockets and clock. `Listener` accepts and closes, and tells who
is interested which connections were closed, and by whom.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
"""Time for a connection's first request, TLS included, and for the body of each."""
IDLE_SECONDS = 75.0
"""How long a connection may wait for the next request."""
SWEEP_SECONDS = 0.1
"""Time between two looks at which connections are closed, at least."""
SWEEP_PAUSES = 20
"""How many times as long as a look the time to the next one is, at least."""
OVERDUE_SECONDS = 1.0
"""Time between two looks at which connections have to be closed."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
KEPT_FILES = 64
"""Open files that are not for connections."""


@dataclass(slots=True, eq=False)
class Connection:
    """An open connection."""

    number: int  # differs from those of all others
    since: float  # when it was opened, or answered last
    is_known: bool = False  # whether it has sent a valid request
    num_running: int = 0  # its requests that are being answered
    partial_since: float | None = None
    """Since when only a part of a request is there, where that is known."""

    def begin_request(self) -> None:
        """A valid request has arrived whole."""
        self.is_known = True
        self.num_running += 1

    def end_request(self, now: float) -> None:
        """It is answered."""
        self.num_running -= 1
        self.since = now


@dataclass(slots=True)
class Connections:
    """The open connections."""

    most: int  # how many there may be
    _open: set[Connection] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, now: float) -> Connection:
        """Add a connection."""
        connection = Connection(next(self._numbers), now)
        self._open.add(connection)
        return connection

    def close(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open.discard(connection)

    def overdue(self, now: float) -> list[Connection]:
        """Connections whose time for a request has passed."""
        return [
            connection
            for connection in self._open
            if not connection.num_running
            and (
                now - connection.since > (IDLE_SECONDS if connection.is_known else REQUEST_SECONDS)
                or now - (connection.partial_since or now) > REQUEST_SECONDS
            )
        ]

    def first_to_close(self) -> Connection | None:
        """The one to close for another; None if all are being answered."""
        silent = [connection for connection in self._open if not connection.num_running]
        return min(silent, key=lambda each: (each.is_known, each.since), default=None)


def max_connections() -> int:
    """The limit of open files of this process, without those that it needs."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(soft - KEPT_FILES, 16)


class Listener:
    """Accepts connections, and closes those that `Connections` names.

    `on_close` is called with the number of each that was closed, and `by_peer`.
    """

    def __init__(self, tls: ssl.SSLContext | None, on_close: Callable[..., object]) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connections = Connections(max_connections())
        self._on_close = on_close
        self._closers: dict[Connection, Callable[[], object]] = {}
        self._of: dict[asyncio.BaseTransport, Connection] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []

    def listen(self, make: Callable[[], asyncio.Protocol], host: str, port: int) -> int:
        """Begin to accept at a port, 0 for any free one; the port."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _kind, _proto, _name, address in dict.fromkeys(found):
            place = (str(address[0]), port)
            try:
                listener = socket.create_server(place, family=family, backlog=4096)
            except OSError as error:
                if error.errno in _NO_SUCH_ADDRESS:
                    continue  # a name may have addresses of a family that the machine has not
                raise
            listener.setblocking(False)
            self._listeners.append(listener)
            port = port or listener.getsockname()[1]  # the same for all addresses of a name
            self._start(self._accept(listener, make))
        if not self._listeners:
            raise OSError(f"this machine has no address {host}")
        self._start(self._sweep())
        return port

    def of(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """The connection of a request; None if it was closed meanwhile."""
        return None if transport is None else self._of.get(transport)

    async def close(self) -> None:
        """Stop accepting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        while True:
            if len(self._connections) >= self._connections.most:
                # At the next turn of the loop, what makes room has been closed.
                await asyncio.sleep(0 if self._make_room() else 0.1)
                continue
            try:
                accepted, _address = await self._loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection cannot be accepted: %s", error)
                self._make_room()
                await asyncio.sleep(0.1)
                continue
            connection = self._connections.open(self._loop.time())
            admission = self._start(self._admit(connection, accepted, make))
            self._closers[connection] = admission.cancel
            await asyncio.sleep(0)  # a task that is cancelled before it begins closes nothing

    async def _admit(
        self,
        connection: Connection,
        accepted: socket.socket,
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        """Connect the protocol to a socket; with TLS this takes as long as the peer makes it."""
        try:
            transport, _protocol = await self._loop.connect_accepted_socket(
                make, accepted, ssl=self._tls
            )
        except (OSError, asyncio.CancelledError):
            accepted.close()
            self._forget(connection)
            return
        self._of[transport] = connection
        # abort: the peer may never read what is still to be sent.
        self._closers[connection] = transport.abort

    def _make_room(self) -> bool:
        """Forget what is closed already, or close a connection."""
        if self._forget_closed():
            return True
        connection = self._connections.first_to_close()
        if connection is None:
            log.warning("all %d connections are in use; further ones wait", len(self._connections))
            return False
        if connection.is_known:
            log.warning("too many connections are open: idle ones are closed")
        else:
            log.warning("too many connections are open: those without a request are closed")
        self._close(connection)
        return True

    def _forget_closed(self) -> bool:
        gone = [transport for transport in self._of if transport.is_closing()]
        for transport in gone:
            self._forget(self._of.pop(transport))
        return bool(gone)

    def _close(self, connection: Connection) -> None:
        self._on_close(connection.number, by_peer=False)
        self._closers[connection]()
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        # What this end has closed is known by now, and is not told again.
        self._on_close(connection.number, by_peer=True)
        self._connections.close(connection)
        self._closers.pop(connection, None)

    async def _sweep(self) -> None:
        pause, look_at = SWEEP_SECONDS, 0.0
        while True:
            await asyncio.sleep(pause)
            began = self._loop.time()
            self._forget_closed()
            if began >= look_at:
                look_at = began + OVERDUE_SECONDS
                for connection in self._connections.overdue(began):
                    self._close(connection)
            pause = max(SWEEP_SECONDS, SWEEP_PAUSES * (self._loop.time() - began))
