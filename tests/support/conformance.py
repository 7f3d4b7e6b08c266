"""What every exchange must do, as tests to inherit: the promises of `remesh.exchange`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from remesh.errors import MismatchError, RankFailedError, StateError
from remesh.exchange import Exchange, run_joined, run_on_all, run_on_one
from tests.support.outcomes import Outcome, Raised, returned_values

T = TypeVar("T")


class ExchangeConformance:
    """The suite for exchanges; supply `run`, and `world_size` if not 1, 2 and 3 are to be tested.

    What the ranks do is in functions of this module, so `run` may hand them to processes.
    """

    @pytest.fixture(params=[1, 2, 3])
    def world_size(self, request: pytest.FixtureRequest) -> int:
        """Number of ranks; override to choose others."""
        size: int = request.param
        return size

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        """Call `fn(exchange, *args)` on each rank of a new group; how each ended."""
        raise NotImplementedError

    def test_ranks(self, world_size: int) -> None:
        expected = [(rank, world_size) for rank in range(world_size)]
        assert returned_values(self.run(world_size, _who)) == expected

    @pytest.mark.parametrize("size", [0, 1, 70_000])
    def test_messages_arrive(self, world_size: int, size: int) -> None:
        # Sizes differ between ranks, and rank 0 has the smallest.
        messages = [_message(rank, size + rank) for rank in range(world_size)]
        for rank, got in enumerate(returned_values(self.run(world_size, _talk, size))):
            all_gathered, gathered, scattered, received = got
            assert all_gathered == messages
            assert gathered == (messages if rank == 0 else None)
            assert scattered == _message(100 + rank, size + rank)
            assert received == _message(7, size)

    def test_one_rank_has_all_the_bytes(self, world_size: int) -> None:
        last = world_size - 1
        expected = [b"" if rank != last else _message(last, 200_000) for rank in range(world_size)]
        for got in returned_values(self.run(world_size, _talk_unevenly)):
            assert got == expected

    @pytest.mark.parametrize("size", [0, 1, 70_000])
    def test_swap(self, world_size: int, size: int) -> None:
        for rank, got in enumerate(returned_values(self.run(world_size, _swap, size))):
            # The diagonal included; the message from a rank to itself is one of them.
            expected = [
                _message(100 * r + rank + part, size * (r + rank))
                for r in range(world_size)
                for part in range((r + rank) % 3)
            ]
            assert got == expected

    def test_calls_keep_their_order(self, world_size: int) -> None:
        expected = [[b"%d:%d" % (turn, r) for r in range(world_size)] for turn in range(50)]
        assert returned_values(self.run(world_size, _take_turns)) == [expected] * world_size

    def test_steps_return_what_ranks_gave(self, world_size: int) -> None:
        gathered = [b"from %d" % rank for rank in range(world_size)]
        total = sum(range(world_size))
        for rank, got in enumerate(returned_values(self.run(world_size, _take_steps))):
            assert got == (gathered, b"from 0", b"%d of %d" % (rank, total))

    @pytest.mark.parametrize("thrown", [StateError("weight: no such dtype"), KeyError("lr")])
    @pytest.mark.parametrize(
        ("step", "is_first"), [("all", False), ("share", False), ("one", True), ("join", True)]
    )
    def test_an_error_reaches_all(
        self, world_size: int, step: str, is_first: bool, thrown: Exception
    ) -> None:
        outcomes = self.run(world_size, _fail, step, thrown)
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

    def test_lists_of_a_mismatch_reach_all(self, world_size: int) -> None:
        thrown = MismatchError("does not fit", ("a", "b"), ("c",), ("d: shape",))
        for error in _errors(self.run(world_size, _fail, "all", thrown)):
            assert isinstance(error, MismatchError)
            assert (error.missing, error.unexpected) == (("a", "b"), ("c",))
            assert error.conflicts == ("d: shape",)

    def test_the_group_survives_an_error(self, world_size: int) -> None:
        outcomes = self.run(world_size, _fail_then_talk)
        expected = [b"%d" % rank for rank in range(world_size)]
        assert returned_values(outcomes) == [expected] * world_size


# ----- what ranks do in the suite for exchanges -----


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
    """The exceptions of ranks that all raised."""
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
    return [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]


def _message(rank: int, size: int) -> bytes:
    return bytes((rank + index) % 251 for index in range(min(size, 997))).ljust(size, b"~")
