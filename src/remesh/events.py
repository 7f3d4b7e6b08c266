"""Named moments of saves and loads, for listeners.

`save` and `load` take `on_event`, a function that is called, on the rank and in the thread where it
happens, at each named moment. Progress displays, timelines and fault injection are built on it. An
exception that it raises fails the save or load like any other error at that moment. Once a save is
committed it cannot fail any more: then the exception is logged.

Three things follow a save or load by its moments: a `Timeline` keeps them, and draws them for a
trace viewer; `timed` logs how much and how long, and the time of each phase; `showing` draws a
progress bar.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remesh._repr import short_repr
from remesh.run_info import run_info

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


_LOGGER = logging.getLogger("remesh")


def emitter(on_event: OnEvent, rank: int) -> Emit:
    """The `Emit` of a rank."""

    def emit(point: str, num_bytes: int = 0) -> None:
        try:
            on_event(Event(rank, point, num_bytes))
        except Exception:
            if point not in {"save.committed", "save.done"}:
                raise
            _LOGGER.exception("rank %d: the listener failed at %s, after the commit", rank, point)

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
    "save.stored",
    "save.kept",
    "save.index_written",
    "save.before_commit",
    "save.committed",
    "save.done",
)
"""The moments of a save. `planned` and those from `parts_gathered` to `committed` are rank 0's;
staging is part of asynchronous saves only, and overlaps with writing. The bytes of `parts_gathered`
are what all ranks have written, those of `stored` what that takes in the files, less if they are
compressed, and those of `kept` lie in files that did not change since the save before."""

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


# ---------------------------------------------------------------------------------------------
# Log lines: how much, how long, and the time of each phase
# ---------------------------------------------------------------------------------------------

_PHASES: Final[Mapping[str, str]] = {
    # `planned` is rank 0's alone; the other ranks know that it is over when they create their file.
    "save.planned": "write",
    "save.file_created": "write",
    "save.file_finished": "commit",
    "save.parts_gathered": "commit",
    "load.opened": "plan",
    "load.planned": "read",
    "load.read": "apply",
}
"""The phase that begins at a moment; it is measured until the next one begins."""

_COUNTED: Final = frozenset({"save.chunk_written", "load.run_read"})
"""Moments whose bytes add up to this rank's share of the work that is done."""


def timed(
    emit: Emit, what: str, rank: int, url: str, clock: Callable[[], float] = time.monotonic
) -> Emit:
    """An `Emit` that also takes the time, and logs it at the end; `what` is `save` or `load`."""
    lock = threading.Lock()
    started = clock()
    phase, since = ("agree" if what == "save" else "open"), started
    seconds: dict[str, float] = {}
    num_bytes = 0
    sizes: dict[str, int] = {}  # the last of each moment

    def mark(point: str, size: int = 0) -> None:
        nonlocal phase, since, num_bytes
        emit(point, size)
        now = clock()
        with lock:
            if point in _COUNTED:
                num_bytes += size
            sizes[point] = size
            begins = _PHASES.get(point)
            is_end = point == f"{what}.done"
            if is_end or (begins is not None and begins != phase):
                seconds[phase] = seconds.get(phase, 0.0) + now - since
                phase, since = begins or phase, now
        if is_end:
            details = ", ".join(f"{name} {took:.2f} s" for name, took in seconds.items())
            share = _amount(num_bytes, now - started)
            did = "wrote" if what == "save" else "read"
            _LOGGER.debug("rank %d %s %s (%s): %s", rank, did, share, details, url)
            if rank == 0 and what == "save":
                written, kept = sizes["save.parts_gathered"], sizes.get("save.kept")
                stored = sizes.get("save.stored", written)
                more = f"; compressed to {stored / 1e6:.1f} MB" if stored < written else ""
                more += f"; {kept / 1e6:.1f} MB did not change" if kept else ""
                amount = _amount(written, now - started)
                _LOGGER.info("saved %s (%s)%s: %s", amount, details, more, url)

    return mark


def _amount(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / 1e9 / seconds if seconds > 0 else 0.0
    return f"{num_bytes / 1e6:.1f} MB in {seconds:.2f} s, {rate:.2f} GB/s"


# ---------------------------------------------------------------------------------------------
# Progress bars, for a person who watches a terminal
#
# A save or load in the foreground, and every command that reads or writes many bytes, shows a bar
# if stderr is a terminal, on rank 0 alone. The bar appears when the work has taken a second, and is
# removed when it ends, so short work and logs show nothing. It counts the bytes of rank 0; the
# other ranks have about as many. `REMESH_PROGRESS=off` turns bars off, `REMESH_PROGRESS=on` shows
# them at once.
# ---------------------------------------------------------------------------------------------

SHOWN_AFTER = 1.0
"""Seconds of work before a bar appears."""

LABEL_LENGTH = 30
"""Characters of a label: a verb and a place, of which the end is shown if it is longer."""

_TOTALS = frozenset({"save.file_created", "load.planned"})
"""Moments whose size is that of the work to come."""


def is_watched() -> bool:
    """True if a person sees the stderr of this process."""
    with suppress(ValueError):  # a closed stream
        return sys.stderr is not None and sys.stderr.isatty() and run_info().progress != "off"
    return False


@contextmanager
def progress(label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs.

    The label is a verb and a place. The block tells, from any thread, how many bytes were just
    done.
    """
    if not is_watched():
        yield lambda _size: None
        return
    bar = _Bar(label)
    bar.expect(num_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


@contextmanager
def showing(emit: Emit, verb: str, rank: int, url: str) -> Iterator[Emit]:
    """Show a bar for the moments of a save or load while the block runs, on rank 0.

    The verb is `saving` or `loading`. `emit` is called first with each moment of what is yielded.
    """
    if rank != 0 or not is_watched():
        yield emit
        return
    bar = _Bar(f"{verb} {url}")

    def follow(point: str, num_bytes: int = 0) -> None:
        emit(point, num_bytes)
        if point in _TOTALS:
            bar.expect(num_bytes)
        elif point in _COUNTED:
            bar.advance(num_bytes)

    try:
        yield follow
    finally:
        bar.close()


class _Bar:
    """A bar that appears late. Thread-safe."""

    def __init__(self, label: str) -> None:
        verb, _, place = label.partition(" ")
        room = LABEL_LENGTH - len(verb) - 1
        self._label = f"{verb} {place if len(place) <= room else '...' + place[3 - room :]}"
        delay = 0.0 if run_info().progress == "on" else SHOWN_AFTER
        self._appears = time.monotonic() + delay
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._display: Any = None
        self._is_closed = False

    def expect(self, num_bytes: int) -> None:
        """Add to the bytes of the work."""
        with self._lock:
            self._total += num_bytes
            self._show()

    def advance(self, num_bytes: int) -> None:
        """Add to the bytes that are done."""
        with self._lock:
            self._done += num_bytes
            self._show()

    def close(self) -> None:
        """Remove the bar."""
        with self._lock:
            self._is_closed = True
            if self._display is not None:
                self._display.stop()

    def _show(self) -> None:
        if self._is_closed or time.monotonic() < self._appears:
            return
        if self._display is None:
            self._display = _display()
            label = "".join(c if c.isprintable() else "?" for c in self._label)
            self._display.add_task(label, total=None)
            self._display.start()
        [task] = self._display.task_ids
        # Reads are of whole blocks, so more may be read than was asked for.
        done = min(self._done, self._total) if self._total else self._done
        self._display.update(task, total=self._total or None, completed=done)


def _display() -> Any:
    """A display of rich, which is imported only when a bar appears."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(12),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    return Progress(*columns, console=console, transient=True)
