from __future__ import annotations

import threading

import pytest
from tests.support import Raised, Returned, run_ranks, run_ranks_outcomes

from remesh.errors import ExchangeError, RankFailedError
from remesh.exchange import (
    Exchange,
    Outcome,
    ThreadGroup,
    join_outcomes,
    run_joined,
    run_on_all,
    run_on_one,
)


def _one_leaves(exchange: Exchange) -> str:
    if exchange.rank == 1:
        return "left"
    exchange.gather(b"")
    return "stayed"


def test_a_rank_that_returns_early_does_not_hang_the_others() -> None:
    first, second = run_ranks_outcomes(2, _one_leaves)
    assert second == Returned("left")
    assert isinstance(first, Raised)
    assert "rank 1 has returned" in str(first.error)


def _differ(exchange: Exchange) -> None:
    if exchange.rank == 0:
        exchange.gather(b"")
    else:
        exchange.all_gather(b"")


def test_different_operations_are_an_error() -> None:
    outcomes = run_ranks_outcomes(2, _differ)
    for outcome in outcomes:
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, ExchangeError)
        assert "rank 0: gather, rank 1: all-gather" in str(outcome.error)


def test_time_runs_out() -> None:
    group = ThreadGroup(3, timeout=0.01)
    with pytest.raises(ExchangeError, match=r"no end within 0.01 s: ranks 0, 2 have not come"):
        group.exchange(1).all_gather(b"")
    # Whoever comes later must not wait again.
    with pytest.raises(ExchangeError, match="ranks 0, 2 have not come"):
        group.exchange(0).all_gather(b"")


def test_abort_wakes_those_who_wait() -> None:
    group = ThreadGroup(2)
    caught: list[ExchangeError] = []

    def wait() -> None:
        try:
            group.exchange(0).broadcast(b"")
        except ExchangeError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    group.abort("the test is over")
    group.abort("a later reason")
    thread.join()
    assert "broadcast failed on rank 0: the test is over" in str(caught[0])


def _abort_at_once(exchange: Exchange, group: ThreadGroup) -> list[bytes]:
    rank = exchange.rank
    everybody = run_on_all(group.exchange(rank), lambda: b"%d" % rank)
    group.abort(f"rank {rank} is done")
    return everybody


def test_a_meeting_that_took_place_is_not_undone_by_an_abort() -> None:
    for _ in range(200):
        outcomes = run_ranks_outcomes(4, _abort_at_once, ThreadGroup(4))
        assert outcomes == [Returned([b"0", b"1", b"2", b"3"])] * 4


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        MemoryError(),
        OSError(5, "gone", "file\udc80"),
        _UnspeakableError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("step", ["on all", "joined", "join", "undo", "on one"])
def test_whatever_is_raised_in_a_step_is_raised_on_all(error: BaseException, step: str) -> None:
    """No rank ends before all have raised, for the end of one would wake the others."""
    group = ThreadGroup(3, timeout=120)
    over = threading.Barrier(3)

    def fail() -> bytes:
        raise error

    def undo() -> None:
        fail()

    def act(rank: int) -> None:
        exchange = group.exchange(rank)
        if step == "on all":
            run_on_all(exchange, fail if rank == 1 else lambda: b"")
        elif step == "on one":
            run_on_one(exchange, fail)
        elif step == "join":
            run_joined(exchange, lambda: b"", lambda _: [fail()])
        else:
            with Outcome() as own:
                own.reply = fail() if rank == 1 else b""
            join_outcomes(exchange, own, lambda replies: replies, undo if step == "undo" else None)

    def play(exchange: Exchange) -> BaseException | None:
        try:
            act(exchange.rank)
        except BaseException as caught:  # noqa: BLE001 - it is the outcome
            return caught
        finally:
            over.wait(120)
        return None

    victim = 1 if step in ("on all", "joined", "undo") else 0
    for rank, caught in enumerate(run_ranks(3, play)):
        if rank == victim or (rank == 0 and step == "undo"):
            assert caught is error
        else:
            assert isinstance(caught, RankFailedError)
            assert caught.rank == victim
            assert type(error).__name__ in str(caught)
