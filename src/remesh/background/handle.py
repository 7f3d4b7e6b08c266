"""The handle of a background save."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Literal

from remesh.checkpoint.report import SaveReport

Phase = Literal["staging", "writing", "committing", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of this rank's part of a save."""

    num_bytes: int
    """Bytes that this rank writes."""
    staged_bytes: int
    """Bytes that are copied out of the trainer's memory."""
    written_bytes: int
    """Bytes that are written."""
    phase: Phase
    """The current phase, or the result of the save."""
    kept_bytes: int = 0
    """Bytes of files that did not change since the save before, which it does not write."""


class SaveHandle(Future[SaveReport]):
    """A save that is under way, made by `save_async`: a `concurrent.futures.Future`.

    `result` returns when the checkpoint is committed and durable, and raises why the save failed,
    which leaves the previous checkpoint untouched. Callbacks run in the thread that ends the save.

    Args:
        url: Where the checkpoint goes.
        progress: How far the save is.
        cancel: Asks the server to give the save up.
    """

    def __init__(
        self, url: str, progress: Callable[[], Progress], cancel: Callable[[], None]
    ) -> None:
        super().__init__()
        self._url = url
        self._progress = progress
        self._ask_to_cancel = cancel

    def __repr__(self) -> str:
        return f"SaveHandle({self._url!r}, {self._progress().phase})"

    @property
    def url(self) -> str:
        """Where the checkpoint goes."""
        return self._url

    @property
    def staged(self) -> bool:
        """True if the trainer may change its state, as always once `save_async` has returned."""
        return self._progress().phase != "staging"

    def progress(self) -> Progress:
        """How far this rank's part is."""
        return self._progress()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed and durable.

        Returns:
            What this rank wrote, and how long the save took.

        Raises:
            TimeoutError: If `timeout` seconds pass before.
            concurrent.futures.CancelledError: If the save was cancelled on this rank.
            RemeshError: Why it failed; the previous checkpoint is untouched.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise
            text = f"the save to {self._url} has not ended: {self._progress()}"
            raise TimeoutError(text) from None

    def running(self) -> bool:
        """True if the save has not ended."""
        return not self.done()

    def cancel(self) -> bool:
        """Ask all ranks to give the save up, which may be too late: then it is committed.

        As for an `asyncio.Task`, the save has not ended when this returns. If it ends because of
        this, `cancelled` is true then. On other ranks it fails with a `RankFailedError`.

        Returns:
            Whether the save had not ended, or was cancelled before.
        """
        if self.done():
            return self.cancelled()
        self._ask_to_cancel()
        return True

    def set_exception(self, exception: BaseException | None) -> None:
        """End the save with an error; with a `CancelledError` as cancelled. Called by the save."""
        if isinstance(exception, CancelledError):
            super().cancel()
            super().set_running_or_notify_cancel()
        else:
            super().set_exception(exception)
