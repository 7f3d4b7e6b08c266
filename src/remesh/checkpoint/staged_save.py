"""One asynchronous save on this rank: a stager here, and its writer in a thread or a process.

The trainer's thread calls `start`, which takes what may be refused (threads, memory) and changes
nothing outside of this process. When all ranks have started, it calls `stage`, which returns when
the trainer may go on. The rest happens by itself, and the handle tells of it. If another rank could
not start, it calls `withdraw` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

from remesh.checkpoint.background import Background, Task, bury
from remesh.checkpoint.handle import SaveHandle, Status
from remesh.checkpoint.wire import Begin, Cancel, Handed, Staged, encode_coordination
from remesh.checkpoint.writer_process import WriterProcess
from remesh.errors import ExchangeError, RankFailedError
from remesh.events import Emit
from remesh.exchange import decode_failure, encode_failure
from remesh.memory import CopyQueue
from remesh.pipeline import FileLayout
from remesh.pipeline.arena import Arena, Chunk
from remesh.pipeline.stage import Filled, StagedWriter, Stager


class StagedSave:
    """What both kinds have in common.

    Args:
        task: What this rank has to do.
        layout: What its file holds.
        arena: Where it is staged.
        emit: Told of the moments of the save.
        copies: See `Stager`.
    """

    def __init__(
        self,
        task: Task,
        layout: FileLayout,
        arena: Arena,
        *,
        emit: Emit,
        copies: Callable[[], CopyQueue] | None,
    ) -> None:
        self._task = task
        self._arena = arena
        self._emit = emit
        self._status = Status(task.storage.url, task.num_bytes)
        self._stager = Stager(layout, arena, self._hand_over, copies)
        self.handle = SaveHandle(self._status, self._cancel)

    def start(self, *, daemon: bool) -> None:
        """Take what may be refused; unless `daemon`, the interpreter waits for the save's end."""
        raise NotImplementedError

    def withdraw(self, error: BaseException) -> None:
        """End a save that was started, or could not be, before it has begun."""
        self._end(error)

    def stage(self) -> None:
        """Begin, and copy this rank's share out of the trainer's memory.

        A failure is the save's, and the other ranks are told of it through the storage.
        """
        error: BaseException | None = None
        try:
            self._begin()
            if self._task.path:
                self._stager.stage(lambda size: self._see("save.chunk_staged", size))
            self._see("save.staged", self._task.num_bytes)
        except BaseException as caught:
            error = caught
            if not isinstance(caught, Exception):
                raise
        finally:
            self._end_staging(error)
            self._status.end_staging()

    def _see(self, point: str, num_bytes: int = 0) -> None:
        self._status.see(point, num_bytes)
        self._emit(point, num_bytes)

    def _end(self, error: BaseException | None) -> None:
        """The save has ended, unless its last listener fails."""
        if error is None:
            try:
                self._emit("save.done")
            except BaseException as caught:  # noqa: BLE001 - raised by whoever waits
                error = caught
        self._status.end(error)

    def _begin(self) -> None:
        raise NotImplementedError

    def _hand_over(self, filled: Filled) -> None:
        raise NotImplementedError

    def _end_staging(self, error: BaseException | None) -> None:
        raise NotImplementedError

    def _cancel(self) -> None:
        raise NotImplementedError


class SaveInThread(StagedSave):
    """A save that a thread of this process writes; arguments are those of `StagedSave`."""

    def __init__(
        self,
        task: Task,
        layout: FileLayout,
        arena: Arena,
        *,
        emit: Emit,
        copies: Callable[[], CopyQueue] | None,
    ) -> None:
        super().__init__(task, layout, arena, emit=emit, copies=copies)
        self._writer = StagedWriter(arena.give, at_once=not self._stager.finds_room)
        self._background = Background(task, self._writer, self._see, self._stager.cancel)
        self._may_begin = threading.Event()

    def start(self, *, daemon: bool) -> None:
        """See `StagedSave.start`."""
        threading.Thread(target=self._run, name="remesh-save", daemon=daemon).start()

    def withdraw(self, error: BaseException) -> None:
        """See `StagedSave.withdraw`."""
        super().withdraw(error)
        self._may_begin.set()

    def _begin(self) -> None:
        self._may_begin.set()

    def _run(self) -> None:
        self._may_begin.wait()
        if not self._status.ended.is_set():
            self._end(self._background.run())

    def _hand_over(self, filled: Filled) -> None:
        self._writer.put(filled)

    def _end_staging(self, error: BaseException | None) -> None:
        self._background.end_staging(error)
        self._may_begin.set()  # also if staging has failed before it began

    def _cancel(self) -> None:
        self._background.cancel()


class SaveInProcess(StagedSave):
    """A save that a writer process writes; a `writer_process.Remote`.

    Args:
        place: Path or URL of the checkpoint, as the process opens it.
        process: The process; the arena is the one that it has.

    The others are those of `StagedSave`.
    """

    def __init__(
        self,
        task: Task,
        layout: FileLayout,
        arena: Arena,
        *,
        emit: Emit,
        copies: Callable[[], CopyQueue] | None,
        place: str,
        process: WriterProcess,
    ) -> None:
        super().__init__(task, layout, arena, emit=emit, copies=copies)
        self._place = place
        self._process = process
        self._number = -1
        self._lock = threading.Lock()
        self._lent: dict[int, Chunk] = {}
        self._is_lost = False
        self._is_cancelled = False
        self._own_error: BaseException | None = None
        self._coordination: bytes | None = None

    def start(self, *, daemon: bool) -> None:
        """See `StagedSave.start`."""
        save = self._task.coordination
        self._coordination = None if save is None else encode_coordination(save)
        threading.Thread(target=self._status.ended.wait, name="remesh-save", daemon=daemon).start()

    def _begin(self) -> None:
        """Tell the process. If it cannot be told, it is as good as dead."""
        try:
            self._process.begin(self, self._first_message)
        except BaseException as error:
            self._end(bury(self._task, error))
            raise

    def free(self, slot: int) -> None:
        """See `Remote.free`."""
        with self._lock:
            chunk = self._lent.pop(slot)
        self._arena.give(chunk)

    def stop_staging(self) -> None:
        """See `Remote.stop_staging`."""
        self._stager.cancel()

    def tell(self, point: str, num_bytes: int) -> None:
        """See `Remote.tell`. A listener that fails gives the save up, if it still can be."""
        try:
            self._see(point, num_bytes)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            if self._own_error is None:
                self._own_error = error
                failure = encode_failure(self._task.rank, error)
                self._process.send(Cancel(self._number, failure))

    def end(self, failure: bytes | None) -> None:
        """See `Remote.end`."""
        error = self._own_error
        if error is None and failure is not None:
            error = decode_failure(failure)
            cancelled = isinstance(error, RankFailedError) and "CancelledError" in error.error_type
            if cancelled and self._is_cancelled and error.rank == self._task.rank:
                error = CancelledError(f"the save to {self._task.storage.url} was cancelled")
        self._end(error)

    def lose(self, error: ExchangeError) -> None:
        """See `Remote.lose`."""
        with self._lock:
            self._is_lost = True
            chunks = list(self._lent.values())
            self._lent.clear()
        for chunk in chunks:
            self._arena.give(chunk)
        self._stager.cancel()
        lost = ExchangeError(f"rank {self._task.rank}, {self._place}: {error}")
        self._end(bury(self._task, lost))

    def _first_message(self, number: int) -> Begin:
        self._number = number
        task = self._task
        return Begin(
            number,
            self._place,
            task.save_id,
            task.rank,
            task.num_ranks,
            task.deadline,
            task.report_seconds,
            task.path,
            task.num_bytes,
            task.positions,
            not self._stager.finds_room,
            self._coordination,
        )

    def _hand_over(self, filled: Filled) -> None:
        with self._lock:
            is_lost = self._is_lost
            if not is_lost:
                self._lent[filled.chunk.slot] = filled.chunk
        if is_lost:
            self._arena.give(filled.chunk)
        else:
            slot = filled.chunk.slot
            self._process.send(Handed(self._number, filled.number, filled.num_bytes, slot))

    def _end_staging(self, error: BaseException | None) -> None:
        failure = None
        if error is not None:
            self._own_error = error
            failure = encode_failure(self._task.rank, error)
        self._process.send(Staged(self._number, failure))

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._stager.cancel()
        self._process.send(Cancel(self._number, None))
