"""The server process: writes and commits what a trainer has staged, also if the trainer dies.

It is started as a fresh interpreter that never imports torch, and maps the arena by the descriptor
that it inherits. Each save is a thread with a `SaveServer`, as in the trainer; its messages come
and go through a socket. Those to the trainer are queued and sent by a thread, so that a busy
trainer never holds up the writing.

When the connection ends, the trainer has closed it or has died, or the process that had it is not
the parent any more. Saves that are wholly staged go on to their end; others are given up, and the
other ranks are told. Then the process exits, and with it the last descriptor of the arena. It is in
a session of its own and ignores Ctrl-C, so what ends the trainer does not end it.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from remesh.background.protocol import (
    ALL_SAVES,
    Ended,
    Logged,
    Pipe,
    ToClient,
    WriteTask,
    decode_for_server,
    encode,
)
from remesh.background.server import SaveServer
from remesh.errors import ExchangeError
from remesh.pipeline.arena import SharedChunks
from remesh.storage import open_storage

_LOGGER = logging.getLogger("remesh")

_PARENT_SECONDS = 1.0
"""Time between two looks at who the parent is."""

_LAST_SECONDS = 5.0
"""How long a trainer that does not listen any more is given to take the last messages."""


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """A save that is under way."""

    task: WriteTask
    server: SaveServer
    thread: threading.Thread


class _TrainersLog(logging.Handler):
    """Says in the trainer's log what is said here; on this process's own when it is gone."""

    def __init__(self, send: Callable[[Logged], None], is_orphan: threading.Event) -> None:
        super().__init__()
        self._send = send
        self._is_orphan = is_orphan

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_orphan.is_set():
            self._send(Logged(record.levelno, record.getMessage()))
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)


class _Process:
    """The saves of this process and what they have in common."""

    def __init__(self, pipe: Pipe, chunks: SharedChunks) -> None:
        self._pipe = pipe
        self._chunks = chunks
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="outgoing", daemon=True)
        self._sender.start()
        self._saves: dict[int, _Save] = {}
        self._is_orphan = threading.Event()
        self._is_aborted = False
        log = _TrainersLog(lambda line: self._send(ALL_SAVES, 0, line), self._is_orphan)
        _LOGGER.addHandler(log)

    def run(self) -> None:
        """Follow the trainer's messages to their end, and the saves to theirs."""
        while (data := self._pipe.receive()) is not None:
            number, message = decode_for_server(data)
            if isinstance(message, WriteTask):
                self._begin(number, message)
            elif number == ALL_SAVES:
                self._is_aborted = True
                for save in self._saves.values():
                    save.server.receive(message)
            elif number in self._saves:  # otherwise it has ended
                self._saves[number].server.receive(message)
        self._is_orphan.set()
        for save in self._saves.values():
            if not save.server.is_staged:
                error = ExchangeError(
                    f"the trainer of rank {save.task.rank} ended while it staged the save to "
                    f"{save.task.place}; see why it died. The previous checkpoint is untouched."
                )
                save.server.cancel(error)
                save.server.end_staging(error)
        for save in self._saves.values():
            save.thread.join()
        # All that is queued is sent, but a trainer that does not listen is not waited for.
        self._outgoing.put(None)
        self._sender.join(_LAST_SECONDS)

    def _begin(self, number: int, task: WriteTask) -> None:
        self._saves = {one: save for one, save in self._saves.items() if save.thread.is_alive()}

        def send(message: ToClient) -> None:
            if isinstance(message, Ended):
                self._log_end(task, message.error)
            self._send(number, task.rank, message)

        last = open_storage(task.last_place) if task.sources else None
        server = SaveServer(task, open_storage(task.place), last, self._chunks.chunk, send)
        thread = threading.Thread(target=server.run, name="remesh-save")
        self._saves[number] = _Save(task, server, thread)
        thread.start()

    def _log_end(self, task: WriteTask, error: BaseException | None) -> None:
        """Log how a save has ended that its trainer cannot hear of."""
        if self._is_orphan.is_set() and not self._is_aborted:
            end = "is committed" if error is None else f"failed: {error}"
            text = "rank %d ended before its save to %s did; the save %s"
            _LOGGER.warning(text, task.rank, task.place, end)

    def _send(self, number: int, rank: int, message: ToClient) -> None:
        self._outgoing.put(encode(number, rank, message))

    def _send_queued(self) -> None:
        while (data := self._outgoing.get()) is not None:
            self._pipe.send(data)


def _end_with_parent(parent: int, connection: socket.socket) -> None:
    """Take the end of the parent for the end of the connection.

    Children that the trainer has forked have copies of its end, and may outlive it.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # what has arrived can still be received


def main() -> None:
    """What the process runs: descriptors of socket and arena, size of a chunk, the parent's id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, arena, chunk_bytes, parent = map(int, sys.argv[1:5])
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(parent, connection), daemon=True).start()
    _Process(Pipe(connection), SharedChunks(arena, chunk_bytes)).run()
