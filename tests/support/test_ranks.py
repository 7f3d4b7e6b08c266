from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from remesh.errors import ExchangeError, StateError
from remesh.exchange import Exchange, run_on_all
from tests.support import (
    Died,
    Outcome,
    Raised,
    RankDiedError,
    Returned,
    TimedOut,
    returned_values,
    run_ranks,
    run_ranks_outcomes,
)


def test_results_come_in_rank_order() -> None:
    def work(exchange: Exchange, factor: int) -> int:
        exchange.all_gather(b"")
        return exchange.rank * factor

    assert run_ranks(4, work, 10) == [0, 10, 20, 30]


def test_ranks_share_the_arguments() -> None:
    seen: dict[int, str] = {}

    def work(exchange: Exchange, shared: dict[int, str]) -> None:
        shared[exchange.rank] = threading.current_thread().name

    run_ranks(3, work, seen)
    assert seen == {0: "rank 0", 1: "rank 1", 2: "rank 2"}


def test_the_rank_that_began_it_is_blamed() -> None:
    def work(exchange: Exchange) -> None:
        exchange.all_gather(b"")
        if exchange.rank == 2:
            raise LookupError("lost")
        exchange.all_gather(b"")

    with pytest.raises(LookupError, match="lost") as caught:
        run_ranks(3, work)
    cause, *others = caught.value.__notes__
    assert cause.startswith("rank 2 raised this:\nTraceback")
    assert 'raise LookupError("lost")' in cause
    assert [note.partition(":")[0] for note in others] == [
        "rank 0 raised ExchangeError",
        "rank 1 raised ExchangeError",
    ]


def test_the_origin_of_a_shared_error_is_blamed() -> None:
    thrown = StateError("bad")

    def act(rank: int) -> bytes:
        if rank == 1:
            raise thrown
        return b""

    def work(exchange: Exchange) -> None:
        run_on_all(exchange, lambda: act(exchange.rank))

    with pytest.raises(StateError) as caught:
        run_ranks(3, work)
    assert caught.value is thrown
    assert caught.value.rank is None


def test_outcomes_keep_what_each_rank_did() -> None:
    def work(exchange: Exchange) -> str:
        if exchange.rank == 1:
            raise LookupError("lost")
        return "fine"

    first, second = run_ranks_outcomes(2, work)
    assert first == Returned("fine")
    assert isinstance(second, Raised)
    assert isinstance(second.error, LookupError)
    assert "LookupError: lost" in second.traceback


def test_a_rank_that_does_not_end_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, release = threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        waits.set()
        release.wait()

    def work(exchange: Exchange) -> None:
        if exchange.rank == 1:
            wait_for_ever()

    def clock() -> Iterator[float]:
        """No time passes until rank 0 has ended and rank 1 waits; then it is up."""
        yield from (0.0, 0.0)
        assert waits.wait(240)
        yield 60.5

    fake = SimpleNamespace(monotonic=clock().__next__)
    monkeypatch.setattr("tests.support.ranks.time", fake)
    outcomes = run_ranks_outcomes(2, work, timeout=60.5)
    release.set()
    assert outcomes[0] == Returned(None)
    assert isinstance(outcomes[1], TimedOut)
    assert outcomes[1].seconds == 60.5
    assert "in wait_for_ever" in outcomes[1].traceback
    with pytest.raises(RankDiedError, match=r"rank 1 still ran after 60\.5 seconds"):
        returned_values(outcomes)


def test_system_exit_is_an_outcome() -> None:
    def work(exchange: Exchange) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_ranks(1, work)


# ----- who is to blame -----


def _foreign(rank: int) -> Raised:
    error = StateError(f"from {rank}")
    error.rank = rank
    return Raised(error, "")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Raised(ExchangeError("gone"), ""), Raised(KeyError("k"), "")], "'k'"),
        ([Raised(ExchangeError("gone"), ""), Died(-9)], "rank 1 was killed by SIGKILL"),
        ([Raised(ExchangeError("gone"), ""), Died(3)], "rank 1 exited with status 3"),
        ([_foreign(1), Raised(ValueError("own"), "")], "own"),
        ([Raised(ExchangeError("gone"), ""), _foreign(5)], "from 5"),
        ([TimedOut(5), Raised(ExchangeError("gone"), "")], "gone"),
        ([Returned(1), TimedOut(5)], "rank 1 still ran after 5 seconds"),
        ([Raised(KeyError("first"), ""), Raised(KeyError("second"), "")], "first"),
    ],
)
def test_blame(outcomes: list[Outcome[int]], expected: str) -> None:
    with pytest.raises(Exception, match=expected) as caught:
        returned_values(outcomes)
    failed = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, Returned)]
    told = f"{caught.value}\n" + "\n".join(getattr(caught.value, "__notes__", []))
    assert all(f"rank {rank}" in told for rank in failed)
