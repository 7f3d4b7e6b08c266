"""The writer process: writes and commits what a trainer has staged, also if the trainer dies.

It is started as a fresh interpreter that never imports torch, and maps the arena by the descriptor
that it inherits. Each save is a thread that does what the background thread of a `Saver` does;
messages (see `wire`) take the place of the queue between stager and writer.

When the connection ends, the trainer has closed it or has died, or the process that had it is not
the parent any more. Saves that are wholly staged go on to their end; others are given up, and the
other ranks are told. Then the process exits, and with it the last descriptor of the arena. It is in
a session of its own and ignores Ctrl-C, so what ends the trainer does not end it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from remesh.checkpoint.background import Background, Task
from remesh.checkpoint.wire import (
    Abort,
    Begin,
    Cancel,
    Channel,
    Ended,
    Freed,
    Handed,
    Logged,
    Outbox,
    Staged,
    StopStaging,
    Told,
    ToTrainer,
    ToWriter,
    decode_coordination,
)
from remesh.errors import ExchangeError
from remesh.exchange import decode_failure, encode_failure
from remesh.pipeline.arena import Chunk, SharedChunks
from remesh.pipeline.stage import Filled, StagedWriter
from remesh.storage import open_storage

_LOGGER = logging.getLogger("remesh")

_PARENT_SECONDS = 1.0
"""Time between two looks at who the parent is."""

_LAST_WORDS_SECONDS = 5.0
"""How long a trainer that does not listen any more is given to hear the end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """A save that is under way."""

    rank: int
    place: str
    writer: StagedWriter
    background: Background
    thread: threading.Thread
    is_staged: threading.Event


class _TrainersLog(logging.Handler):
    """Says in the trainer's log what is said here; on this process's own when it is gone."""

    def __init__(self, send: Callable[[ToTrainer], None], is_orphan: threading.Event) -> None:
        super().__init__()
        self._send = send
        self._is_orphan = is_orphan

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if not self._is_orphan.is_set():
            self._send(Logged(0, record.levelno, record.getMessage()))
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)


class _WriterProcess:
    """The saves of this process and what they have in common."""

    def __init__(self, channel: Channel, chunks: SharedChunks) -> None:
        self._channel = channel
        self._chunks = chunks
        self._outbox = Outbox(channel)
        self._saves: dict[int, _Save] = {}
        self._is_orphan = threading.Event()
        self._is_aborted = False
        _LOGGER.addHandler(_TrainersLog(self._outbox.send, self._is_orphan))

    def run(self) -> None:
        """Follow the trainer's messages to their end, and the saves to theirs."""
        while (data := self._channel.receive()) is not None:
            self._follow(msgspec.msgpack.decode(data, type=ToWriter))
        self._is_orphan.set()
        for save in self._saves.values():
            if not save.is_staged.is_set():
                error = ExchangeError(
                    f"the trainer of rank {save.rank} ended while it staged the save to "
                    f"{save.place}; see why it died. The previous checkpoint is untouched."
                )
                save.background.cancel(error)
                save.background.end_staging(error)
        for save in self._saves.values():
            save.thread.join()
        self._outbox.close(_LAST_WORDS_SECONDS)

    def _follow(self, message: ToWriter) -> None:
        if isinstance(message, Begin):
            self._begin(message)
            return
        if isinstance(message, Abort):
            self._is_aborted = True
            for each in self._saves.values():
                each.background.cancel()
            return
        save = self._saves.get(message.save)
        if save is None:
            return  # it has ended
        match message:
            case Handed(_, number, num_bytes, slot):
                save.writer.put(Filled(number, num_bytes, self._chunks.chunk(slot)))
            case Staged(_, failure):
                save.is_staged.set()
                save.background.end_staging(None if failure is None else decode_failure(failure))
            case Cancel(_, failure):
                save.background.cancel(None if failure is None else decode_failure(failure))

    def _begin(self, begin: Begin) -> None:
        self._saves = {
            number: save for number, save in self._saves.items() if save.thread.is_alive()
        }
        send, number = self._outbox.send, begin.save

        def give(chunk: Chunk) -> None:
            send(Freed(number, chunk.slot))

        def emit(point: str, num_bytes: int = 0) -> None:
            send(Told(number, point, num_bytes))

        task = Task(
            open_storage(begin.place),
            begin.save_id,
            begin.rank,
            begin.num_ranks,
            begin.deadline,
            begin.report_seconds,
            begin.path,
            begin.num_bytes,
            begin.positions,
            None if begin.coordination is None else decode_coordination(begin.coordination),
        )
        writer = StagedWriter(give, at_once=begin.at_once)
        background = Background(task, writer, emit, lambda: send(StopStaging(number)))

        def run() -> None:
            error = background.run()
            if self._is_orphan.is_set() and not self._is_aborted:
                end = "is committed" if error is None else f"failed: {error}"
                _LOGGER.warning(
                    "rank %d ended before its save to %s did; the save %s",
                    begin.rank,
                    begin.place,
                    end,
                )
            send(Ended(number, None if error is None else encode_failure(begin.rank, error)))

        thread = threading.Thread(target=run, name="remesh-save")
        self._saves[number] = _Save(
            begin.rank, begin.place, writer, background, thread, threading.Event()
        )
        thread.start()


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
    _WriterProcess(Channel(connection), SharedChunks(arena, chunk_bytes)).run()
