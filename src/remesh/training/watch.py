"""What a rank tells those who watch it, and hears of them: pace, stacks, signals and requests.

Nothing here is collective. What a rank hears it tells the others when notes are exchanged
(`remesh.training.policies`). No training ends because its agent cannot be reached or a request
cannot be read: that is logged, once for each file.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from os.path import abspath, expanduser
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

from remesh.elastic.process_socket import AgentConnection, Observation
from remesh.elastic.process_socket import Request as HoldRequest
from remesh.elastic.progress import RankProgress
from remesh.elastic.stacks import answer_stack_requests
from remesh.errors import AgentLostError, StorageError
from remesh.training.policies import OnRequest, OnSignals, SavePolicy

FileRequest = Literal["save", "save-and-stop"]
"""What a file may ask for: a save, or one after which the training ends."""
Request = FileRequest | HoldRequest
REPORT_SECONDS = 0.25
"""Shortest time between two reports of progress to the agent."""

_SIGNAL = ""
"""This stands for a signal among the files with requests."""

_LOGGER = logging.getLogger("remesh")


class Watch:
    """Takes note of signals (in the main thread alone), reads requests, reports progress."""

    def __init__(self, every: Sequence[SavePolicy], agent_socket: str) -> None:
        self._agent = AgentConnection(agent_socket)
        requests = [policy for policy in every if isinstance(policy, OnRequest)]
        self._files = [abspath(expanduser(policy.file)) for policy in requests]
        self._warned: set[str] = set()
        self._signal = ""
        self._heard: dict[str, str] = {}  # what `asked` returned since `answered`, by file
        self._reported_at = -math.inf
        self._last_step: tuple[int, float] | None = None
        self._own_seconds: float | None = None
        self.step_seconds: float | None = None
        wanted = [n for policy in every if isinstance(policy, OnSignals) for n in policy.signals]
        if wanted and threading.current_thread() is not threading.main_thread():
            raise ValueError("OnSignals needs the main thread; make the manager there")
        self._process, self._is_closed = os.getpid(), False
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._notice) for number in wanted
        }
        # After the signals that count: one of them may be that by which stacks are asked for.
        self._end_answering: Callable[[], None] | None = None
        if self._agent.is_open:
            try:
                self._end_answering = answer_stack_requests(agent_socket)
            except StorageError as error:
                self._warn(agent_socket, error)

    def listen(self) -> None:
        """Take the signals again, where another library has taken them since."""
        for number in self._former:
            signal.signal(number, self._notice)

    def keep_pace(self, step: int, own_seconds: float | None = None) -> None:
        """Note that a step is done, how long it took, and how much of that was this rank's work."""
        now = time.monotonic()
        # Numbers of NumPy are none of JSON.
        self._own_seconds = None if own_seconds is None else float(own_seconds)
        if self._last_step is not None and step > self._last_step[0]:
            self.step_seconds = (now - self._last_step[1]) / (step - self._last_step[0])
        self._last_step = step, now

    def report(
        self, step: int, saved_step: int | None, *, at_once: bool = False, waits: bool = False
    ) -> None:
        """Tell the agent how far the rank is, `at_once` or if the last report is not too recent."""
        self.check_agent()
        now = time.monotonic()
        if self._agent.is_open and (at_once or now - self._reported_at >= REPORT_SECONDS):
            self._reported_at = now
            own = self.step_seconds if self._own_seconds is None else self._own_seconds
            progress = RankProgress(
                step=step, time=now, step_seconds=own, saved_step=saved_step, waits=waits
            )
            self._agent.say(Observation(progress=progress))

    def check_agent(self) -> None:
        """Make sure that this process still has its agent."""
        self._agent.look()
        if self._agent.is_lost:
            raise AgentLostError(
                "the agent (remesh run) that started this process has ended, or has started "
                "another in its place\nThis process ends: the job may go on elsewhere, and two "
                "trainings must not save to one place"
            )

    def asked(
        self, *, holds_state: bool = False, is_saving: bool = False
    ) -> tuple[str, Request | None]:
        """The source of a request for a save, and the request; ("", None) if there is none.

        If the state in memory is as good as a save, a request to wait without one has no source,
        for nothing is to be saved; it waits for a save that is being written.
        """
        if self._signal:
            self._heard[_SIGNAL] = "save-and-stop"
            return f"signal {self._signal}", "save-and-stop"
        for file in self._files:
            request = self._read(file)
            if request is not None:
                self._heard[file] = request
                return f"request in {file}", request
        wanted = self.wanted()
        if wanted == "hold" and holds_state:
            return "", None if is_saving else "hold"
        return ("request of the agent", "save-and-hold") if wanted else ("", None)

    def wanted(self) -> HoldRequest | None:
        """What the agent asks for now."""
        instruction = self._agent.look()
        return None if instruction is None else instruction.request

    def answered(self) -> None:
        """Remove the requests that `asked` returned: the save has begun.

        What came later stays for the next call of `asked`.
        """
        while self._heard:
            source, asked = self._heard.popitem()
            if source == _SIGNAL:
                self._signal = ""
            elif self._read(source) == asked:
                try:
                    Path(source).unlink(missing_ok=True)
                except OSError as error:
                    raise StorageError(
                        f"cannot remove {source}: {error.strerror}; check the directory and its "
                        "permissions"
                    ) from error

    def _read(self, file: str) -> FileRequest | None:
        """The request in a file; None if it is not there, or empty, as while it is written."""
        try:
            text = Path(file).read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(file, f"cannot read {file}: {error.strerror}")
            return None
        for known in get_args(FileRequest):
            if text == known:
                found: FileRequest = known
                return found
        if text:
            names = " or ".join(get_args(FileRequest))
            self._warn(file, f"{file} asks for {text[:40]!r}; write {names} into it, or remove it")
        return None

    def _warn(self, file: str, problem: object) -> None:
        if file not in self._warned:
            self._warned.add(file)
            _LOGGER.warning("%s", problem)

    def close(self) -> None:
        """Put the former handlers of signals back."""
        self._agent.close()
        if self._end_answering is not None:
            self._end_answering()
            self._end_answering = None
        if not self._is_closed:
            self._is_closed = True
            for number, handler in self._former.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        # Another library may put this handler back when it ends. A forked process, such as one of
        # a pool, ends its own by SIGTERM.
        is_forked = number == signal.SIGTERM and os.getpid() != self._process
        if self._is_closed or is_forked:
            signal.signal(number, self._former[signal.Signals(number)] or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        # Only takes note, since it may run between any two lines of the training.
        self._signal = signal.Signals(number).name
