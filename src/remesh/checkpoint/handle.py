"""A save that is under way, as the trainer sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank's part of a save is.

    Attributes:
        num_bytes: Bytes that this rank writes.
        staged_bytes: Bytes that are copied out of the trainer's memory.
        written_bytes: Bytes that are written.
        phase: `staging`, `writing`, `committing`, `done` or `failed`.
    """

    num_bytes: int
    staged_bytes: int
    written_bytes: int
    phase: str


class Status:
    """How a save stands on this rank; learnt from its moments, read through its handle.

    Args:
        url: Where the save goes.
        num_bytes: Bytes that this rank writes.
    """

    def __init__(self, url: str, num_bytes: int) -> None:
        self.url = url
        self.num_bytes = num_bytes
        self.staged = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._staged_bytes = 0
        self._written_bytes = 0
        self._phase = "staging"

    def see(self, point: str, num_bytes: int) -> None:
        """Take note of a moment of the save (see `remesh.events.SAVE_POINTS`)."""
        with self._lock:
            if point == "save.chunk_staged":
                self._staged_bytes += num_bytes
            elif point == "save.chunk_written":
                self._written_bytes += num_bytes
            elif point == "save.file_finished":
                self._phase = "committing"

    def end_staging(self) -> None:
        """The trainer may change its state."""
        with self._lock:
            if self._phase == "staging":
                self._phase = "writing" if self.num_bytes else "committing"
        self.staged.set()

    def end(self, error: BaseException | None) -> None:
        """The save has ended, well or with an error."""
        self.error = error
        with self._lock:
            self._phase = "done" if error is None else "failed"
        self.ended.set()

    def progress(self) -> Progress:
        """How far it is."""
        with self._lock:
            return Progress(self.num_bytes, self._staged_bytes, self._written_bytes, self._phase)


class SaveHandle:
    """A save that is under way; made by `Saver.save_async`."""

    def __init__(self, status: Status, cancel: Callable[[], None]) -> None:
        self._status = status
        self._cancel = cancel

    def __repr__(self) -> str:
        return f"SaveHandle({self._status.url!r}, {self.progress().phase})"

    @property
    def url(self) -> str:
        """Where the checkpoint goes."""
        return self._status.url

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the trainer may change its state; False if `timeout` seconds pass before."""
        return self._status.staged.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed and durable.

        Raises:
            TimeoutError: If `timeout` seconds pass before.
            concurrent.futures.CancelledError: If the save was cancelled on this rank.
            RemeshError: Why it failed; the previous checkpoint is untouched.
        """
        if not self._status.ended.wait(timeout):
            raise TimeoutError(f"the save to {self._status.url} has not ended: {self.progress()}")
        if self._status.error is not None:
            raise self._status.error

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended, well or not; False if `timeout` seconds pass before."""
        return self._status.ended.wait(timeout)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._status.ended.is_set()

    def exception(self) -> BaseException | None:
        """Why the save failed, or None if it has not ended or ended well."""
        return self._status.error

    def cancel(self) -> bool:
        """Give the save up on all ranks, unless it has ended; returns whether it had not.

        The save may still be committed if every rank had finished its part by then.
        """
        if self._status.ended.is_set():
            return False
        self._cancel()
        return True

    def progress(self) -> Progress:
        """How far this rank's part is."""
        return self._status.progress()
