"""Every exchange keeps the promises of `remesh.exchange`.

What ranks do is in functions of this module, so that processes can be told to call them.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.support import (
    Outcome,
    Raised,
    Returned,
    returned_values,
    run_processes,
    run_ranks_outcomes,
)

from remesh.errors import MismatchError, RankFailedError, StateError
from remesh.exchange import Alone, Exchange, run_joined, run_on_all, run_on_one

T = TypeVar("T")
Run = Callable[..., list[Outcome[Any]]]
"""Calls a function on each rank, with the exchange and other arguments; how each rank ended."""

LIMIT = 1200.0


def _outcome(fn: Callable[..., T], *args: object) -> Outcome[T]:
    try:
        return Returned(fn(*args))
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return Raised(error, traceback.format_exc())


class Job:
    """Processes with a group that do what they are told, one thing after the other."""

    def __init__(self, world_size: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        with Listener(family="AF_UNIX") as listener:
            self._ended = self._thread.submit(
                run_processes, world_size, _serve, listener.address, timeout=LIMIT
            )
            ranks = [listener.accept() for _ in range(world_size)]
        self._ranks = sorted(ranks, key=Connection.recv)

    def run(self, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        """What the function ends with on each rank."""
        for rank in self._ranks:
            rank.send((fn, args))
        return [rank.recv() for rank in self._ranks]

    def end(self) -> None:
        for rank in self._ranks:
            rank.send(None)
        self._ended.result()
        self._thread.shutdown()


def _serve(exchange: Exchange, address: str) -> None:
    with Client(address) as told:
        told.send(exchange.rank)
        while (call := told.recv()) is not None:
            told.send(_outcome(call[0], exchange, *call[1]))


@pytest.fixture(
    scope="module",
    params=[("alone", 1), *(("threads", n) for n in (1, 2, 3)), ("gloo", 1), ("gloo", 3)],
    ids=lambda param: "-".join(map(str, param)),
)
def group(request: pytest.FixtureRequest) -> Iterator[tuple[int, Run]]:
    """How many ranks there are, and what runs them."""
    kind, world_size = request.param
    if kind == "alone":
        yield 1, lambda *call: [_outcome(call[0], Alone(), *call[1:])]
    elif kind == "threads":
        yield world_size, functools.partial(run_ranks_outcomes, world_size)
    else:
        job = Job(world_size)  # starting processes takes much longer than a test
        yield world_size, job.run
        job.end()


@pytest.fixture
def world_size(group: tuple[int, Run]) -> int:
    return group[0]


@pytest.fixture
def run(group: tuple[int, Run]) -> Run:
    return group[1]


def test_ranks(world_size: int, run: Run) -> None:
    expected = [(rank, world_size) for rank in range(world_size)]
    assert returned_values(run(_who)) == expected


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_messages_arrive(world_size: int, run: Run, size: int) -> None:
    # Sizes differ between ranks, and rank 0 has the smallest.
    messages = [_message(rank, size + rank) for rank in range(world_size)]
    for rank, got in enumerate(returned_values(run(_talk, size))):
        all_gathered, gathered, scattered, received = got
        assert all_gathered == messages
        assert gathered == (messages if rank == 0 else None)
        assert scattered == _message(100 + rank, size + rank)
        assert received == _message(7, size)


def test_one_rank_has_all_the_bytes(world_size: int, run: Run) -> None:
    last = world_size - 1
    expected = [b"" if rank != last else _message(last, 200_000) for rank in range(world_size)]
    for got in returned_values(run(_talk_unevenly)):
        assert got == expected


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_swap(world_size: int, run: Run, size: int) -> None:
    for rank, got in enumerate(returned_values(run(_swap, size))):
        # The diagonal included; the message from a rank to itself is one of them.
        expected = [
            _message(100 * r + rank + part, size * (r + rank))
            for r in range(world_size)
            for part in range((r + rank) % 3)
        ]
        assert got == expected


def test_calls_keep_their_order(world_size: int, run: Run) -> None:
    expected = [[b"%d:%d" % (turn, r) for r in range(world_size)] for turn in range(50)]
    assert returned_values(run(_take_turns)) == [expected] * world_size


def test_steps_return_what_ranks_gave(world_size: int, run: Run) -> None:
    gathered = [b"from %d" % rank for rank in range(world_size)]
    total = sum(range(world_size))
    for rank, got in enumerate(returned_values(run(_take_steps))):
        assert got == (gathered, b"from 0", b"%d of %d" % (rank, total))


@pytest.mark.parametrize("thrown", [StateError("weight: no such dtype"), KeyError("lr")])
@pytest.mark.parametrize(
    ("step", "is_first"), [("all", False), ("share", False), ("one", True), ("join", True)]
)
def test_an_error_reaches_all(
    world_size: int, run: Run, step: str, is_first: bool, thrown: Exception
) -> None:
    outcomes = run(_fail, step, thrown)
    failed = 0 if is_first else world_size - 1
    for rank, error in enumerate(_errors(outcomes)):
        assert thrown.args[0] in str(error)
        if rank == failed:
            assert type(error) is type(thrown)
            assert getattr(error, "rank", None) is None
        elif isinstance(thrown, StateError):
            assert type(error) is StateError
            assert error.rank == failed
        else:
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.error_type) == (failed, "builtins.KeyError")


def test_lists_of_a_mismatch_reach_all(world_size: int, run: Run) -> None:
    thrown = MismatchError("does not fit", ("a", "b"), ("c",), ("d: shape",))
    for error in _errors(run(_fail, "all", thrown)):
        assert isinstance(error, MismatchError)
        assert (error.missing, error.unexpected) == (("a", "b"), ("c",))
        assert error.conflicts == ("d: shape",)


def test_the_group_survives_an_error(world_size: int, run: Run) -> None:
    outcomes = run(_fail_then_talk)
    expected = [b"%d" % rank for rank in range(world_size)]
    assert returned_values(outcomes) == [expected] * world_size


# ----- what ranks do -----


def _who(exchange: Exchange) -> tuple[int, int]:
    return exchange.rank, exchange.world_size


def _talk(exchange: Exchange, size: int) -> tuple[list[bytes], list[bytes] | None, bytes, bytes]:
    rank = exchange.rank
    own = _message(rank, size + rank)
    shares = [_message(100 + peer, size + peer) for peer in range(exchange.world_size)]
    return (
        exchange.all_gather(own),
        exchange.gather(own),
        exchange.scatter(shares if rank == 0 else None),
        exchange.broadcast(_message(7, size) if rank == 0 else None),
    )


def _talk_unevenly(exchange: Exchange) -> list[bytes]:
    last = exchange.world_size - 1
    own = _message(last, 200_000) if exchange.rank == last else b""
    shares = exchange.gather(own)
    assert exchange.scatter(shares) == own
    return exchange.all_gather(own)


def _swap(exchange: Exchange, size: int) -> list[bytes]:
    me, ranks = exchange.rank, range(exchange.world_size)
    outgoing = [
        [
            np.frombuffer(_message(100 * me + rank + part, size * (me + rank)), np.uint8).copy()
            for part in range((me + rank) % 3)
        ]
        for rank in ranks
    ]
    incoming = [
        [np.zeros(size * (me + rank), np.uint8) for _ in range((me + rank) % 3)] for rank in ranks
    ]
    exchange.swap(outgoing, incoming)
    return [bytes(buffer) for buffers in incoming for buffer in buffers]


def _take_turns(exchange: Exchange) -> list[list[bytes]]:
    return [exchange.all_gather(b"%d:%d" % (turn, exchange.rank)) for turn in range(50)]


def _take_steps(exchange: Exchange) -> tuple[list[bytes], bytes, bytes]:
    def join(parts: list[bytes]) -> list[bytes]:
        total = sum(int(part) for part in parts)
        return [b"%s of %d" % (part, total) for part in parts]

    return (
        run_on_all(exchange, lambda: b"from %d" % exchange.rank),
        run_on_one(exchange, lambda: b"from %d" % exchange.rank),
        run_joined(exchange, lambda: b"%d" % exchange.rank, join),
    )


def _fail(exchange: Exchange, step: str, error: Exception) -> None:
    """Fail on the last rank, or on rank 0 where that alone acts."""

    def act(_: object = None) -> Any:
        raise error

    def act_last() -> bytes:
        return act() if exchange.rank == exchange.world_size - 1 else b"fine"

    match step:
        case "all":
            run_on_all(exchange, act_last)
        case "share":
            run_joined(exchange, act_last, lambda parts: parts)
        case "one":
            run_on_one(exchange, act)
        case "join":
            run_joined(exchange, lambda: b"", act)


def _fail_then_talk(exchange: Exchange) -> list[bytes]:
    with pytest.raises((StateError, RankFailedError)):
        _fail(exchange, "all", StateError("first"))
    with pytest.raises((KeyError, RankFailedError)):
        _fail(exchange, "share", KeyError("second"))
    return exchange.all_gather(b"%d" % exchange.rank)


# ----- helpers -----


def _errors(outcomes: list[Outcome[T]]) -> list[BaseException]:
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
    return [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]


def _message(rank: int, size: int) -> bytes:
    return bytes((rank + index) % 251 for index in range(min(size, 997))).ljust(size, b"~")
