"""A log filter that passes a repeated message once, with the number of repeats."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

QUIET_SECONDS = 60.0
"""Seconds for which a message is not logged again."""
MAX_MESSAGES = 1000
"""Messages after which all are forgotten."""


class RepeatFilter(logging.Filter):
    """Lets a message pass once a minute; those that differ only in arguments are one message."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if a message is logged."""
        now, message = self._clock(), (record.levelno, str(record.msg))
        at, num_repeated = self._said.get(message, (None, 0))
        if at is not None and now - at < QUIET_SECONDS:
            self._said[message] = at, num_repeated + 1
            return False
        if len(self._said) >= MAX_MESSAGES:
            self._said = {}
        self._said[message] = now, 0
        if num_repeated:
            record.msg = f"{record.getMessage()} ({num_repeated} more like this since the last one)"
            record.args = ()
        return True
