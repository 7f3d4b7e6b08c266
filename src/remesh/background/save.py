"""The trainer's side of a background save: stages this rank's share, and has the handle.

The trainer's thread calls `start`, which takes what may be refused (threads, memory) and changes
nothing outside of this process. When all ranks have started, it calls `stage`, which returns when
the trainer may go on. The rest happens by itself, and the handle shows it. If another rank could
not start, it calls `withdraw` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from remesh.background.handle import Phase, Progress, SaveHandle
from remesh.background.process import RemoteWriter
from remesh.background.writer import SaveWriter, WriteTask
from remesh.checkpoint.report import SaveReport
from remesh.errors import RankFailedError
from remesh.events import Emit
from remesh.formats.framing import Part
from remesh.pipeline.arena import Arena
from remesh.pipeline.stage import Filled, Stager


class BackgroundSave:
    """One save on this rank, as its trainer has it; see `remesh.background.writer.Trainer`.

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
        self._arena = arena
        self._emit = emit
        self._on_commit = on_commit
        self._writer: SaveWriter | RemoteWriter
        self._may_run = threading.Event()
        self._lock = threading.Lock()
        self._staged_bytes = 0
        self._written_bytes = 0
        self._kept_bytes = sum(part.num_bytes for part in task.kept)
        self._phase: Phase = "staging"
        self._is_cancelled = False
        self.handle = SaveHandle(url, self._progress, self._cancel)

    # -----------------------------------------------------------------------------------------
    # Called by the saver
    # -----------------------------------------------------------------------------------------

    def start(self, writer: SaveWriter | RemoteWriter, *, daemon: bool) -> None:
        """Take what may be refused; unless `daemon`, the interpreter waits for the save's end."""
        self._writer = writer
        threading.Thread(target=self._run, name="remesh-save", daemon=daemon).start()

    def withdraw(self, error: BaseException) -> None:
        """End a save that was started, or could not be, before it has begun."""
        self.end(error, ())
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

        def hand_over(filled: Filled) -> None:
            self._writer.fill(filled.number, filled.num_bytes, filled.chunk.slot)

        try:
            self._stager.stage(hand_over, lambda size: self.see("save.chunk_staged", size), begin)
            self.see("save.staged", self._task.num_bytes)
        except BaseException as caught:
            error = caught
            if not isinstance(caught, Exception):
                raise
        finally:
            self._writer.end_staging(error)
            self._may_run.set()  # also if staging has failed before it began
            with self._lock:
                if self._phase == "staging":
                    self._phase = "writing" if self._task.num_bytes else "committing"

    # -----------------------------------------------------------------------------------------
    # Called by the writer
    # -----------------------------------------------------------------------------------------

    def free(self, slot: int) -> None:
        self._arena.give(self._arena.chunk(slot))

    def stop_staging(self) -> None:
        self._stager.cancel()

    def see(self, point: str, num_bytes: int = 0) -> None:
        with self._lock:
            if point == "save.chunk_staged":
                self._staged_bytes += num_bytes
            elif point == "save.chunk_written":
                self._written_bytes += num_bytes
            elif point == "save.file_finished":
                self._phase = "committing"
        self._emit(point, num_bytes)

    def end(self, error: BaseException | None, parts: Sequence[Part]) -> None:
        """The save has ended; it fails after all if the saver or its last listener does."""
        report: SaveReport | None = None
        if error is None:
            try:
                report = self._on_commit(parts)
                with self._lock:
                    self._kept_bytes = report.bytes_kept
                self._emit("save.done")
            except BaseException as caught:  # noqa: BLE001 - raised by the handle
                error = caught
        with self._lock:
            self._phase = "done" if error is None else "failed"
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

    def _progress(self) -> Progress:
        with self._lock:
            return Progress(
                self._task.num_bytes,
                self._staged_bytes,
                self._written_bytes,
                self._phase,
                self._kept_bytes,
            )

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
