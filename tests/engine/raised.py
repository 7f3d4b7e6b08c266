"""What ranks raised, when all of them should."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support import Raised


def raised(outcomes: Sequence[object]) -> list[Exception]:
    """The exception of each rank; fails if one returned, died or never ended."""
    errors = []
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.error, Exception)
        errors.append(outcome.error)
    return errors
