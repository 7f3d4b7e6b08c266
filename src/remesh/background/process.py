"""A server in a process of its own: writes and commits what is staged, also if the trainer dies.

The process is a fresh interpreter that never imports torch: it inherits no lock, no thread and no
device context of the trainer, and takes some tenths of a second to start, which is why it is
started ahead of time. It is given two descriptors: one end of a connection, and the arena's
file in memory, which it maps. Neither has a name, so nothing is left over, whichever process dies
first.

At the trainer's end (`ServerProcess`) a thread receives the messages of the process. If the process
dies, the saves that it had fail, and the other ranks are told so.

At the other end (`main`) each save is a thread with a `SaveServer`, as in the trainer. Messages to
the trainer are queued and sent by a thread, so that a busy trainer never holds up the writing. When
the connection ends, the trainer has closed it or has died, or the process that had it is not the
parent any more. Saves that are wholly staged go on to their end; others are given up, and the other
ranks are told. Then the process exits, and with it the last descriptor of the arena. It is in a
session of its own and ignores Ctrl-C, so what ends the trainer does not end it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from remesh.background.protocol import (
    ALL_SAVES,
    Cancel,
    ChunkFilled,
    ChunkFreed,
    Ended,
    Happened,
    Logged,
    Pipe,
    StagingEnded,
    StopStaging,
    ToClient,
    ToServer,
    WriteTask,
    decode_for_client,
    decode_for_server,
    encode,
)
from remesh.background.server import SaveServer
from remesh.background.status_files import StatusFiles
from remesh.errors import ExchangeError
from remesh.pipeline.arena import SharedChunks
from remesh.run_info import outliving_environment
from remesh.storage import Storage, open_storage

_LOGGER = logging.getLogger("remesh")

_BOOT = "import sys; sys.path[:] = sys.argv[5:]; from remesh.background.process import main; main()"

_END_SECONDS = 10.0
"""How long a process that has nothing left to do is given to end."""

_PARENT_SECONDS = 1.0
"""Time between two looks at who the parent is."""

_LAST_SECONDS = 5.0
"""How long a trainer that does not listen any more is given to take the last messages."""


# ---------------------------------------------------------------------------------------------
# The trainer's end
# ---------------------------------------------------------------------------------------------


class ServerProcess:
    """A process that writes and commits what is staged in the file of a shared arena."""

    def __init__(self, arena: int, chunk_bytes: int) -> None:
        mine, theirs = multiprocessing.Pipe()
        self._pipe = Pipe(mine)
        self._saves: dict[int, RemoteServer] = {}
        self._num_saves = 0
        self._lock = threading.Lock()
        self._is_lost = False
        self._thread = threading.Thread(target=self._receive, name="remesh-writer", daemon=True)
        try:
            with theirs:
                numbers = (theirs.fileno(), arena, chunk_bytes, os.getpid())
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                    [sys.executable, "-c", _BOOT, *map(str, numbers), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), arena),
                    start_new_session=True,
                    env=outliving_environment(),
                )
            self._thread.start()
        except BaseException:
            # A process that was started ends by itself when its connection does.
            self._pipe.close()
            raise
        # Also at the exit of the interpreter; saves that are to be waited for have ended by then.
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """True if the process has died."""
        return self._is_lost

    def begin(self, save: RemoteServer) -> int | None:
        """The number that a save has from now on; None if the process has died."""
        with self._lock:
            if self._is_lost:
                return None
            self._num_saves += 1
            self._saves[self._num_saves] = save
            return self._num_saves

    def send(self, data: bytes) -> None:
        """Send an encoded message; does nothing if the process has died."""
        self._pipe.send(data)

    def death(self, task: WriteTask) -> ExchangeError:
        """Why a save fails whose process has died."""
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return ExchangeError(
            f"rank {task.rank}, {task.place}: the writer process {self.process_id} {how} during "
            "the save; see what it printed, and the kernel's log for a lack of memory. The next "
            "save starts another one"
        )

    def close(self) -> None:
        """End the process. What is not committed by now is given up."""
        self._finalizer()
        self._thread.join()
        self._pipe.close()

    def _receive(self) -> None:
        while data := self._pipe.receive():
            number, message = decode_for_client(data)
            if isinstance(message, Logged):
                _LOGGER.log(message.level, message.text)
            elif isinstance(message, Ended):
                with self._lock:
                    save = self._saves.pop(number)
                save.answer(message)
            elif number in self._saves:  # otherwise it has ended
                self._saves[number].answer(message)
        with self._lock:
            self._is_lost = True
            saves = list(self._saves.values())
            self._saves.clear()
        for save in saves:
            save.lose()


class RemoteServer:
    """The server of one save, in another process; see `client.Server`."""

    def __init__(
        self,
        process: ServerProcess,
        task: WriteTask,
        storage: Storage,
        send: Callable[[ToClient], None],
    ) -> None:
        self._process = process
        self._task = task
        self._storage = storage
        self._send = send
        self._number: int | None = None
        self._lock = threading.Lock()
        self._lent: set[int] = set()
        self._is_lost = False
        self._ended = threading.Event()
        self._own_error: BaseException | None = None

    def run(self) -> None:
        self._ended.wait()

    def receive(self, message: ToServer) -> None:
        match message:
            case WriteTask():
                self._begin()
                return
            case ChunkFilled(_, _, slot):
                with self._lock:
                    is_lost = self._is_lost
                    if not is_lost:
                        self._lent.add(slot)
                if is_lost:
                    self._send(ChunkFreed(slot))
            case StagingEnded(error) if error is not None:
                self._own_error = error
        self._forward(message)

    def answer(self, message: ToClient) -> None:
        """Take a message of the process to the client."""
        match message:
            case ChunkFreed(slot):
                with self._lock:
                    self._lent.discard(slot)
            case Happened():
                self._tell(message)
                return
            case Ended():
                self._end(msgspec.structs.replace(message, error=self._own_error or message.error))
                return
        self._send(message)

    def lose(self, error: BaseException | None = None) -> None:
        """The process has died, or never had the save: play its part to the end."""
        with self._lock:
            self._is_lost = True
            lent = list(self._lent)
        for slot in lent:
            self._send(ChunkFreed(slot))
        self._send(StopStaging())
        task = self._task
        status = StatusFiles(self._storage, task.format, task.save_id, task.rank)
        if status.is_committed():
            self._end(Ended(None))
        else:  # files stay where they are, as after any death
            self._end(Ended(status.report(error or self._process.death(task))))

    def _begin(self) -> None:
        """Send the task. If it cannot be sent, the process is as good as dead."""
        self._number = self._process.begin(self)
        if self._number is None:
            self.lose()
        try:
            self._forward(self._task)
        except BaseException as error:
            self.lose(error)
            raise

    def _forward(self, message: ToServer) -> None:
        if self._number is not None:
            self._process.send(encode(self._number, self._task.rank, message))

    def _tell(self, event: Happened) -> None:
        """A listener that fails gives the save up, if it still can be."""
        try:
            self._send(event)
        except Exception as error:  # noqa: BLE001 - raised by the handle
            if self._own_error is None:
                self._own_error = error
                self._forward(Cancel(error))

    def _end(self, message: Ended) -> None:
        if not self._ended.is_set():
            self._send(message)
            self._ended.set()


def _end(process: subprocess.Popen[bytes], pipe: Pipe, owner: int) -> None:
    """Let the process end, and wait for it; a forked copy of its owner leaves it alone."""
    if os.getpid() != owner:
        return
    pipe.send(encode(ALL_SAVES, 0, Cancel(None)))
    pipe.send(b"")
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------


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

    def __init__(self, pipe: Pipe, chunks: SharedChunks, parent: int) -> None:
        self._pipe = pipe
        self._parent = parent
        self._chunks = chunks
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="outgoing", daemon=True)
        self._sender.start()
        self._saves: dict[int, tuple[SaveServer, threading.Thread]] = {}
        self._is_orphan = threading.Event()
        self._is_aborted = False
        log = _TrainersLog(lambda line: self._send(ALL_SAVES, 0, line), self._is_orphan)
        _LOGGER.addHandler(log)

    def run(self) -> None:
        """Follow the trainer's messages to their end, and the saves to theirs."""
        while data := self._receive():
            number, message = decode_for_server(data)
            if isinstance(message, WriteTask):
                self._begin(number, message)
            elif number == ALL_SAVES:
                self._is_aborted = True
                for server, _ in self._saves.values():
                    server.receive(message)
            elif number in self._saves:  # otherwise it has ended
                self._saves[number][0].receive(message)
        self._is_orphan.set()
        for server, _ in self._saves.values():
            if not server.staged.is_set():
                error = ExchangeError(
                    f"the trainer of rank {server.task.rank} ended while it staged the save to "
                    f"{server.task.place}; see why it died. The previous checkpoint is untouched."
                )
                server.receive(Cancel(error))
                server.receive(StagingEnded(error))
        for _, thread in self._saves.values():
            thread.join()
        # All that is queued is sent, but a trainer that does not listen is not waited for.
        self._outgoing.put(None)
        self._sender.join(_LAST_SECONDS)

    def _receive(self) -> bytes:
        """The next message of the trainer; empty if there is no further one.

        Children that the trainer has forked have copies of its end, and may outlive it. So the end
        of the parent is the end of the connection, too.
        """
        while not self._pipe.has_message(_PARENT_SECONDS):
            if os.getppid() != self._parent and not self._pipe.has_message(0):
                return b""
        return self._pipe.receive()

    def _begin(self, number: int, task: WriteTask) -> None:
        self._saves = {one: save for one, save in self._saves.items() if save[1].is_alive()}

        def send(message: ToClient) -> None:
            if isinstance(message, Ended):
                self._log_end(task, message.error)
            self._send(number, task.rank, message)

        last = open_storage(task.last_place) if task.sources else None
        server = SaveServer(task, open_storage(task.place), last, self._chunks.chunk, send)
        thread = threading.Thread(target=server.run, name="remesh-save")
        self._saves[number] = (server, thread)
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


def main() -> None:
    """Run the process, given two descriptors, the size of a chunk and the parent's id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, arena, chunk_bytes, parent = map(int, sys.argv[1:5])
    _Process(Pipe(Connection(descriptor)), SharedChunks(arena, chunk_bytes), parent).run()
