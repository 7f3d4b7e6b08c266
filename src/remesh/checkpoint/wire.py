"""What a trainer and its writer process say to each other, over a pair of sockets.

A message is a msgpack array behind its length. The bytes of tensors are not among them: they lie in
the arena that both have mapped, and messages name slots of it. Messages to the trainer are
queued and sent by a thread, so that a trainer that is busy never holds up the writing.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import numpy as np

from remesh.checkpoint.agreement import Coordination, SaveOptions
from remesh.formats import native
from remesh.index import BoxTable, decode_columns, encode_columns
from remesh.planner import SavePlan

_LENGTH = struct.Struct("<Q")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message about one save, which has a number."""

    save: int


class Begin(_Message, frozen=True):
    """To the writer: a save begins. The fields are those of `background.Task`."""

    place: str
    save_id: str
    rank: int
    num_ranks: int
    deadline: float
    report_seconds: float
    path: str
    num_bytes: int
    positions: bytes
    at_once: bool
    coordination: bytes | None


class Handed(_Message, frozen=True):
    """To the writer: a chunk of the file is in a slot of the arena."""

    number: int
    num_bytes: int
    slot: int


class Staged(_Message, frozen=True):
    """To the writer: no further chunk comes; the failure says why, if not all is staged."""

    failure: bytes | None


class Cancel(_Message, frozen=True):
    """To the writer: give up, with the failure if there is one."""

    failure: bytes | None


class Abort(_Message, frozen=True):
    """To the writer: give up everything; the number means nothing."""


class Freed(_Message, frozen=True):
    """To the trainer: a slot of the arena is free again."""

    slot: int


class StopStaging(_Message, frozen=True):
    """To the trainer: the file is given up."""


class Told(_Message, frozen=True):
    """To the trainer: a moment of the save."""

    point: str
    num_bytes: int


class Logged(_Message, frozen=True):
    """To the trainer: a line for its log; the number means nothing."""

    level: int
    text: str


class Ended(_Message, frozen=True):
    """To the trainer: the save has ended, well or with a failure."""

    failure: bytes | None


ToWriter = Begin | Handed | Staged | Cancel | Abort
ToTrainer = Freed | StopStaging | Told | Logged | Ended


class Channel:
    """One end of the connection. Sending is thread-safe, and does nothing if the peer is gone.

    Args:
        connection: A stream socket, blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: ToWriter | ToTrainer) -> None:
        """Send a message."""
        data = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                # Whoever receives finds the end of the stream, and knows what to do about it.
                return

    def receive(self) -> bytes | None:
        """The next message, encoded; None if the peer is gone."""
        length = self._receive(_LENGTH.size)
        return None if length is None else self._receive(_LENGTH.unpack(length)[0])

    def end(self) -> None:
        """Say that nothing more is sent; what comes can still be received."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the peer is gone already

    def close(self) -> None:
        """Give the socket up."""
        self._socket.close()

    def _receive(self, size: int) -> bytes | None:
        data = bytearray(size)
        done = 0
        while done < size:
            try:
                num_bytes = self._socket.recv_into(memoryview(data)[done:])
            except OSError:
                return None
            if num_bytes == 0:
                return None
            done += num_bytes
        return bytes(data)


class Outbox:
    """Sends messages from a thread of its own, so that who has something to say never waits.

    Args:
        channel: Where they go.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[ToTrainer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    @property
    def send(self) -> Callable[[ToTrainer], None]:
        """Queues a message."""
        return self._messages.put

    def close(self, timeout: float) -> None:
        """Wait until everything is sent, but not for a peer that does not listen."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            self._channel.send(message)


class _Coordination(msgspec.Struct, frozen=True, array_like=True):
    """`agreement.Coordination` as bytes."""

    save_id: str
    overwrite: bool
    metadata: dict[str, object]
    plan: bytes
    assignments: list[bytes]
    document: bytes
    replaced: bytes | None


def encode_coordination(save: Coordination) -> bytes:
    """What rank 0 knows of a save, for its writer process."""
    columns = {**save.plan.boxes.columns(), "writer": save.plan.writer, "row": save.plan.row}
    return msgspec.msgpack.encode(
        _Coordination(
            save.save_id,
            save.options.overwrite,
            dict(save.options.metadata),
            encode_columns(columns),
            [rows.tobytes() for rows in save.assignments],
            save.document.encode(),
            None if save.replaced is None else native.encode_record(save.replaced),
        )
    )


def decode_coordination(data: bytes) -> Coordination:
    """What `encode_coordination` encoded."""
    save = msgspec.msgpack.decode(data, type=_Coordination)
    columns, _ = decode_columns(save.plan, "plan")
    plan = SavePlan(BoxTable.from_columns(columns), columns["writer"], columns["row"])
    return Coordination(
        save.save_id,
        SaveOptions(save.overwrite, save.metadata),
        plan,
        [np.frombuffer(rows, np.int64) for rows in save.assignments],
        native.ValuesDocument.decode(save.document, "values"),
        None if save.replaced is None else native.decode_record(save.replaced, "the old record"),
    )
