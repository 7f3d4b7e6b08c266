"""The messages of a background save, and how they travel to another process.

====================  ==================================================================
to the server
`WriteTask`           the save begins; all that the server has to know
`ChunkFilled`         a chunk of the file is in a slot of the arena
`StagingEnded`        no further chunk comes, well or with an error
`Cancel`              give the save up
to the client
`ChunkFreed`          a slot of the arena is free again
`StopStaging`         the file is given up
`Happened`            a named event of the save
`Ended`               the save has ended, well or with an error
====================  ==================================================================

The bytes of tensors are in none of them: they lie in the arena, and messages name slots of it.

Within a process a message is an argument of a call. Between processes it is a msgpack array with
the number of its save. Two kinds of objects in it are not plain data: an error travels as between
ranks (`remesh.exchange`), and a column of numbers as its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.agree import GlobalSavePlan
from remesh.checkpoint.unchanged import FileSource
from remesh.exchange import decode_failure, encode_failure
from remesh.formats.framing import Part
from remesh.pipeline import StreamFiles

ALL_SAVES = -1
"""The number of a message that is about no save alone."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message about one save."""


class WriteTask(_Message, frozen=True):
    """The task of one rank, with all that ends the save."""

    place: str  # where the save goes, as another process opens it
    save_id: str  # names the save
    rank: int
    num_ranks: int  # number of ranks
    deadline: float  # seconds that the save waits for other ranks before it fails
    report_seconds: float  # seconds between two reports of a save that takes long
    format: str  # name of the format
    files: StreamFiles  # the data files that this rank writes
    num_bytes: int  # size of the stream that they are cut from
    parts: Sequence[Part]  # what this rank will say of them, without digests
    kept: Sequence[Part]  # what it says of files that did not change, which are there already
    last_place: str  # where the last checkpoint is, as another process opens it
    sources: Sequence[FileSource]
    """Files of it that files of the stream may be; all chunks fit into the arena then."""
    at_once: bool  # whether writing begins with the first chunk, and not when all are staged
    global_plan: GlobalSavePlan | None  # on rank 0, what it knows of the save


class ChunkFilled(_Message, frozen=True):
    """Chunk `number` of the file is in a slot of the arena."""

    number: int
    num_bytes: int
    slot: int


class StagingEnded(_Message, frozen=True):
    """No further chunk comes; the error says why, if not all is staged."""

    error: BaseException | None


class Cancel(_Message, frozen=True):
    """Give the save up, because of an error if there is one."""

    error: BaseException | None


class ChunkFreed(_Message, frozen=True):
    """A slot of the arena is free again."""

    slot: int


class StopStaging(_Message, frozen=True):
    """The file is given up."""


class Happened(_Message, frozen=True):
    """An event of `remesh.events.SAVE_POINTS`."""

    point: str
    num_bytes: int


class Ended(_Message, frozen=True):
    """The save has ended, well or with an error."""

    error: BaseException | None  # why it failed, if it did
    parts: Sequence[Part] = ()  # if it is committed, what this rank has said of its files


class Logged(_Message, frozen=True):
    """Of a server process: a line for the trainer's log."""

    level: int
    text: str


ToServer = WriteTask | ChunkFilled | StagingEnded | Cancel
ToClient = ChunkFreed | StopStaging | Happened | Ended | Logged


def encode(number: int, rank: int, message: ToServer | ToClient) -> bytes:
    """A message of a save of a rank, for `decode`."""

    def encode_other(value: object) -> object:
        if isinstance(value, BaseException):
            return encode_failure(rank, value)
        assert isinstance(value, np.ndarray), type(value)
        return value.dtype.str, value.shape, value.tobytes()

    return msgspec.msgpack.encode((number, message), enc_hook=encode_other)


def _decode_other(kind: Any, value: Any) -> Any:
    if kind is BaseException:
        return decode_failure(value)
    if kind is object:
        return value
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


decode_for_server = msgspec.msgpack.Decoder(tuple[int, ToServer], dec_hook=_decode_other).decode
decode_for_client = msgspec.msgpack.Decoder(tuple[int, ToClient], dec_hook=_decode_other).decode


class Pipe:
    """One end of a connection between the processes.

    Sending is thread-safe, and does nothing if the peer is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send an encoded message; an empty one says that nothing more is sent."""
        # A receiving thread finds the end of the peer, and knows what to do about it.
        with self._sending, suppress(OSError):
            self._connection.send_bytes(data)

    def receive(self) -> bytes:
        """The next encoded message; empty if there is no further one, or the peer is gone."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return b""

    def has_message(self, seconds: float) -> bool:
        """True if there is something to receive, after so many seconds at the latest."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
