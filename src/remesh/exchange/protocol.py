"""The base class of exchanges, and error propagation on top of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
        """Connect the ranks so that `begin_swap` sends memory of devices, without passing the host.

        Collective; every rank names a device of the same type, and no two name the same one.

        Returns:
            Whether the exchange does so; by default it does not.
        """
        return False

    def begin_swap(
        self, outgoing: Sequence[Sequence[Any]], incoming: Sequence[Sequence[Any]]
    ) -> Callable[[], None]:
        """Begin to send some tensors of bytes to each rank, and to fill some from each.

        Args:
            outgoing: For each rank, what it is sent, as it is when all that this thread has queued
                on the device is done.
            incoming: For each rank, tensors as many and as long as those that it sends here.

        Returns:
            Waits until it is done.
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


def _attempt(exchange: Exchange, action: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
    """Run a local step; what to send, and the error if it failed.

    Ctrl-C and the end of the interpreter are failures like any other: the other ranks wait for
    this one, and learn of it.
    """
    try:
        result = action()
        # An empty message says that all is well: if all ranks send one, no byte follows its size.
        return (_OK + result if result else b""), None
    except BaseException as error:  # noqa: BLE001 - it is raised again once every rank knows of it
        return encode_failure(exchange.rank, error), error


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


def run_on_all(exchange: Exchange, action: Callable[[], bytes]) -> list[bytes]:
    """Run a step on every rank and share the results in rank order; an error is raised everywhere.

    Raises:
        Exception: On the rank where `action` failed, its own exception.
        RemeshError: On the others, the same exception if it is one of remesh's, else
            `RankFailedError`, with `rank` set.
    """
    reply, own = _attempt(exchange, action)
    replies = exchange.all_gather(reply)
    _raise_first(replies, own)
    return [data[1:] for data in replies]


def run_each(exchange: Exchange, action: Callable[[], T]) -> T:
    """Run a step on every rank for its own result; errors are raised as by `run_on_all`."""
    results: list[T] = []

    def act() -> bytes:
        results.append(action())
        return b""

    run_on_all(exchange, act)
    return results[0]


def run_on_one(exchange: Exchange, action: Callable[[], bytes]) -> bytes:
    """Run a step on rank 0 only and give every rank its result; an error is raised everywhere."""
    own: BaseException | None = None
    reply: bytes | None = None
    if exchange.rank == 0:
        reply, own = _attempt(exchange, action)
    answer = exchange.broadcast(reply)
    _raise_first([answer], own)
    return answer[1:]


def run_joined(
    exchange: Exchange,
    each: Callable[[], bytes],
    join: Callable[[list[bytes]], list[bytes]],
    undo: Callable[[], None] | None = None,
) -> bytes:
    """Run a step on every rank, join the results on rank 0, and give every rank its share.

    `join` gets all results in rank order and returns an item for each rank; `undo` runs on rank 0,
    after every rank has ended its step, if any rank failed in it. Errors are raised as by
    `run_on_all`. Nothing is sent from every rank to every rank, so this is the step for results
    that grow with the world.
    """
    reply, own = _attempt(exchange, each)
    replies = exchange.gather(reply)
    answers: list[bytes] | None = None
    if replies is not None:
        failed = _failure_in(replies)
        if failed is None:
            arrived = [data[1:] for data in replies]
            try:
                answers = [_OK + share for share in join(arrived)]
            except BaseException as error:  # noqa: BLE001 - every rank raises it below
                own, failed = error, encode_failure(exchange.rank, error)
        elif undo is not None:
            try:
                undo()
            except BaseException as error:  # noqa: BLE001 - raised below, once the others know
                own = own or error
        if failed is not None:
            answers = [failed] * exchange.world_size
    answer = exchange.scatter(answers)
    _raise_first([answer], own)
    return answer[1:]
