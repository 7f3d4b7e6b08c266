"""Faults on order: a rank that fails, or does something else, at a named moment.

A `FaultInjector` is handed to `save` or `load` as `on_event`. It looks up each event by rank and
point, and carries out what was planned for it, once. Threads of one process share an injector;
processes have a copy each, which pickles and needs no lock: every step on its dict and list is one
that the interpreter does not divide.

Faults of the storage itself are in `tests.support.faulty_storage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from remesh.events import Event


class InjectedError(Exception):
    """The exception of an injected fault; deliberately none of remesh's exceptions."""


@dataclass(slots=True, eq=False)
class FaultInjector:
    """Listens to events and makes chosen ranks fail at chosen points.

    The methods that plan a fault return the injector, so that they chain. One fault can be planned
    for each rank and point; it happens the first time that the point is reached.
    """

    seen: list[tuple[int, str]] = field(default_factory=list)
    """Rank and point of each event, in order, up to and with the last."""
    _faults: dict[tuple[int, str], InjectedError | Callable[[], object]] = field(
        default_factory=dict
    )

    def fail_at(self, rank: int, point: str) -> Self:
        """Raise an `InjectedError` there."""
        return self.call_at(rank, point, InjectedError(f"injected at {point} on rank {rank}"))

    def call_at(self, rank: int, point: str, fault: InjectedError | Callable[[], object]) -> Self:
        """Call a function there, or raise an error."""
        assert (rank, point) not in self._faults, f"rank {rank} has a fault at {point} already"
        self._faults[rank, point] = fault
        return self

    def __call__(self, event: Event) -> None:
        """Note an event and let the fault that is planned for it happen."""
        self.seen.append((event.rank, event.point))
        fault = self._faults.pop((event.rank, event.point), None)
        if isinstance(fault, InjectedError):
            raise fault
        if fault is not None:
            fault()
