"""Waiting for what other threads and processes do, and whether they live."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait for a condition; fail, saying what was waited for, if it does not come.

    The limit is for what never comes: it costs nothing when all is well, and a busy machine may
    need a minute for what else takes a second.
    """
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def is_alive(process_id: int) -> bool:
    """Whether a process runs; one that has ended and is not reaped does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is looked at
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
