from __future__ import annotations

import pickle
import signal

import pytest

from remesh.errors import RankFailedError
from remesh.events import Event
from remesh.exchange import Exchange, run_on_all
from tests.support import (
    Died,
    FaultInjector,
    InjectedError,
    Raised,
    Returned,
    run_processes_outcomes,
    run_ranks_outcomes,
)


def test_a_fault_happens_once_at_its_rank_and_point() -> None:
    injector = FaultInjector().fail_at(1, "save.planned")
    injector(Event(0, "save.planned"))
    injector(Event(1, "save.described"))
    assert injector.pending == [(1, "save.planned")]
    with pytest.raises(InjectedError, match=r"save\.planned on rank 1"):
        injector(Event(1, "save.planned"))
    assert injector.pending == []
    injector(Event(1, "save.planned"))
    assert injector.seen == [
        (0, "save.planned"),
        (1, "save.described"),
        (1, "save.planned"),
        (1, "save.planned"),
    ]


def test_any_exception_can_be_injected() -> None:
    error = OSError("cable pulled")
    injector = FaultInjector().fail_at(0, "x", error)
    with pytest.raises(OSError, match="cable pulled") as caught:
        injector(Event(0, "x"))
    assert caught.value is error


def test_stalls_sleep() -> None:
    naps: list[float] = []
    injector = FaultInjector(sleep=naps.append).stall_at(0, "x", 1.5).stall_at(1, "x", 2.5)
    injector(Event(0, "x"))
    injector(Event(0, "x"))
    assert naps == [1.5]


def test_two_faults_at_one_point_are_a_mistake() -> None:
    injector = FaultInjector().fail_at(0, "x")
    with pytest.raises(AssertionError, match="already"):
        injector.kill_at(0, "x")


def test_injectors_pickle() -> None:
    injector = pickle.loads(pickle.dumps(FaultInjector().fail_at(0, "x")))
    with pytest.raises(InjectedError):
        injector(Event(0, "x"))


def _pass_points(exchange: Exchange, injector: FaultInjector) -> list[tuple[int, str]]:
    for point in ("first", "second"):

        def act(point: str = point) -> bytes:
            injector(Event(exchange.rank, point))
            return b""

        run_on_all(exchange, act)
    return injector.seen


def test_threads_share_an_injector() -> None:
    injector = FaultInjector().fail_at(1, "second")
    outcomes = run_ranks_outcomes(3, _pass_points, injector)
    kinds = [type(o.error) for o in outcomes if isinstance(o, Raised)]
    assert kinds == [RankFailedError, InjectedError, RankFailedError]
    assert sorted(injector.seen) == [(r, p) for r in range(3) for p in ("first", "second")]


def test_processes_are_killed_where_it_was_planned() -> None:
    injector = FaultInjector().kill_at(1, "second")
    outcomes = run_processes_outcomes(2, _pass_points, injector)
    assert outcomes[1] == Died(-signal.SIGKILL)
    assert isinstance(outcomes[0], Raised)
    assert injector.seen == []


def test_processes_have_injectors_of_their_own() -> None:
    outcomes = run_processes_outcomes(2, _pass_points, FaultInjector())
    assert outcomes == [Returned([(r, "first"), (r, "second")]) for r in range(2)]
