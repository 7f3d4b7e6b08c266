"""Progress bars on stderr, for a person who watches a terminal.

A save or load in the foreground, and every command that reads or writes many bytes, shows a bar if
stderr is a terminal, on rank 0 alone. The bar appears when the work has taken a second, and is
removed when it ends, so short work and logs show nothing. It counts the bytes of rank 0; the other
ranks have about as many. `REMESH_PROGRESS=off` turns bars off, `REMESH_PROGRESS=on` shows them at
once.

Saves and loads drive their bar with the moments that they emit (`remesh.events`): one of them says
how many bytes there are, each chunk how many of them are done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from remesh.events import Emit
from remesh.run_info import run_info

SHOWN_AFTER = 1.0
"""Seconds of work before a bar appears."""

LABEL_LENGTH = 30
"""Characters of a label: a verb and a place, of which the end is shown if it is longer."""

_TOTALS = frozenset({"save.file_created", "load.planned"})
"""Moments whose size is that of the work to come."""

_CHUNKS = frozenset({"save.chunk_written", "load.run_read"})
"""Moments whose size is that of work that is done."""


def is_watched() -> bool:
    """Whether a person sees the stderr of this process."""
    with suppress(ValueError):  # a closed stream
        return sys.stderr is not None and sys.stderr.isatty() and run_info().progress != "off"
    return False


@contextmanager
def progress(label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs.

    Args:
        label: The work, as a verb, and its place.
        num_bytes: How many bytes the work has.

    Yields:
        To be called, from any thread, with the number of bytes that were just done.
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
    """Show a bar for the moments of a save or load while the block runs.

    Args:
        emit: Is called first with each moment.
        verb: `saving` or `loading`.
        rank: The rank whose events these are.
        url: The checkpoint.

    Yields:
        The `Emit` to use in the block.
    """
    if rank != 0 or not is_watched():
        yield emit
        return
    bar = _Bar(f"{verb} {url}")

    def follow(point: str, num_bytes: int = 0) -> None:
        emit(point, num_bytes)
        if point in _TOTALS:
            bar.expect(num_bytes)
        elif point in _CHUNKS:
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
            self._display.add_task(_printable(self._label), total=None)
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


def _printable(text: str) -> str:
    """A label without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
