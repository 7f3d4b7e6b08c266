"""The writing side of a background save: writes what is staged, and sees the save to its end.

It writes the chunks that the trainer's side stages, makes the files durable and commits them with
those of the other ranks, as every save does (`remesh.checkpoint.commit`), by `status_files`.

It runs in a thread of the trainer, or in a process of its own (`process`), which has the trainer's
arena and never imports torch. So nothing here knows of tensors or of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial

from remesh.background.status_files import Participant, StatusFiles
from remesh.checkpoint.agree import GlobalSavePlan
from remesh.checkpoint.commit import commit, encode_parts
from remesh.checkpoint.unchanged import remove_paths
from remesh.events import Emit
from remesh.exchange import Outcome
from remesh.formats.writer import Part, as_written
from remesh.pipeline import StreamFiles
from remesh.pipeline.arena import Chunk
from remesh.pipeline.stage import StagedChunks, write_staged
from remesh.pipeline.write import Filled
from remesh.storage import Storage


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WriteTask(Participant):
    """The task of one rank, with all that ends the save."""

    place: str  # where the save goes, as another process opens it
    files: StreamFiles  # the data files that this rank writes
    num_bytes: int  # size of the stream that they are cut from
    parts: Sequence[Part]  # what this rank will say of them, without digests
    kept: Sequence[Part]  # what it says of files that did not change, which are there already
    at_once: bool  # whether writing begins with the first chunk, and not when all are staged
    global_plan: GlobalSavePlan | None  # on rank 0, what it knows of the save


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a writer tells the trainer's side."""

    free: Callable[[int], None]  # a slot of the arena is free again
    stop_staging: Callable[[], None]  # the files are given up
    see: Emit  # an event of `remesh.events.SAVE_POINTS`; what it raises fails the save
    end: Callable[[BaseException | None, Sequence[Part]], None]
    """The save has failed, or is committed; then the parts say what this rank wrote."""


class SaveWriter:
    """One save on one rank: `run` does it in a thread; the rest is called meanwhile.

    `chunk` finds the chunk in a slot.
    """

    def __init__(
        self,
        task: WriteTask,
        storage: Storage,
        chunk: Callable[[int], Chunk],
        trainer: Trainer,
    ) -> None:
        self.task = task
        self._storage = storage
        self._chunk = chunk
        self._trainer = trainer
        self._status = StatusFiles(storage, task)
        self._staged = StagedChunks(
            lambda chunk: trainer.free(chunk.slot), trainer.stop_staging, at_once=task.at_once
        )
        self.staged = self._staged.ended  # the trainer stages no more, well or not

    def fill(self, number: int, num_bytes: int, slot: int) -> None:
        """Chunk `number` of the stream is in a slot of the arena."""
        self._staged.put(Filled(number, num_bytes, self._chunk(slot)))

    def end_staging(self, error: BaseException | None) -> None:
        """No further chunk comes; the error says why, if not all is staged."""
        self._staged.end(error)

    def cancel(self, error: BaseException | None) -> None:
        """Give the save up, because of an error if there is one."""
        error = error or CancelledError(f"the save to {self._storage.url} was cancelled")
        self._status.give_up(error)
        self._staged.cancel(error)

    def run(self) -> None:
        """See the save through to its end, and tell the trainer's side of it."""
        try:
            parts = self.save()
        except BaseException as error:  # noqa: BLE001 - raised by the handle
            self._trainer.end(error, ())
        else:
            self._trainer.end(None, parts)

    def save(self) -> list[Part]:
        """Write, and see the save through to its end; what this rank wrote."""
        task = self.task
        with Outcome() as written:
            parts = self._write()
            written.reply = encode_parts(parts)
        try:
            join = partial(self._status.join_outcomes, written)
            commit(join, self._storage, task.global_plan, self._trainer.see)
        except BaseException as error:
            if not self._status.has_begun:
                self._status.report(error)
            if not (task.rank == 0 or self._status.is_counted):
                kept = [part.path for part in task.kept]
                remove_paths(self._storage, [*task.files.paths, *kept])
            raise
        return parts

    def _write(self) -> list[Part]:
        """Write this rank's files; what it says of them."""
        task = self.task
        if not task.files.paths:
            self._staged.stage(list)  # others may still collect from here
            self._status.check()
            self._storage.sync()
            return list(task.kept)
        written = write_staged(
            self._storage,
            task.files,
            task.num_bytes,
            self._staged,
            on_chunk=partial(self._trainer.see, "save.chunk_written"),
            begin=partial(self._trainer.see, "save.file_created", task.num_bytes),
        )
        self._status.check()
        self._storage.sync()
        self._trainer.see("save.file_finished", task.num_bytes)
        return [*task.kept, *map(as_written, task.parts, written)]
