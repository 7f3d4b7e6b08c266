"""Named moments of saves and loads, for listeners.

`save` and `load` take `on_event`, a function that is called, on the rank and in the thread where it
happens, at each named moment. Progress displays, timelines and fault injection are built on it. An
exception that it raises fails the save or load like any other error at that moment.

`Timeline` is such a listener: it keeps every moment, and draws them for a trace viewer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from remesh._repr import short_repr

__all__ = ["LOAD_POINTS", "SAVE_POINTS", "Event", "Moment", "Timeline"]


@dataclass(frozen=True, slots=True)
class Event:
    """One moment."""

    rank: int
    """The rank on which it happens."""
    point: str
    """Its name, such as `save.chunk_written`."""
    num_bytes: int = 0
    """Bytes that the moment is about (of the chunk that was written), or 0."""


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
    "save.values_written",
    "save.file_finished",
    "save.parts_gathered",
    "save.stored",
    "save.kept",
    "save.index_written",
    "save.before_commit",
    "save.committed",
    "save.done",
)
"""The moments of a save. `planned`, `values_written` and those from `parts_gathered` to `committed`
are rank 0's; staging is part of asynchronous saves only, and overlaps with writing, as does
`values_written`. The bytes of `parts_gathered` are what all ranks have written, those of `stored`
what that takes in the files, less if they are compressed, and those of `kept` lie in files that did
not change since the save before."""

LOAD_POINTS = ("load.opened", "load.planned", "load.run_read", "load.read", "load.done")
"""The moments of a load, in order."""


CHUNK_POINTS = ("save.chunk_staged", "save.chunk_written", "load.run_read")
"""The moments that end the work on one chunk, in the thread that did it. All others end a phase."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event with its time and place."""

    event: Event
    """What happened."""
    seconds: float
    """When: `time.monotonic()`, which all processes of a machine share."""
    thread: int
    """Number of the thread in which it happened, as the system counts."""
    thread_name: str
    """Its name."""

    __repr__ = short_repr


class Timeline:
    """Keeps every moment of the saves and loads that it listens to. Thread-safe.

    Use it as `on_event` of one or several saves and loads, then read `moments` or write a trace.
    Each process has its own; ranks that are threads may share one.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._moments: list[Moment] = []

    def __call__(self, event: Event) -> None:
        """Keep a moment; what `on_event` calls."""
        thread = threading.current_thread()
        with self._lock:
            # The time is taken inside, so that moments are in its order.
            self._moments.append(
                Moment(event, self._clock(), threading.get_native_id(), thread.name)
            )

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Every moment so far, in order."""
        with self._lock:
            return tuple(self._moments)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened so far as a trace for Perfetto or chrome://tracing.

        Each rank is a process of the trace, with a track for its phases and one for each thread
        that moved bytes. A slice of a phase reaches from the moment before to the moment that the
        slice is named after. A slice of a chunk reaches from the end of the thread's chunk before,
        or from the rank's latest other moment if that was later, to the end of this one. Traces of
        several processes of a machine have one time axis.

        Args:
            path: The JSON file; it is replaced if it is there.
        """
        document = {"traceEvents": list(_trace_events(self.moments)), "displayTimeUnit": "ms"}
        Path(path).expanduser().write_text(json.dumps(document), encoding="utf-8")


def _trace_events(moments: tuple[Moment, ...]) -> Iterator[dict[str, object]]:
    """The events of the trace format of what happened."""
    ranks: set[int] = set()
    threads: set[tuple[int, int]] = set()
    phase_began: dict[int, float] = {}
    chunk_ended: dict[tuple[int, int], float] = {}
    for moment in moments:
        event, now = moment.event, moment.seconds
        is_chunk = event.point in CHUNK_POINTS
        track = (event.rank, moment.thread if is_chunk else 0)
        if event.rank not in ranks:
            ranks.add(event.rank)
            yield _name_event("process_name", event.rank, 0, f"rank {event.rank}")
        if track not in threads:
            threads.add(track)
            name = moment.thread_name if is_chunk else "phases"
            yield _name_event("thread_name", *track, name)
        began = phase_began.get(event.rank)
        if is_chunk:
            began = max((t for t in (began, chunk_ended.get(track)) if t is not None), default=None)
            chunk_ended[track] = now
        elif event.point.endswith(".done"):
            phase_began.pop(event.rank, None)
        else:
            phase_began[event.rank] = now
        yield _slice(event, track, began, now)


def _name_event(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(
    event: Event, track: tuple[int, int], began: float | None, ended: float
) -> dict[str, object]:
    """A slice of a track, or a mark if its beginning is not known. Times are in microseconds."""
    args = {"num_bytes": event.num_bytes} if event.num_bytes else {}
    common = {"name": event.point, "pid": track[0], "tid": track[1], "args": args}
    if began is None:
        return {"ph": "i", "s": "t", "ts": ended * 1e6, **common}
    return {"ph": "X", "ts": began * 1e6, "dur": (ended - began) * 1e6, **common}
