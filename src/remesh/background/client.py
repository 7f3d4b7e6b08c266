"""The client of a background save: stages this rank's share, and has the handle. See `protocol`.

The trainer's thread calls `start`, which takes what may be refused (threads, memory) and changes
nothing outside of this process. When all ranks have started, it calls `stage`, which returns when
the trainer may go on. The rest happens by itself, and the handle shows it. If another rank could
not start, it calls `withdraw` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Literal, Protocol

from remesh.background.protocol import (
    Cancel,
    ChunkFilled,
    ChunkFreed,
    Ended,
    Happened,
    StagingEnded,
    StopStaging,
    ToClient,
    ToServer,
    WriteTask,
)
from remesh.checkpoint.report import SaveReport
from remesh.core.memory import CopyQueue
from remesh.errors import RankFailedError
from remesh.events import Emit
from remesh.formats.framing import Part
from remesh.pipeline import Collection, FileLayout
from remesh.pipeline.arena import Arena
from remesh.pipeline.collect import CollectingStager
from remesh.pipeline.stage import Filled, Stager

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


class Server(Protocol):
    """The server as a client has it: one in this process, or the way to another one."""

    def receive(self, message: ToServer) -> None:
        """Take a message to the server."""
        ...

    def run(self) -> None:
        """Return when the client has been told of the end of the save."""
        ...


class SaveClient:
    """One save on this rank, as its trainer has it.

    `connect` makes the server, given what takes its messages. `on_commit` is told, once the save is
    committed, what this rank has said of its files, and makes the report of it. `collection` is
    what the ranks hold together, if this one collects the tensors of its files.
    """

    def __init__(
        self,
        task: WriteTask,
        url: str,
        layout: FileLayout,
        arena: Arena,
        *,
        connect: Callable[[Callable[[ToClient], None]], Server],
        emit: Emit,
        copies: Callable[[], CopyQueue] | None,
        collection: Collection | None,
        on_commit: Callable[[Sequence[Part]], SaveReport],
    ) -> None:
        self._task = task
        self._arena = arena
        self._emit = emit
        self._on_commit = on_commit
        self._stager = (
            Stager(layout, arena, copies)
            if collection is None
            else CollectingStager(collection, layout, arena, copies)
        )
        self._server = connect(self.receive)
        self._may_run = threading.Event()
        self._lock = threading.Lock()
        self._staged_bytes = 0
        self._written_bytes = 0
        self._kept_bytes = sum(part.num_bytes for part in task.kept)
        self._phase: Phase = "staging"
        self._is_cancelled = False
        self.handle = SaveHandle(url, self._progress, self._cancel)

    def start(self, *, daemon: bool) -> None:
        """Take what may be refused; unless `daemon`, the interpreter waits for the save's end."""
        threading.Thread(target=self._run, name="remesh-save", daemon=daemon).start()

    def withdraw(self, error: BaseException) -> None:
        """End a save that was started, or could not be, before it has begun."""
        self._end(error)
        self._may_run.set()

    def stage(self) -> None:
        """Begin, and copy this rank's share out of the trainer's memory.

        A failure is the save's, and the other ranks are told of it through the storage.
        """
        error: BaseException | None = None

        def begin() -> None:
            self._server.receive(self._task)
            self._may_run.set()

        try:
            self._stager.stage(
                self._hand_over, lambda size: self._see("save.chunk_staged", size), begin
            )
            self._see("save.staged", self._task.num_bytes)
        except BaseException as caught:
            error = caught
            if not isinstance(caught, Exception):
                raise
        finally:
            self._server.receive(StagingEnded(error))
            self._may_run.set()  # also if staging has failed before it began
            with self._lock:
                if self._phase == "staging":
                    self._phase = "writing" if self._task.num_bytes else "committing"

    def receive(self, message: ToClient) -> None:
        """Follow a message of the server."""
        match message:
            case ChunkFreed(slot):
                self._arena.give(self._arena.chunk(slot))
            case StopStaging():
                self._stager.cancel()
            case Happened(point, num_bytes):
                self._see(point, num_bytes)
            case Ended(error, parts):
                self._end(error, parts)

    def _run(self) -> None:
        self._may_run.wait()
        if not self.handle.done():
            self._server.run()

    def _hand_over(self, filled: Filled) -> None:
        self._server.receive(ChunkFilled(filled.number, filled.num_bytes, filled.chunk.slot))

    def _see(self, point: str, num_bytes: int = 0) -> None:
        with self._lock:
            if point == "save.chunk_staged":
                self._staged_bytes += num_bytes
            elif point == "save.chunk_written":
                self._written_bytes += num_bytes
            elif point == "save.file_finished":
                self._phase = "committing"
        self._emit(point, num_bytes)

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
        self._server.receive(Cancel(None))

    def _end(self, error: BaseException | None, parts: Sequence[Part] = ()) -> None:
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

    def _is_by_cancel(self, error: BaseException) -> bool:
        """True if a save has failed because this rank has cancelled it."""
        return (
            isinstance(error, RankFailedError)
            and error.rank == self._task.rank
            and "CancelledError" in error.error_type
        )
