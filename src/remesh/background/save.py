"""The trainer's side of a background save: stages this rank's share, and has the handle.

The trainer's thread calls `start`, which takes what may be refused (threads, memory) and changes
nothing outside of this process. When all ranks have started, it calls `stage`, which returns when
the trainer may go on. The rest happens by itself, and the handle shows it. If another rank could
not start, it calls `withdraw` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Literal

from remesh.background.process import RemoteWriter
from remesh.background.writer import SaveWriter, Trainer, WriteTask
from remesh.checkpoint.report import SaveReport
from remesh.errors import RankFailedError
from remesh.events import Emit
from remesh.formats.writer import Part
from remesh.pipeline.arena import Arena
from remesh.pipeline.stage import Stager
from remesh.pipeline.write import Filled

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
        cancel: Asks the writer to give the save up.
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

    def _let_go(self, progress: Progress) -> None:
        """Keep nothing of the state and the arena once the save has ended. Called by the save."""
        self._progress, self._ask_to_cancel = lambda: progress, lambda: None

    def set_exception(self, exception: BaseException | None) -> None:
        """End the save with an error; with a `CancelledError` as cancelled. Called by the save."""
        if isinstance(exception, CancelledError):
            super().cancel()
            super().set_running_or_notify_cancel()
        else:
            super().set_exception(exception)


class BackgroundSave:
    """One save on this rank, as its trainer has it.

    `on_commit` is called with what this rank has written, once that is committed, and makes the
    report of it.
    """

    def __init__(
        self,
        task: WriteTask,
        url: str,
        stager: Stager,
        arena: Arena,
        emit: Emit,
        on_commit: Callable[[Sequence[Part]], SaveReport],
    ) -> None:
        self._task = task
        self._stager = stager
        self._emit = emit
        self._on_commit = on_commit
        self._writer: SaveWriter | RemoteWriter
        self._may_run = threading.Event()
        self._lock = threading.Lock()
        kept_bytes = sum(part.num_bytes for part in task.kept)
        self._progress = Progress(task.num_bytes, 0, 0, "staging", kept_bytes)
        self._is_cancelled = False
        self.handle = SaveHandle(url, lambda: self._progress, self._cancel)
        self.trainer = Trainer(
            lambda slot: arena.give(arena.chunk(slot)), stager.cancel, self.see, self._end
        )

    def start(self, writer: SaveWriter | RemoteWriter, *, daemon: bool) -> None:
        """Take what may be refused; unless `daemon`, the interpreter waits for the save's end."""
        self._writer = writer
        threading.Thread(target=self._run, name="remesh-save", daemon=daemon).start()

    def withdraw(self, error: BaseException) -> None:
        """End a save that was started, or could not be, before it has begun."""
        self._end(error, ())
        self._may_run.set()

    def stage(self) -> None:
        """Begin, and copy this rank's share out of the trainer's memory.

        A failure is the save's, and the other ranks are told of it through the storage.
        """
        error: BaseException | None = None

        def begin() -> None:
            if isinstance(self._writer, RemoteWriter):
                self._writer.begin()
            self._may_run.set()

        def hand_over(chunks: Iterable[Filled]) -> None:
            for filled in chunks:
                self._writer.fill(filled.number, filled.num_bytes, filled.chunk.slot)
                self.see("save.chunk_staged", filled.num_bytes)

        try:
            self._stager.stage(hand_over, begin)
            self.see("save.staged", self._task.num_bytes)
        except BaseException as caught:
            error = caught
            if not isinstance(caught, Exception):
                raise
        finally:
            self._writer.end_staging(error)
            self._may_run.set()  # also if staging has failed before it began
            with self._lock:
                now = self._progress
                if now.phase == "staging":
                    self._progress = replace(
                        now, phase="writing" if now.num_bytes else "committing"
                    )

    def see(self, point: str, num_bytes: int = 0) -> None:
        """Follow an event of the save."""
        with self._lock:
            now = self._progress
            if point == "save.chunk_staged":
                self._progress = replace(now, staged_bytes=now.staged_bytes + num_bytes)
            elif point == "save.chunk_written":
                self._progress = replace(now, written_bytes=now.written_bytes + num_bytes)
            elif point == "save.file_finished":
                self._progress = replace(now, phase="committing")
        self._emit(point, num_bytes)

    def _end(self, error: BaseException | None, parts: Sequence[Part]) -> None:
        """The save has ended; it fails after all if the saver or its last listener does."""
        report: SaveReport | None = None
        if error is None:
            try:
                report = self._on_commit(parts)
                self._emit("save.done")
            except BaseException as caught:  # noqa: BLE001 - raised by the handle
                error = caught
        with self._lock:
            phase: Phase = "done" if error is None else "failed"
            self._progress = replace(self._progress, phase=phase)
        self.handle._let_go(self._progress)  # noqa: SLF001 - of this module
        if error is None:
            assert report is not None
            self.handle.set_result(report)
        elif self._is_cancelled and self._is_by_cancel(error):
            self.handle.set_exception(CancelledError())
        else:
            self.handle.set_exception(error)

    def _run(self) -> None:
        self._may_run.wait()
        if not self.handle.done():
            self._writer.run()

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._stager.cancel()
        self._writer.cancel(None)

    def _is_by_cancel(self, error: BaseException) -> bool:
        """True if a save has failed because this rank has cancelled it."""
        return (
            isinstance(error, RankFailedError)
            and error.rank == self._task.rank
            and "CancelledError" in error.error_type
        )
