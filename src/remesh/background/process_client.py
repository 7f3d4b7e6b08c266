"""The trainer's end of a server process (`process_server`).

The process is a fresh interpreter: it inherits no lock, no thread and no device context of the
trainer, and takes some tenths of a second to start, which is why it is started ahead of time. It is
given two descriptors: one end of a pair of sockets, and the arena's file in memory. Neither has a
name, so nothing is left over, whichever process dies first.

A thread here receives the messages of the process. If the process dies, the saves that it had fail,
and the other ranks are told so.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

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
    encode,
)
from remesh.background.status_files import StatusFiles
from remesh.errors import ExchangeError
from remesh.run_info import outliving_environment
from remesh.storage import Storage

_LOGGER = logging.getLogger("remesh")

_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from remesh.background.process_server import main; main()"
)

_END_SECONDS = 10.0
"""How long a process that has nothing left to do is given to end."""


class ServerProcess:
    """A process that writes and commits what is staged in the file of a shared arena."""

    def __init__(self, arena: int, chunk_bytes: int) -> None:
        mine, theirs = socket.socketpair()
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
        while (data := self._pipe.receive()) is not None:
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
    pipe.end()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
