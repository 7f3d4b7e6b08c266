"""A rank's connection to those who watch it: pace, heartbeats, stacks, signals and requests.

Nothing here is collective. What a rank hears it tells the others when notes are exchanged
(`remesh.training.policies`). No training ends because a heartbeat cannot be written or a request
cannot be read: that is logged, once for each file.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from remesh.errors import StorageError
from remesh.heartbeat import (
    Heartbeat,
    Request,
    answer_stack_requests,
    clear_request,
    clear_request_file,
    read_request,
    read_request_file,
    write_heartbeat,
)
from remesh.training.policies import OnRequest, OnSignals, SavePolicy

BEAT_SECONDS = 0.25
"""Shortest time between two heartbeats."""

_LOGGER = logging.getLogger("remesh")


class Watch:
    """Takes note of signals, reads requests, writes heartbeats.

    Args:
        every: The policies: which signals and which files count.
        heartbeat_file: `RunInfo.heartbeat_file`.

    Raises:
        ValueError: If signals count and this is not the main thread, which alone may handle them.
    """

    def __init__(self, every: Sequence[SavePolicy], heartbeat_file: str) -> None:
        self._files = [policy.file for policy in every if isinstance(policy, OnRequest)]
        self._heartbeat_file = heartbeat_file
        self._warned: set[str] = set()
        self._signal = ""
        self._last_beat = -math.inf
        self._last_step: tuple[int, float] | None = None
        self._own_seconds: float | None = None
        self.step_seconds: float | None = None
        wanted = [n for policy in every if isinstance(policy, OnSignals) for n in policy.signals]
        if wanted and threading.current_thread() is not threading.main_thread():
            raise ValueError("OnSignals needs the main thread; make the manager there")
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._notice) for number in wanted
        }
        # After the signals that count: one of them may be that by which stacks are asked for.
        self._end_answering = self._answer_stack_requests()

    def _answer_stack_requests(self) -> Callable[[], None] | None:
        if not self._heartbeat_file:
            return None
        try:
            return answer_stack_requests(self._heartbeat_file)
        except StorageError as error:
            self._warn(self._heartbeat_file, error)
            return None

    def keep_pace(self, step: int, own_seconds: float | None = None) -> None:
        """Note that a step is done, how long it took, and how much of that was this rank's work."""
        now = time.monotonic()
        self._own_seconds = own_seconds
        if self._last_step is not None and step > self._last_step[0]:
            self.step_seconds = (now - self._last_step[1]) / (step - self._last_step[0])
        self._last_step = step, now

    def beat(self, step: int, saved_step: int | None, *, at_once: bool = False) -> None:
        """Write a heartbeat, if somebody wants one and the last is not too recent."""
        now = time.monotonic()
        if self._heartbeat_file and (at_once or now - self._last_beat >= BEAT_SECONDS):
            self._last_beat = now
            own = self.step_seconds if self._own_seconds is None else self._own_seconds
            beat = Heartbeat(step, saved_step, time.time(), own)
            try:
                write_heartbeat(self._heartbeat_file, beat)
            except StorageError as error:
                self._warn(self._heartbeat_file, error)

    def asked(self) -> tuple[str, bool]:
        """Who asks for a save, or nothing; and whether the training is to end after it."""
        if self._signal:
            return f"signal {self._signal}", True
        for file in self._files:
            asked = self._read(file, read_request_file)
            if asked is not None:
                return f"request in {file}", asked == "save-and-stop"
        if self._heartbeat_file:
            asked = self._read(self._heartbeat_file, read_request)
            if asked is not None:
                return "request of the agent", asked == "save-and-stop"
        return "", False

    def _read(self, file: str, read: Callable[[str], Request | None]) -> Request | None:
        try:
            return read(file)
        except StorageError as error:
            self._warn(file, error)
            return None

    def _warn(self, file: str, error: StorageError) -> None:
        if file not in self._warned:
            self._warned.add(file)
            _LOGGER.warning("%s", error)

    def answered(self) -> None:
        """Forget who asked: the save has begun."""
        self._signal = ""
        for file in self._files:
            clear_request_file(file)
        if self._heartbeat_file:
            clear_request(self._heartbeat_file)

    def close(self) -> None:
        """Put the former handlers of signals back."""
        if self._end_answering is not None:
            self._end_answering()
            self._end_answering = None
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, handler)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        # Only takes note, since it may run between any two lines of the training.
        self._signal = signal.Signals(number).name
