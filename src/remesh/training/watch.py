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
from os.path import expanduser
from types import FrameType
from typing import Any, Literal

from remesh.elastic.heartbeat import (
    HOLDS,
    AgentLock,
    Heartbeat,
    Request,
    answer_stack_requests,
    clear_request_file,
    read_request_file,
    request_file,
    write_heartbeat,
)
from remesh.errors import AgentLostError, StorageError
from remesh.training.policies import OnRequest, OnSignals, SavePolicy

BEAT_SECONDS = 0.25
"""Shortest time between two heartbeats."""

_SIGNAL = ""
"""Stands for the signal among the files with requests."""

_LOGGER = logging.getLogger("remesh")


class Watch:
    """Takes note of signals (in the main thread alone), reads requests, writes heartbeats."""

    def __init__(
        self, every: Sequence[SavePolicy], heartbeat_file: str, agent_dir: str = ""
    ) -> None:
        self._agent = AgentLock(agent_dir)
        # Request files, and what to call each.
        files = [expanduser(policy.file) for policy in every if isinstance(policy, OnRequest)]
        self._sources = {file: f"request in {file}" for file in files}
        if heartbeat_file:
            self._sources[str(request_file(heartbeat_file))] = "request of the agent"
        self._heartbeat_file = heartbeat_file
        self._warned: set[str] = set()
        self._empty: set[str] = set()  # request files that were empty when they were last read
        self._signal = ""
        self._heard: dict[str, str] = {}  # what `asked` returned since `answered`, by file
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

    def beat(
        self, step: int, saved_step: int | None, *, at_once: bool = False, waits: bool = False
    ) -> None:
        """Write a heartbeat, if there is an agent, and `at_once` or the last is not too recent."""
        self.check_agent()
        now = time.monotonic()
        if self._heartbeat_file and (at_once or now - self._last_beat >= BEAT_SECONDS):
            self._last_beat = now
            own = self.step_seconds if self._own_seconds is None else self._own_seconds
            beat = Heartbeat(step, saved_step, time.time(), own, waits)
            try:
                write_heartbeat(self._heartbeat_file, beat)
            except StorageError as error:
                self._warn(self._heartbeat_file, error)

    def check_agent(self) -> None:
        """Make sure that this process still has its agent."""
        if self._agent.is_free():
            raise AgentLostError(
                "the agent (remesh run) that started this process has ended\nThis process ends: "
                "the job may go on elsewhere, and two trainings must not save to one place"
            )

    def asked(
        self, *, holds_state: bool = False, is_saving: bool = False
    ) -> tuple[str, Request | None]:
        """The source of a request for a save, and the request; ("", None) if there is none.

        If the state in memory is as good as a save, a request to wait without one has no source,
        for nothing is to be saved; it waits for a save that is being written.

        An empty file counts when it is read for the second time: it may be one that is still being
        written, as by `echo save-and-stop > file`.
        """
        if self._signal:
            self._heard[_SIGNAL] = "save-and-stop"
            return f"signal {self._signal}", "save-and-stop"
        for file, source in self._sources.items():
            asked = self._read(file)
            if asked == "hold" and holds_state:
                if is_saving:
                    continue
                return "", "hold"
            asked = "save-and-hold" if asked == "hold" else asked
            was_empty = file in self._empty
            self._empty.discard(file)
            if asked == "" and not was_empty:
                self._empty.add(file)
            elif asked is not None:
                self._heard[file] = asked
                return source, asked or "save"
        return "", None

    def is_held(self) -> bool:
        """True if a request to wait is there."""
        return any(self._read(file) in HOLDS for file in self._sources)

    def answered(self) -> None:
        """Remove the requests that `asked` returned: the save has begun.

        What came later stays for the next call of `asked`. The sender removes a request to wait.
        """
        while self._heard:
            source, asked = self._heard.popitem()
            if source == _SIGNAL:
                self._signal = ""
            elif asked not in HOLDS and self._read(source) == asked:
                clear_request_file(source)

    def _read(self, file: str) -> Request | Literal[""] | None:
        try:
            return read_request_file(file)
        except StorageError as error:
            self._warn(file, error)
            return None

    def _warn(self, file: str, error: StorageError) -> None:
        if file not in self._warned:
            self._warned.add(file)
            _LOGGER.warning("%s", error)

    def close(self) -> None:
        """Put the former handlers of signals back."""
        self._agent.close()
        if self._end_answering is not None:
            self._end_answering()
            self._end_answering = None
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, handler)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        # Only takes note, since it may run between any two lines of the training.
        self._signal = signal.Signals(number).name
