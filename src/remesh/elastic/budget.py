"""Restart budgets: charges, and how they are given back in time. Pure."""

from __future__ import annotations

import msgspec


class Charges(msgspec.Struct, frozen=True):
    """Restarts that were charged to a budget."""

    count: int = 0  # how many, at `since`
    since: float = 0.0  # when they were counted; from then on they are given back one by one

    def at(self, now: float, refill: float | None) -> Charges:
        """What is still charged now, if one is given back every `refill` seconds."""
        if not self.count:
            return Charges(0, now)
        if refill is None or now < self.since:
            return self
        given_back = int((now - self.since) // refill)
        if given_back >= self.count:
            return Charges(0, now)
        return Charges(self.count - given_back, self.since + given_back * refill)

    def plus_one(self) -> Charges:
        """One more restart is charged."""
        return Charges(self.count + 1, self.since)


def describe(max_restarts: int, refill: float | None) -> str:
    """A budget in the words of the log, the page and `remesh status`."""
    given_back = "none is given back" if refill is None else f"one is given back every {refill:g} s"
    return f"{max_restarts} restarts a node, {given_back}"
