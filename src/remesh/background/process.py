"""A writer in a process of its own: writes and commits what is staged, also if the trainer dies.

The process is a fresh interpreter that never imports torch: it inherits no lock, no thread and no
device context of the trainer, and takes some tenths of a second to start, which is why it is
started ahead of time. It is given two descriptors: one end of a connection, and the arena's
file in memory, which it maps. Neither has a name, so nothing is left over, whichever process dies
first.

A message is a call: the save that it is about, the name of a method and its arguments. To the
process go the methods of a `SaveWriter`, from it those of its `Trainer`. The bytes of tensors are
in none of them: they lie in the arena, of which messages name slots. An error travels as between
ranks (`remesh.exchange`). What is logged goes to the trainer's log.

At the trainer's end (`WriterProcess`) a thread receives the messages of the process. If the process
dies, the saves that it had fail, and the other ranks are told so.

At the other end (`main`) each save is a thread with a `SaveWriter`, as in the trainer. Messages to
the trainer are queued and sent by a thread, so that a busy trainer never holds up the writing. When
the connection ends, the trainer has closed it or has died; children that it has forked have closed
their copies (`saver`). Saves that are wholly staged go on to their end; others are given up, and
the other ranks are told. Then the process exits, and with it the last descriptor of the arena. It
is in a session of its own and ignores Ctrl-C, so what ends the trainer does not end it.
"""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from remesh.background.status_files import StatusFiles
from remesh.background.writer import SaveWriter, Trainer, WriteTask
from remesh.errors import ExchangeError, StorageError
from remesh.exchange import decode_failure, encode_failure
from remesh.formats.writer import Part
from remesh.pipeline.arena import SharedChunks
from remesh.run_info import outliving_environment
from remesh.storage import Storage, open_storage

_LOGGER = logging.getLogger("remesh")

_BOOT = "import sys; sys.path[:] = sys.argv[4:]; from remesh.background.process import main; main()"

_END_SECONDS = 10.0
"""How long a process that has nothing left to do is given to end."""

_LAST_SECONDS = 5.0
"""How long a trainer that does not listen any more is given to take the last messages."""


class _Failure(NamedTuple):
    """An error in a message."""

    data: bytes


def _packed(rank: int, arguments: Sequence[object]) -> list[object]:
    """The arguments of a call, as they are sent."""
    return [
        _Failure(encode_failure(rank, item)) if isinstance(item, BaseException) else item
        for item in arguments
    ]


def _unpacked(arguments: Sequence[Any]) -> list[Any]:
    return [decode_failure(item.data) if isinstance(item, _Failure) else item for item in arguments]


def _receive(connection: Connection) -> Any:
    """The next message; None if there is no further one, or the peer is gone."""
    with suppress(EOFError, OSError):
        return connection.recv()
    return None


# ---------------------------------------------------------------------------------------------
# The trainer's end
# ---------------------------------------------------------------------------------------------


class WriterProcess:
    """A process that writes and commits what is staged in the file of a shared arena."""

    def __init__(self, arena: int, chunk_bytes: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._sending = threading.Lock()
        self._saves: dict[str, RemoteWriter] = {}
        self._lock = threading.Lock()
        self.is_lost = False  # whether the process has died
        self._arena = arena
        self._thread = threading.Thread(target=self._follow, name="remesh-writer", daemon=True)
        try:
            with theirs:
                numbers = (theirs.fileno(), arena, chunk_bytes)
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                    [sys.executable, "-c", _BOOT, *map(str, numbers), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), arena),
                    start_new_session=True,
                    env=outliving_environment(),
                )
            self.process_id = self._process.pid
            self._thread.start()
        except BaseException:
            # A process that was started ends by itself when its connection does.
            self._connection.close()
            raise
        # Also at the exit of the interpreter; saves that are to be waited for have ended by then.
        self._finalizer = weakref.finalize(
            self, _end, self._process, self._connection, self._sending, os.getpid()
        )

    def add(self, save: RemoteWriter) -> bool:
        """Let a save get the messages about it; false if the process has died."""
        with self._lock:
            if not self.is_lost:
                self._saves[save.task.save_id] = save
            return not self.is_lost

    def send(self, task: WriteTask, name: str, *arguments: object) -> None:
        """Call a method of the writer of a save; does nothing if the process has died."""
        # The receiving thread finds the end of the process, and knows what to do about it.
        with self._sending, suppress(OSError):
            self._connection.send((task.save_id, name, *_packed(task.rank, arguments)))

    def death(self, task: WriteTask) -> ExchangeError:
        """Why a save fails whose process has died."""
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return ExchangeError(
            f"rank {task.rank}, {task.place}: the writer process {self.process_id} {how} during "
            "the save; see what it printed, and the kernel's log for a lack of memory. The next "
            "save starts another one"
        )

    def leave(self) -> None:
        """In a forked copy of the owner: keep nothing open that its end should close."""
        self._connection.close()
        os.close(self._arena)

    def close(self) -> None:
        """End the process. What is not committed by now is given up."""
        self._finalizer()
        self._thread.join()
        self._connection.close()

    def _follow(self) -> None:
        while message := _receive(self._connection):
            if isinstance(message, logging.LogRecord):
                if _LOGGER.isEnabledFor(message.levelno):
                    _LOGGER.handle(message)
                continue
            save_id, name, *arguments = message
            if save_id in self._saves:  # otherwise it has ended
                save = self._saves[save_id]
                if name == "end":
                    with self._lock:
                        del self._saves[save_id]
                getattr(save, name)(*_unpacked(arguments))
        with self._lock:
            self.is_lost = True
            saves = list(self._saves.values())
            self._saves.clear()
        for save in saves:
            save.lose()


class RemoteWriter:
    """The writer of one save, in another process: a `SaveWriter` to the trainer's side.

    To the process it is the `Trainer`.
    """

    def __init__(
        self, process: WriterProcess, task: WriteTask, storage: Storage, trainer: Trainer
    ) -> None:
        self.task = task
        self._process = process
        self._storage = storage
        self._trainer = trainer
        self._ended = threading.Event()
        self._own_error: BaseException | None = None
        self.free, self.stop_staging = trainer.free, trainer.stop_staging

    def begin(self) -> None:
        """Send the task. If it cannot be sent, the process is as good as dead."""
        if not self._process.add(self):
            self.lose()
            return
        try:
            self._process.send(self.task, "begin", self.task)
        except BaseException as error:
            self.lose(error)
            raise

    def run(self) -> None:
        """Wait until the trainer's side has been told of the end."""
        self._ended.wait()

    def fill(self, number: int, num_bytes: int, slot: int) -> None:
        self._process.send(self.task, "fill", number, num_bytes, slot)

    def end_staging(self, error: BaseException | None) -> None:
        self._own_error = self._own_error or error
        self._process.send(self.task, "end_staging", error)

    def cancel(self, error: BaseException | None) -> None:
        self._process.send(self.task, "cancel", error)

    def see(self, point: str, num_bytes: int = 0) -> None:
        """A listener that fails gives the save up, if it still can be."""
        try:
            self._trainer.see(point, num_bytes)
        except Exception as error:  # noqa: BLE001 - raised by the handle
            if self._own_error is None:
                self._own_error = error
                self.cancel(error)

    def end(self, error: BaseException | None, parts: Sequence[Part]) -> None:
        if not self._ended.is_set():  # a process may die after it could not be sent the task
            self._trainer.end(self._own_error or error, parts)
            self._ended.set()

    def lose(self, error: BaseException | None = None) -> None:
        """The process has died, or never had the save: play its part to the end.

        The chunks that it had go with the arena (`Saver`).
        """
        self.stop_staging()
        status = StatusFiles(self._storage, self.task)
        is_committed = False
        with suppress(StorageError):  # it may fail, too; the save has an end all the same
            is_committed = status.is_committed()
        if is_committed:
            self.end(None, ())
        else:  # files stay where they are, as after any death
            self.end(status.report(error or self._process.death(self.task)), ())


def _end(
    process: subprocess.Popen[bytes], connection: Connection, lock: threading.Lock, owner: int
) -> None:
    """Let the process end, and wait for it; a forked copy of its owner leaves it alone."""
    if os.getpid() != owner:
        return
    with lock, suppress(OSError):
        connection.send(("", "abort"))
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------


class _Process:
    """The saves of this process and what they have in common."""

    def __init__(self, connection: Connection, chunks: SharedChunks) -> None:
        self._connection = connection
        self._chunks = chunks
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="outgoing", daemon=True)
        self._sender.start()
        self._saves: dict[str, tuple[SaveWriter, threading.Thread]] = {}
        self._is_orphan = False
        self._is_aborted = False
        self._log = logging.handlers.QueueHandler(self._outgoing)
        _LOGGER.addHandler(self._log)

    def run(self) -> None:
        """Follow the trainer's messages to their end, and the saves to theirs."""
        while message := _receive(self._connection):
            save_id, name, *arguments = message
            if name == "begin":
                self._begin(*arguments)
            elif name == "abort":
                self._is_aborted = True
                for writer, _ in self._saves.values():
                    writer.cancel(None)
                break
            elif save_id in self._saves:  # otherwise it has ended
                getattr(self._saves[save_id][0], name)(*_unpacked(arguments))
        self._is_orphan = True
        _LOGGER.removeHandler(self._log)  # from now on lines are printed here
        for writer, _ in self._saves.values():
            if not writer.staged.is_set():
                error = ExchangeError(
                    f"the trainer of rank {writer.task.rank} ended while it staged the save to "
                    f"{writer.task.place}; see why it died. The previous checkpoint is untouched."
                )
                writer.cancel(error)
                writer.end_staging(error)
        for _, thread in self._saves.values():
            thread.join()
        # All that is queued is sent, but a trainer that does not listen is not waited for.
        self._outgoing.put(None)
        self._sender.join(_LAST_SECONDS)

    def _begin(self, task: WriteTask) -> None:
        self._saves = {one: save for one, save in self._saves.items() if save[1].is_alive()}
        trainer = Trainer(*(partial(self._tell, task, one.name) for one in fields(Trainer)))
        writer = SaveWriter(task, open_storage(task.place), self._chunks.chunk, trainer)
        thread = threading.Thread(target=writer.run, name="remesh-save")
        self._saves[task.save_id] = (writer, thread)
        thread.start()

    def _tell(self, task: WriteTask, name: str, *arguments: Any) -> None:
        if name == "end" and self._is_orphan and not self._is_aborted:
            error, _ = arguments
            end = "is committed" if error is None else f"failed: {error}"
            text = "rank %d ended before its save to %s did; the save %s"
            _LOGGER.warning(text, task.rank, task.place, end)
        self._outgoing.put((task.save_id, name, *_packed(task.rank, arguments)))

    def _send_queued(self) -> None:
        while (message := self._outgoing.get()) is not None:
            with suppress(OSError):  # the main thread finds the end of the trainer
                self._connection.send(message)


def main() -> None:
    """Run the process, given two descriptors and the size of a chunk."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, arena, chunk_bytes = map(int, sys.argv[1:4])
    _Process(Connection(descriptor), SharedChunks(arena, chunk_bytes)).run()
