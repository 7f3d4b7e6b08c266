"""The base class of exchanges, and error propagation on top of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from remesh import errors
from remesh.errors import (
    CheckpointReplacedError,
    MismatchError,
    RankFailedError,
    RemeshError,
)

Bytes = npt.NDArray[np.uint8]
Buffers = Sequence[Bytes]

T = TypeVar("T")


class Exchange(ABC):
    """Collective transport of bytes between the ranks of a group.

    Every method may raise `ExchangeError` if a peer is gone or a deadline passes.
    """

    rank: int
    """This process's number in the group."""
    world_size: int
    """Number of ranks in the group."""
    patience: float = math.inf
    """Seconds that a call waits for other ranks before it warns of them or fails."""

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order, on every rank."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks, in rank order, on rank 0; None elsewhere."""

    @abstractmethod
    def scatter(self, data: list[bytes] | None) -> bytes:
        """This rank's item of the list that rank 0 gives (others give None)."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes that rank 0 gives (others give None)."""

    @abstractmethod
    def swap(self, outgoing: Sequence[Buffers], incoming: Sequence[Buffers]) -> None:
        """Send some buffers to each rank and fill some from each.

        If it fails, nothing is written into `incoming` any more when it returns.

        Args:
            outgoing: For each rank, what it is sent, one buffer after the other; may be none.
            incoming: For each rank, buffers as many and as long as those that it sends here.
        """

    def connect(self, device: str) -> bool:  # noqa: ARG002 - for exchanges that do
        """Connect the ranks so that `begin_swap` sends memory of devices; false if it does not.

        Collective; every rank names a device of the same type, and no two name the same one.
        """
        return False

    def begin_swap(
        self, outgoing: Sequence[Sequence[Any]], incoming: Sequence[Sequence[Any]]
    ) -> Callable[[], None]:
        """Begin to `swap` some tensors of bytes; returns what waits until it is done.

        They are sent as they are when all that this thread has queued on the device is done.
        """
        raise NotImplementedError("this exchange sends no memory of devices")


class _Failure(msgspec.Struct, frozen=True):
    """An exception on its way to other ranks."""

    rank: int
    class_name: str
    message: str
    error_type: str
    lists: tuple[tuple[str, ...], ...] = ()  # those of a `MismatchError`


_OK, _FAILED = b"+", b"-"


def encode_failure(rank: int, error: BaseException) -> bytes:
    """An exception of a rank as bytes, for `decode_failure` on another one."""
    kind = type(error)
    if isinstance(error, RemeshError) and hasattr(errors, kind.__name__):
        class_name = kind.__name__
        rank = rank if error.rank is None else error.rank
    else:
        class_name = f"{kind.__module__}.{kind.__qualname__}"
    lists: tuple[tuple[str, ...], ...] = ()
    if isinstance(error, MismatchError):
        names = (error.missing, error.unexpected, error.conflicts)
        lists = tuple(tuple(map(_encodable, some)) for some in names)
    error_type = error.error_type if isinstance(error, RankFailedError) else class_name
    failure = _Failure(rank, class_name, _message_of(error), error_type, lists)
    return _FAILED + msgspec.msgpack.encode(failure)


def _message_of(error: BaseException) -> str:
    """The text of an exception."""
    try:
        text = str(error)
    except Exception as also:  # noqa: BLE001 - a foreign exception whose text fails
        text = f"(its message cannot be shown: {type(also).__name__})"
    return _encodable(text)


def _encodable(text: str) -> str:
    """Text without what UTF-8 cannot hold, as names of files and foreign names may have it."""
    return text.encode("utf-8", "backslashreplace").decode()


def decode_failure(data: bytes) -> RemeshError:
    """The exception to raise for what happened on another rank."""
    failure = msgspec.msgpack.decode(data[1:], type=_Failure)
    kind = getattr(errors, failure.class_name, None)
    origin = f" [raised on rank {failure.rank}]"
    message = failure.message.removesuffix(origin) + origin
    error: RemeshError
    if kind is MismatchError:
        error = MismatchError(message, *failure.lists)
    elif kind is None:
        error = RankFailedError(f"{failure.class_name}: {message}", failure.error_type)
    elif kind is RankFailedError:
        error = RankFailedError(message, failure.error_type)
    else:
        error = kind(message)
    error.rank = failure.rank
    return error


@dataclass(slots=True)
class Outcome(AbstractContextManager["Outcome"]):
    """What a step of this rank came to. Enter it for the step, which no exception leaves.

    Ctrl-C and the end of the interpreter are failures like any other: the other ranks wait for
    this one, and learn of it. They are raised when the outcome is shared.
    """

    reply: bytes = b""  # what the other ranks are told
    error: BaseException | None = None  # why the step failed, if it did

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        self.error = error
        return True

    def encode(self, rank: int) -> bytes:
        """The bytes to send."""
        if self.error is not None:
            return encode_failure(rank, self.error)
        # An empty message says that all is well: if all ranks send one, no byte follows its size.
        return _OK + self.reply if self.reply else b""


def _failure_in(replies: Sequence[bytes]) -> bytes | None:
    """The failure of the lowest rank, or the first that says that the checkpoint was replaced.

    The caller then begins anew, which all ranks must do together.
    """
    failures = [reply for reply in replies if reply.startswith(_FAILED)]
    replaced = (one for one in failures if isinstance(decode_failure(one), CheckpointReplacedError))
    return next(replaced, failures[0] if failures else None)


def _raise_first(replies: Sequence[bytes], own: BaseException | None) -> None:
    """Raise the failure of all; a rank that failed itself raises its own exception.

    If the checkpoint was replaced, all ranks raise that; only Ctrl-C and the like go before it.
    """
    failed = _failure_in(replies)
    error = None if failed is None else decode_failure(failed)
    is_final = isinstance(own, CheckpointReplacedError) or not isinstance(own, Exception)
    if own is not None and (is_final or not isinstance(error, CheckpointReplacedError)):
        raise own
    if error is not None:
        raise error from own


def share_outcomes(exchange: Exchange, own: Outcome) -> list[bytes]:
    """The replies of all ranks to a step, in rank order; a failure of any is raised everywhere.

    Raises:
        Exception: On the rank where the step failed, its own exception.
        RemeshError: On the others, the same exception if it is one of remesh's, else
            `RankFailedError`, with `rank` set.
    """
    replies = exchange.all_gather(own.encode(exchange.rank))
    _raise_first(replies, own.error)
    return [data[1:] for data in replies]


def run_on_all(exchange: Exchange, action: Callable[[], bytes]) -> list[bytes]:
    """Run a step on every rank and share the results; errors are raised as by `share_outcomes`."""
    with Outcome() as own:
        own.reply = action()
    return share_outcomes(exchange, own)


def run_each(exchange: Exchange, action: Callable[[], T]) -> T:
    """Run a step on every rank for its own result; errors are raised as by `share_outcomes`."""
    with Outcome() as own:
        result = action()
    share_outcomes(exchange, own)
    return result


def run_on_one(exchange: Exchange, action: Callable[[], bytes]) -> bytes:
    """Run a step on rank 0 only and give every rank its result; an error is raised everywhere."""
    with Outcome() as own:
        own.reply = action() if exchange.rank == 0 else b""
    return broadcast_outcome(exchange, own)


def broadcast_outcome(exchange: Exchange, own: Outcome) -> bytes:
    """The reply of rank 0 to a step that it alone took; a failure of it is raised everywhere."""
    answer = exchange.broadcast(own.encode(0) if exchange.rank == 0 else None)
    _raise_first([answer], own.error)
    return answer[1:]


def run_joined(
    exchange: Exchange, each: Callable[[], bytes], join: Callable[[list[bytes]], list[bytes]]
) -> bytes:
    """Run a step on every rank, and join the results; see `join_outcomes`."""
    with Outcome() as own:
        own.reply = each()
    return join_outcomes(exchange, own, join)


def join_outcomes(
    exchange: Exchange,
    own: Outcome,
    join: Callable[[list[bytes]], list[bytes]],
    undo: Callable[[], None] | None = None,
) -> bytes:
    """Join the replies of all ranks to a step on rank 0, and give every rank its share.

    `join` gets all replies in rank order and returns an item for each rank; `undo` runs on rank 0
    if any rank failed. Errors are raised as by `share_outcomes`. Nothing is sent from every rank to
    every rank, so this is for results that grow with the world.
    """
    error, answers = own.error, None
    replies = exchange.gather(own.encode(exchange.rank))
    if replies is not None:
        failed = _failure_in(replies)
        with Outcome() as joined:
            if failed is None:
                answers = [_OK + share for share in join([data[1:] for data in replies])]
            elif undo is not None:
                undo()
        error = error or joined.error
        failed = failed or joined.encode(exchange.rank)
        if failed:
            answers = [failed] * exchange.world_size
    answer = exchange.scatter(answers)
    _raise_first([answer], error)
    return answer[1:]
