"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait for a condition; fail, saying what was waited for, if it does not come.

    The limit is for what never comes: it costs nothing when all is well, and a busy machine may
    need a minute for what else takes a second.
    """
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
