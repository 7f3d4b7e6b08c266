"""The trainer's end of a writer process (`writer_main`).

The process is a fresh interpreter: it inherits no lock, no thread and no device context of the
trainer, and takes some tenths of a second to start, which is why it is started ahead of time. It is
given two descriptors: one end of a pair of sockets, and the arena's file in memory. Neither has a
name, so nothing is left over, whoever dies first.

A thread here receives what the process says: slots that are free again, moments of the save, and
how it ended. If the process dies, the saves that it had fail, and the other ranks are told so.
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
from typing import Protocol

import msgspec

from remesh.checkpoint.wire import (
    Abort,
    Channel,
    Ended,
    Freed,
    Logged,
    StopStaging,
    Told,
    ToTrainer,
    ToWriter,
)
from remesh.errors import ExchangeError

_LOGGER = logging.getLogger("remesh")

_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; from remesh.checkpoint.writer_main import main; main()"
)

_END_SECONDS = 10.0
"""How long a process that has nothing left to do is given to end."""


class Remote(Protocol):
    """A save that the writer process does, as the trainer sees it."""

    def free(self, slot: int) -> None:
        """A slot of the arena is free again."""
        ...

    def stop_staging(self) -> None:
        """The file is given up."""
        ...

    def tell(self, point: str, num_bytes: int) -> None:
        """A moment of the save."""
        ...

    def end(self, failure: bytes | None) -> None:
        """The save has ended."""
        ...

    def lose(self, error: ExchangeError) -> None:
        """The process has died."""
        ...


class WriterProcess:
    """A process that writes and commits what is staged in a shared arena.

    Args:
        arena: Descriptor of the arena's file.
        chunk_bytes: Size of its chunks.
    """

    def __init__(self, arena: int, chunk_bytes: int) -> None:
        mine, theirs = socket.socketpair()
        self._channel = Channel(mine)
        self._saves: dict[int, Remote] = {}
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
                )
            self._thread.start()
        except BaseException:
            # A process that was started ends by itself when its connection does.
            self._channel.close()
            raise
        # Also at the exit of the interpreter; who wants to wait for saves has done so by then.
        self._finalizer = weakref.finalize(self, _end, self._process, self._channel, os.getpid())

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether the process has died."""
        return self._is_lost

    def begin(self, save: Remote, message: Callable[[int], ToWriter]) -> None:
        """Begin a save.

        Args:
            save: Is told what becomes of it.
            message: Makes the first message, given the number that the save has from now on.
        """
        with self._lock:
            number = self._num_saves
            self._num_saves += 1
            self._saves[number] = save
            is_lost = self._is_lost
        if is_lost:
            self._lose_all()
        else:
            self._channel.send(message(number))

    def send(self, message: ToWriter) -> None:
        """Say something about a save that was begun."""
        self._channel.send(message)

    def close(self) -> None:
        """End the process. What is not committed by now is given up."""
        self._finalizer()
        self._thread.join()
        self._channel.close()

    def _receive(self) -> None:
        while (data := self._channel.receive()) is not None:
            message = msgspec.msgpack.decode(data, type=ToTrainer)
            if isinstance(message, Logged):
                _LOGGER.log(message.level, message.text)
                continue
            save = self._saves.get(message.save)
            if save is None:
                continue  # it has ended
            match message:
                case Freed(_, slot):
                    save.free(slot)
                case StopStaging():
                    save.stop_staging()
                case Told(_, point, num_bytes):
                    save.tell(point, num_bytes)
                case Ended(number, failure):
                    with self._lock:
                        del self._saves[number]
                    save.end(failure)
        with self._lock:
            self._is_lost = True
        self._lose_all()

    def _lose_all(self) -> None:
        """The process is gone: so are the saves that it had."""
        with self._lock:
            saves = list(self._saves.values())
            self._saves.clear()
        if not saves:
            return
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        for save in saves:
            save.lose(
                ExchangeError(
                    f"the writer process {self.process_id} {how} during the save; see what it "
                    "printed, and the kernel's log for a lack of memory. The next save starts "
                    "another one"
                )
            )


def _end(process: subprocess.Popen[bytes], channel: Channel, owner: int) -> None:
    """Let the process end, and see that it does; for a forked copy of its owner it is not one's."""
    if os.getpid() != owner:
        return
    channel.send(Abort(0))
    channel.end()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
