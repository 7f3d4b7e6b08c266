"""How each rank of a played job ended, and which of several failures to blame.

When one rank fails, others usually fail because of it: they lose their peer, or are told of its
error. The failure to raise in a test is the one that began it, so failures are ranked: a rank's
own exception or death first, then an exception that came from another rank, last those that only
say that peers are gone. The others are attached as notes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from remesh.errors import ExchangeError, RankFailedError, RemeshError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class RankDiedError(RuntimeError):
    """A rank ended without a result: it was killed, exited, or ran out of time."""


@dataclass(frozen=True, slots=True)
class Returned(Generic[T_co]):
    """The rank's function returned."""

    value: T_co


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank's function raised."""

    error: BaseException  # a `RankFailedError` in place of one that could not be sent
    traceback: str


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended without a result."""

    exit_code: int  # as in `subprocess`: negative for a signal

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed the process, or None if it exited."""
        return signal.Signals(-self.exit_code) if self.exit_code < 0 else None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The rank still ran when the time was up."""

    seconds: float
    traceback: str = ""  # where it was, if that could be seen


Outcome: TypeAlias = Returned[T] | Raised | Died | TimedOut


def returned_values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """The return values of the ranks, if all returned.

    Else it raises the exception that began the failure, or a `RankDiedError` if that was none, with
    notes on all ranks that failed.
    """
    values = []
    failures: dict[int, Raised | Died | TimedOut] = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Returned):
            values.append(outcome.value)
        else:
            failures[rank] = outcome
    if not failures:
        return values
    first = min(failures, key=lambda rank: (_distance_from_cause(failures[rank]), rank))
    cause = failures[first]
    error = cause.error if isinstance(cause, Raised) else RankDiedError(_describe(first, cause))
    if isinstance(cause, Raised):
        error.add_note(f"rank {first} raised this:\n{cause.traceback}")
    for rank in sorted(failures.keys() - {first}):
        error.add_note(_describe(rank, failures[rank]))
    raise error


def have_succeeded(outcomes: Sequence[Outcome[object]], place: str) -> bool:
    """Whether all ranks returned; those that did not raised an error that names a place."""
    for outcome in outcomes:
        if isinstance(outcome, Returned):
            continue
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.error, RemeshError), outcome.traceback
        assert not isinstance(outcome.error, RankFailedError), outcome.traceback
        assert place in str(outcome.error), outcome.traceback
    return all(isinstance(outcome, Returned) for outcome in outcomes)


def _distance_from_cause(failure: Raised | Died | TimedOut) -> int:
    if isinstance(failure, Died):
        return 0
    if isinstance(failure, TimedOut):
        return 3
    error = failure.error
    if isinstance(error, RemeshError) and error.rank is not None:
        return 1
    return 2 if isinstance(error, ExchangeError) else 0


def _describe(rank: int, failure: Raised | Died | TimedOut) -> str:
    if isinstance(failure, Raised):
        return f"rank {rank} raised {type(failure.error).__name__}: {failure.error}"
    if isinstance(failure, TimedOut):
        return f"rank {rank} still ran after {failure.seconds:g} seconds\n{failure.traceback}"
    if failure.signal is not None:
        return f"rank {rank} was killed by {failure.signal.name}"
    return f"rank {rank} exited with status {failure.exit_code} and no result"
