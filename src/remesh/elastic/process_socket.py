"""The socket between a training process and its agent.

The agent listens at a Unix socket for each of its processes, which find its path in their
environment (`RunInfo.agent_socket`); what they start inherits it, and may connect as well. The
kernel says which process has connected. Packets are JSON, and come whole and in order.

A process says what it observes: how far it is (`RankProgress`), and, if its training function can
be entered again, whether it is out of it (`Report`). Each replaces what the same process has said
before. It never waits for the agent: while that reads nothing, progress is dropped, and the next
one tells more.

The agent shows each process an `Instruction`: the newest is a state and not an event. It is sent to
each connection when it begins, and whenever it changes, so none is lost, and a manager that is made
later than others knows as much. An order to leave the world or to enter the next one has a number,
and is carried out once (`pending`). A request to save or to wait stands until there is another.

The end of a connection is the sign of death. A process whose agent has ended, or has started
another one in its place, must end, since two would train: it reads the end of its connection,
however it was started and wherever it runs. Where the socket cannot be reached, nothing is known of
the agent, except that an agent which ends removes the directory: a process that sees where that was
made (`directories.directory_mark` is part of its name) knows that it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from remesh.elastic.directories import directory_mark
from remesh.elastic.progress import RankProgress

_LOGGER = logging.getLogger("remesh")

MAX_PACKET = 1 << 16
CONNECT_SECONDS = 10
"""How long an agent may take to accept a connection, if many are made at once."""
MAX_WAITING = 128
"""Connections that the system keeps until the agent takes them."""

Request = Literal["save-and-hold", "hold"]
"""What an agent may ask for: a save after which the training waits, or that it waits without."""


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Leave the training function, and enter it again if there is a world for it."""

    number: int
    environment: dict[str, str] | None = None  # variables of the new world, such as the rank


class Instruction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the agent wants of a process."""

    order: Order | None = None
    request: Request | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process whose training function can be entered again."""

    number: int = 0  # the newest order that it has carried out; 0 before the first
    is_out: bool = False  # whether it is outside of the training function
    error: str = ""  # why it left without an order: what it raised when it lost a peer


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says of itself."""

    progress: RankProgress | None = None
    report: Report | None = None


def pending(report: Report, order: Order | None) -> Order | None:
    """The order that a process has still to carry out, given all that it knows."""
    return order if order is not None and order.number > report.number else None


class AgentConnection:
    """A connection of this process to its agent. Any of its threads may use it.

    Without an agent (an empty path), and if the agent cannot be reached, it says and hears nothing.
    """

    def __init__(self, path: str) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._socket: socket.socket | None = None
        self._newest: Instruction | None = None
        self.is_lost = False  # whether the agent has ended, or has given this process up
        if not path:
            return
        try:
            self._socket = connect(path)
        except OSError as error:
            self.is_lost = _shows_end(error, path)
            if not self.is_lost:
                _LOGGER.warning(
                    "the agent cannot be reached at %s, and learns nothing of this process: %s",
                    path,
                    error,
                )

    @property
    def is_open(self) -> bool:
        """True if there is an agent that can be reached."""
        return self._socket is not None

    def say(self, observation: Observation) -> None:
        """Tell the agent something, unless it has ended or reads nothing."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(msgspec.json.encode(observation), socket.MSG_DONTWAIT)

    def look(self, seconds: float = 0.0) -> Instruction | None:
        """The newest instruction, after waiting for another one for some seconds at most.

        None before the first, which every connection brings.
        """
        if seconds and self._socket is not None:
            with selectors.PollSelector() as selector:  # an epoll would need a descriptor
                selector.register(self._socket, selectors.EVENT_READ)
                selector.select(seconds)
        with self._lock:
            while self._socket is not None and not self.is_lost:
                try:
                    data = self._socket.recv(MAX_PACKET, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except OSError:
                    data = b""
                if data:
                    self._newest = msgspec.json.decode(data, type=Instruction)
                else:
                    self.is_lost = True
        return self._newest

    def end(self) -> None:
        """End the connection: a thread that waits in `look` returns, and the agent knows of it."""
        # Copies that forked processes have would keep it open, and must not end it.
        if self._socket is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, which no thread uses any more."""
        self.end()
        if self._socket is not None:
            self._socket.close()
        self._socket, self.is_lost = None, False


def connect(path: str) -> socket.socket:
    """A connection to the agent of a process."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # With a timeout of Python, a connection fails at once while too many others are made.
        limit = struct.pack("ll", CONNECT_SECONDS, 0)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with short_path(path) as name:
            is_made = False
            while not is_made:  # a signal may end the wait, which Python takes for a connection
                one.connect(name)
                with contextlib.suppress(OSError):
                    is_made = one.getpeername() is not None
    except OSError:
        one.close()
        raise
    return one


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Another path of a socket, for the kernel takes no more than 107 bytes."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def _shows_end(error: OSError, path: str) -> bool:
    """True if an agent has ended, as a connection to its socket was refused for that reason."""
    if isinstance(error, FileNotFoundError):
        directory = os.path.dirname(path)
        if os.path.isdir(directory):  # which ends with the agent: only the file has been removed
            return False
        parent, name = os.path.split(directory)
        with contextlib.suppress(OSError):
            return directory_mark(parent) in name
    return isinstance(error, ConnectionRefusedError)


@dataclass(slots=True)
class _Connection:
    """A connection of a process, as its agent sees it."""

    pid: int
    report: Report | None = None


@dataclass(slots=True)
class _Process:
    """What an agent knows of the process of a local rank, and of others that have its socket."""

    instruction: Instruction
    connections: dict[socket.socket, _Connection] = field(default_factory=dict)
    progress: RankProgress | None = None


class ProcessSockets:
    """The sockets of an agent, one for each of its processes, by local rank."""

    def __init__(self, directory: str, num_processes: int) -> None:
        self.directory = directory
        self._selector = selectors.DefaultSelector()
        self._processes = {rank: _Process(Instruction()) for rank in range(num_processes)}
        self._unsent: set[socket.socket] = set()
        self._listeners = [self._listen(rank) for rank in self._processes]

    def path_of(self, rank: int) -> str:
        return f"{self.directory}/{rank}.socket"

    def _listen(self, rank: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(self.path_of(rank)) as path:
            listener.bind(path)
        listener.listen(MAX_WAITING)
        listener.setblocking(False)
        self._register(listener, lambda: self._accept(listener, rank))
        return listener

    def _register(self, one: socket.socket, take: Callable[[], bool]) -> None:
        self._selector.register(one, selectors.EVENT_READ, take)

    def _accept(self, listener: socket.socket, rank: int) -> bool:
        try:
            one, _ = listener.accept()
        except OSError:  # there is no descriptor for it now
            return False
        one.setblocking(False)
        credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        self._processes[rank].connections[one] = _Connection(pid)
        self._register(one, lambda: self._receive(one, rank))
        self._send(one, rank)
        return True

    def _receive(self, one: socket.socket, rank: int) -> bool:
        process = self._processes[rank]
        try:
            try:
                data = one.recv(MAX_PACKET)
            except ConnectionResetError:  # it ended and left something unread; what it said is here
                data = one.recv(MAX_PACKET)
            said = msgspec.json.decode(data, type=Observation)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # mostly, nothing: it has ended
            self._drop(one, rank)
            return True
        if said.progress is not None:
            process.progress = said.progress
        if said.report is not None:
            process.connections[one].report = said.report
        return True

    def _drop(self, one: socket.socket, rank: int) -> None:
        del self._processes[rank].connections[one]
        self._unsent.discard(one)
        self._selector.unregister(one)
        one.close()

    def _send(self, one: socket.socket, rank: int) -> None:
        self._unsent.discard(one)
        try:
            one.send(msgspec.json.encode(self._processes[rank].instruction))
        except BlockingIOError:  # it has not read a hundred earlier ones
            self._unsent.add(one)
        except OSError:  # it has ended, as is read next
            pass

    def take(self, seconds: float = 0.0) -> None:
        """Take what processes have said, after waiting for it for some seconds at most."""
        while any(key.data() for key, _ in self._selector.select(seconds)):
            seconds = 0.0
        for rank, process in self._processes.items():
            for one in self._unsent & process.connections.keys():
                self._send(one, rank)

    def _show(self, rank: int, instruction: Instruction) -> None:
        process = self._processes[rank]
        if process.instruction != instruction:
            process.instruction = instruction
            for one in process.connections:
                self._send(one, rank)

    def order(self, ranks: Iterable[int], order: Order) -> None:
        """Give processes an order. In the next world nothing is asked for, and none has begun."""
        for rank in ranks:
            request = self._processes[rank].instruction.request
            if order.environment is not None:
                self._processes[rank].progress = request = None
            self._show(rank, Instruction(order, request))

    def request(self, request: Request | None) -> None:
        """Ask all processes for something, or let them go on."""
        for rank, process in self._processes.items():
            self._show(rank, Instruction(process.instruction.order, request))

    def begin(self, ranks: Iterable[int], instruction: Instruction) -> None:
        """Processes are going to start; to those that had their sockets before, the agent ends."""
        self.take()
        for rank in ranks:
            for one in list(self._processes[rank].connections):
                self._drop(one, rank)
            self._processes[rank] = _Process(instruction)

    def progress(self) -> dict[int, RankProgress]:
        """How far the processes are that say it."""
        found = {rank: process.progress for rank, process in self._processes.items()}
        return {rank: progress for rank, progress in found.items() if progress is not None}

    def report(self, rank: int, pid: int) -> Report | None:
        """The newest report of a process; None if it cannot be entered again."""
        found = [one for one in self._processes[rank].connections.values() if one.pid == pid]
        return next((one.report for one in found if one.report is not None), None)

    def close(self) -> None:
        """End all connections."""
        for rank, process in self._processes.items():
            for one in list(process.connections):
                self._drop(one, rank)
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._selector.close()
