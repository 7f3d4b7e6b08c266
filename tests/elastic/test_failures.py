"""Whose fault a failure is, and what follows from it."""

from __future__ import annotations

import pytest

from remesh.elastic.failures import (
    FailureAction,
    Kind,
    Patterns,
    ProcessFailure,
    classify,
    decide,
    restart_pause,
    root_cause,
)
from tests.elastic.agents import failure_of

PATTERNS = Patterns()


def failure(
    rank: int, message: str = "", *, exit_code: int = 1, time: float = 0.0, log: str = ""
) -> ProcessFailure:
    own = {"rank": rank, "local_rank": rank % 2, "exit_code": exit_code, "time": time}
    return failure_of(rank // 2, message=message, log_tail=log, **own)


@pytest.mark.parametrize(
    ("message", "exit_code", "kind"),
    [
        ("ValueError: no such layer", 1, Kind.PROCESS),
        ("", -11, Kind.PROCESS),
        ("", -9, Kind.PROCESS),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", 1, Kind.PROCESS),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected", -6, Kind.NODE),
        ("", 201, Kind.NODE),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:39213", 1, Kind.COLLATERAL),
        ("RuntimeError: connect [::1]:80: No route to host", 1, Kind.COLLATERAL),
        ("OSError: [Errno 101] Network is unreachable", 1, Kind.COLLATERAL),
        ("TimeoutError: [Errno 110] Connection timed out", 1, Kind.COLLATERAL),
        ("DistBackendError: NCCL error ... ncclRemoteError", 1, Kind.COLLATERAL),
        ("", -15, Kind.STOPPED),
    ],
)
def test_kinds(message: str, exit_code: int, kind: Kind) -> None:
    assert classify(failure(0, message, exit_code=exit_code), PATTERNS) is kind


def test_the_log_is_searched_too_and_patterns_can_be_given() -> None:
    assert classify(failure(0, log="NVRM: Xid (PCI:0000:41:00): 79"), PATTERNS) is Kind.NODE
    patterns = Patterns(node=(r"fan of slot \d+ stopped",))
    assert classify(failure(0, "fan of slot 3 stopped"), patterns) is Kind.NODE


def test_the_root_cause_comes_before_what_it_caused_even_if_its_clock_is_late() -> None:
    cause = failure(5, "ZeroDivisionError: division by zero", time=10.4)
    first = failure(0, "Connection closed by peer", time=10.1)
    second = failure(2, "Connection reset by peer", time=10.2)
    told = failure(1, exit_code=-15, time=10.0)
    ordered = root_cause([told, second, first, cause], PATTERNS)
    assert [f.rank for f in ordered] == [5, 1, 0, 2]


REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("messages", "num_ranks", "action"),
    [
        pytest.param([REFUSED], 1, FailureAction.CHARGE, id="there is no peer to lose"),
        pytest.param([REFUSED], 2, FailureAction.EXCUSE, id="a peer was lost"),
        pytest.param(
            ["Connection reset by peer", "uncorrectable ECC error"],
            2,
            FailureAction.REPLACE,
            id="a machine is broken",
        ),
        pytest.param(["CUDA out of memory"], 1, FailureAction.CHARGE, id="memory"),
    ],
)
def test_decisions(messages: list[str], num_ranks: int, action: FailureAction) -> None:
    failures = [failure(rank, message) for rank, message in enumerate(messages)]
    made, reason = decide(failures, num_ranks=num_ranks, patterns=PATTERNS)
    assert made is action
    assert ("others" in reason) is (action is FailureAction.EXCUSE)


def test_starts_that_keep_failing_follow_ever_later() -> None:
    assert [restart_pause(number) for number in range(8)] == [0, 0, 1, 2, 4, 8, 16, 30]
    assert restart_pause(10_000) == 30


def test_a_sign_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(' is no regular expression: missing \)"):
        Patterns(memory=("(",))
