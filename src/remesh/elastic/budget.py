"""Budgets of restarts, of which what is spent may be given back in time: pure."""

from __future__ import annotations

import msgspec


class Spent(msgspec.Struct, frozen=True):
    """Restarts that a budget has spent.

    Attributes:
        count: How many, at `since`.
        since: When they were counted; from then on they are given back one by one.
    """

    count: int = 0
    since: float = 0.0

    def at(self, now: float, refill: float | None) -> Spent:
        """What is still spent now, if one is given back every `refill` seconds."""
        if not self.count:
            return Spent(0, now)
        if refill is None or now < self.since:
            return self
        given_back = int((now - self.since) // refill)
        if given_back >= self.count:
            return Spent(0, now)
        return Spent(self.count - given_back, self.since + given_back * refill)

    def and_one(self) -> Spent:
        """One more is spent."""
        return Spent(self.count + 1, self.since)
