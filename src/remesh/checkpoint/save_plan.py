"""The plan of one rank in a save, made on each rank when all have agreed who writes what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from remesh.checkpoint.agree import Agreement
from remesh.checkpoint.collecting import lay_out_collected
from remesh.checkpoint.local import finish_device_work
from remesh.checkpoint.stream_layout import RankStream, lay_out
from remesh.checkpoint.unchanged import (
    FileSource,
    History,
    OwnFile,
    keep_files,
    own_files,
    remove_paths,
    sources_of,
)
from remesh.core.tables import BoxTable
from remesh.exchange import Exchange, run_on_all
from remesh.formats.framing import Frame, Part, Writer
from remesh.formats.table import writer_of
from remesh.formats.whole_tensors import decode_files
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class RankSavePlan:
    """The part of one rank in a save."""

    agreed: Agreement  # what the ranks have agreed on
    stream: RankStream  # what this rank writes
    files: tuple[OwnFile, ...] = ()  # all files of this rank, if files may be kept
    kept: tuple[Part, ...] = ()
    """What it says of those that did not change, which are there already."""
    history: History = field(default_factory=History)  # what it knew of the last save

    @property
    def paths(self) -> tuple[str, ...]:
        """All data files of this rank."""
        return (*(part.path for part in self.kept), *self.stream.files.paths)

    def remove_kept(self, storage: Storage) -> None:
        """Remove what is there already, if the save is given up before it has begun."""
        remove_paths(storage, [part.path for part in self.kept])

    @property
    def sources(self) -> list[FileSource]:
        """Files of the last checkpoint that files of the stream may be."""
        of_path = {file.frame.path: file for file in self.files}
        return sources_of(self.history, [of_path[path] for path in self.stream.files.paths])

    def committed(self, storage: Storage, parts: Sequence[Part]) -> History:
        """The history after this save is committed, given what this rank said of it."""
        if not (self.files and parts):  # a writer process that died after the commit said nothing
            return self.history
        num_bytes = self.agreed.tensors.boxes.num_bytes
        return self.history.after(storage, self.files, parts, num_bytes)


def plan_rank(
    exchange: Exchange, storage: Storage, agreed: Agreement, history: History
) -> RankSavePlan:
    """Lay out this rank's files, and keep those that did not change since the save before."""
    # All of them: a live reshard reads also what other ranks' files hold.
    finish_device_work(agreed.tensors.memories)
    options, tensors, rows = agreed.options, agreed.tensors, agreed.rows
    writer = writer_of(options.format)
    if options.keeps and writer.has_digests:
        return _plan_files(storage, agreed, writer, history)

    def frames_of(boxes: BoxTable) -> Sequence[Frame]:
        return writer.frames(boxes, rows, agreed.rank, agreed.save_id, agreed.grid)

    if not agreed.holders:
        frames = frames_of(tensors.boxes)
        return RankSavePlan(agreed, lay_out(frames, tensors, compress=options.compress))
    stream = lay_out_collected(frames_of, tensors, rows, agreed.holders, exchange)
    is_final = decode_files(agreed.grid).names == "final"
    files = replace(stream.files, replaces=is_final and options.overwrite)
    return RankSavePlan(agreed, replace(stream, files=files))


def _plan_files(storage: Storage, agreed: Agreement, writer: Writer, last: History) -> RankSavePlan:
    """Lay out the files of this rank but those that did not change."""
    options, tensors = agreed.options, agreed.tensors
    history = last.of_layout(agreed.layout, tensors.is_frozen)
    place = (agreed.rank, agreed.save_id, agreed.grid)
    files = own_files(writer, tensors, agreed.rows, history.group, place)
    kept = keep_files(storage, history, files, tensors, at_once=options.meets)
    there = {part.path for part in kept}
    left = [file for file in files if file.frame.path not in there]
    stream = lay_out(
        [file.frame for file in left],
        tensors,
        [file.numbers for file in left],
        CHUNK_SIZE,
        options.compress,
    )
    return RankSavePlan(agreed, stream, tuple(files), tuple(kept), history)


def plan_on_all(
    exchange: Exchange, storage: Storage, agreed: Agreement, history: History
) -> RankSavePlan:
    """`plan_rank` on every rank; all raise the failure of one. Collective."""
    planned: list[RankSavePlan] = []

    def plan() -> bytes:
        planned.append(plan_rank(exchange, storage, agreed, history))
        return b""

    try:
        run_on_all(exchange, plan)
    except BaseException:
        for mine in planned:
            mine.remove_kept(storage)
        raise
    return planned[0]
