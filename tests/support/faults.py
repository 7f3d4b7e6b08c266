"""Faults on order: a rank that fails at a named moment.

A `FaultInjector` is handed to `save` or `load` as `on_event`. It looks up each event by rank and
point, and carries out what was planned for it, once. Threads of one process share an injector;
processes have a copy each, which pickles and needs no lock: every step on its dict and list is one
that the interpreter does not divide.

Faults of the storage itself are in `tests.support.faulty_storage`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from remesh.events import Event


class InjectedError(Exception):
    """The exception of an injected fault; deliberately none of remesh's exceptions."""


@dataclass(frozen=True, slots=True)
class _Fail:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Kill:
    pass


@dataclass(frozen=True, slots=True)
class _Stall:
    seconds: float


_Fault: TypeAlias = _Fail | _Kill | _Stall


class FaultInjector:
    """Listens to events and makes chosen ranks fail, die or stall at chosen points.

    The methods that plan a fault return the injector, so that they chain. One fault can be planned
    for each rank and point; it happens the first time that the point is reached.

    Attributes:
        seen: Rank and point of each event, in order, up to and with the last.
    """

    def __init__(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.seen: list[tuple[int, str]] = []
        self._faults: dict[tuple[int, str], _Fault] = {}
        self._sleep = sleep

    def fail_at(self, rank: int, point: str) -> FaultInjector:
        """Raise an `InjectedError` there."""
        error = InjectedError(f"injected at {point} on rank {rank}")
        return self._plan(rank, point, _Fail(error))

    def kill_at(self, rank: int, point: str) -> FaultInjector:
        """Kill the process there by SIGKILL: nothing is flushed, closed or reported."""
        return self._plan(rank, point, _Kill())

    def stall_at(self, rank: int, point: str, seconds: float) -> FaultInjector:
        """Sleep there."""
        return self._plan(rank, point, _Stall(seconds))

    def __call__(self, event: Event) -> None:
        """Note an event and let the fault that is planned for it happen."""
        self.seen.append((event.rank, event.point))
        match self._faults.pop((event.rank, event.point), None):
            case _Fail(error):
                raise error
            case _Kill():
                os.kill(os.getpid(), signal.SIGKILL)
            case _Stall(seconds):
                self._sleep(seconds)
            case None:
                pass

    def _plan(self, rank: int, point: str, fault: _Fault) -> FaultInjector:
        assert (rank, point) not in self._faults, f"rank {rank} has a fault at {point} already"
        self._faults[rank, point] = fault
        return self
