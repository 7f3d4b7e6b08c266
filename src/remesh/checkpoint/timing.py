"""Log lines of saves and loads: how much, how long, and the time of each phase.

Some events of a save or load begin a phase, whose time is measured until the next one begins.
The logger is `remesh`. Every rank logs its own share at DEBUG, and rank 0 the whole save at INFO; a
load logs its report there. What fails logs nothing, because it raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from remesh.events import Emit

_LOGGER = logging.getLogger("remesh")

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
"""The phase that begins at a moment."""

_COUNTED: Final = frozenset({"save.chunk_written", "load.run_read"})
"""Moments whose bytes add up to this rank's share."""

_OF_SAVE: Final = frozenset({"save.parts_gathered", "save.stored", "save.kept"})
"""Moments whose bytes are those of all ranks."""


def timed(
    emit: Emit, what: str, rank: int, url: str, clock: Callable[[], float] = time.monotonic
) -> Emit:
    """An `Emit` that also takes the time, and logs it at the end.

    Args:
        emit: Called first.
        what: `save` or `load`.
        rank: The rank whose events these are.
        url: The checkpoint.
        clock: Seconds.
    """
    lock = threading.Lock()
    started = clock()
    phase, since = ("agree" if what == "save" else "open"), started
    seconds: dict[str, float] = {}
    num_bytes = 0
    of_save: dict[str, int] = {}

    def mark(point: str, size: int = 0) -> None:
        nonlocal phase, since, num_bytes
        emit(point, size)
        now = clock()
        with lock:
            if point in _COUNTED:
                num_bytes += size
            if point in _OF_SAVE:
                of_save[point] = size
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
                written, kept = of_save["save.parts_gathered"], of_save.get("save.kept")
                stored = of_save.get("save.stored", written)
                more = f"; compressed to {stored / 1e6:.1f} MB" if stored < written else ""
                more += f"; {kept / 1e6:.1f} MB did not change" if kept else ""
                amount = _amount(written, now - started)
                _LOGGER.info("saved %s (%s)%s: %s", amount, details, more, url)

    return mark


def _amount(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / 1e9 / seconds if seconds > 0 else 0.0
    return f"{num_bytes / 1e6:.1f} MB in {seconds:.2f} s, {rate:.2f} GB/s"
