"""Named moments of saves and loads, told to whoever asked.

`save` and `load` take `on_event`, a function that is called, on the rank and in the thread where it
happens, at each named moment. Progress displays, timelines and fault injection are built on it. An
exception that it raises fails the save or load like any other error at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One moment.

    Attributes:
        rank: The rank on which it happens.
        point: Its name, such as `save.chunk_written`.
        num_bytes: Bytes that the moment is about (of the chunk that was written), or 0.
    """

    rank: int
    point: str
    num_bytes: int = 0


OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The listener of those who do not listen."""


Emit = Callable[..., None]
"""Tells a listener of a moment of one rank: `emit(point, num_bytes=0)`."""


def emitter(on_event: OnEvent, rank: int) -> Emit:
    """The `Emit` of a rank."""

    def emit(point: str, num_bytes: int = 0) -> None:
        on_event(Event(rank, point, num_bytes))

    return emit


SAVE_POINTS = (
    "save.described",
    "save.planned",
    "save.chunk_staged",
    "save.staged",
    "save.file_created",
    "save.chunk_written",
    "save.file_finished",
    "save.parts_gathered",
    "save.values_written",
    "save.index_written",
    "save.before_commit",
    "save.committed",
    "save.done",
)
"""The moments of a save. `planned` and those from `parts_gathered` to `committed` are rank 0's;
staging is part of asynchronous saves only, and overlaps with writing."""

LOAD_POINTS = ("load.opened", "load.planned", "load.run_read", "load.read", "load.done")
"""The moments of a load, in order."""
