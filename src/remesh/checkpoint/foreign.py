"""Saving in the formats of other systems, through the same plan and pipeline.

The ranks agree on who writes what exactly as for remesh's own format. Then every rank frames its
boxes as the format wants them, writes its data files, and rank 0 writes the small files, of which
the last makes the checkpoint exist. Until then no reader of that format finds one.

`prepare` and `finish` are the two ends of this. Between them each rank has file layouts, which can
be written at once or staged first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.arguments import check_order
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.save_plan import PlanCache, RankSavePlan, SaveOptions, make_save_plan
from remesh.checkpoint.saving import options_of
from remesh.checkpoint.sharing import check_arrived
from remesh.checkpoint.stopwatch import timed
from remesh.dtypes import BY_NAME, CarrierDType
from remesh.errors import (
    CheckpointError,
    CheckpointExistsError,
    NotSharedError,
    StateError,
    StorageError,
)
from remesh.events import Emit, OnEvent, emitter, ignore
from remesh.exchange import Exchange, run_joined, run_on_one
from remesh.formats import torch_dcp_writer, zarr
from remesh.formats.building import exists
from remesh.formats.framing import Frame, Grid, Saved, Writer
from remesh.formats.table import Place, read_contents
from remesh.geometry import Box
from remesh.index import BoxTable, decode_columns, encode_columns
from remesh.memory import CarrierArray, HostMemory, Memory
from remesh.pipeline import FileLayout, FilePiece, write_file
from remesh.storage import Storage, open_storage
from remesh.strided import Layout

WRITERS: Mapping[str, Writer] = {
    writer.name: writer
    for writer in (torch_dcp_writer.TORCH_DCP, torch_dcp_writer.TORCH_DIST, zarr.ZARR)
}
"""The formats of other systems that can be written, by name."""

_BYTE = BY_NAME["uint8"]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedMemory:
    """A box of which another memory holds a part; the rest reads as zeros.

    Attributes:
        memory: Holds the elements of `held`.
        held: A box of the tensor.
        box: The box of the tensor that this is the memory of.
    """

    memory: Memory
    held: Box
    box: Box

    @property
    def carrier(self) -> CarrierDType:
        """See `Memory.carrier`."""
        return self.memory.carrier

    @property
    def layout(self) -> Layout | None:
        """See `Memory.layout`."""
        return self.memory.layout

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        """See `Memory.copy_out`."""
        wanted = box.shift(self.box.offset)
        common = wanted.intersect(self.held)
        if common != wanted:
            into[...] = np.zeros((), into.dtype)
        if common is not None:
            part = np.empty(common.shape, into.dtype)
            self.memory.copy_out(common.relative_to(self.held), part)
            into[common.relative_to(wanted).slices] = part

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        """Nothing is read into what is being saved."""
        raise AssertionError(f"{box} of {values.shape} cannot be changed")


@dataclass(frozen=True, slots=True, eq=False)
class ForeignSave:
    """One rank's side of a save, planned.

    Attributes:
        writer: The format.
        storage: Where the checkpoint is going to be.
        files: Name and layout of each data file that this rank writes.
        saved: On rank 0, what it knows of all ranks.
        replaced: On rank 0, files of the checkpoint that is overwritten.
    """

    writer: Writer
    storage: Storage
    files: Sequence[tuple[str, FileLayout]]
    saved: Saved | None
    replaced: tuple[str, ...]


def save_as(
    state: Any,
    path: Any,
    *,
    format: str,  # noqa: A002 - as in `remesh.formats.Source`
    overwrite: bool = False,
    buffers: Buffers | None = None,
    verify_replicas: bool = False,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> None:
    """Save a state in the format of another system. Collective, like `remesh.save`.

    Returns when the checkpoint is there and durable.

    Args:
        state: See `remesh.save`.
        path: Directory of the checkpoint.
        format: A name of `WRITERS`.
        overwrite: Replace a checkpoint of the format that is there. Its data files are removed
            when the new one exists. Unlike in remesh's own format, small files with fixed names
            are replaced one after the other, so who reads in that moment may see some of each.
        buffers: See `remesh.save`.
        verify_replicas: See `remesh.save`.
        group: See `remesh.save`.
        on_event: See `remesh.save`.

    Raises:
        StateError: If there is no such format, or as `remesh.save`.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        NotSharedError: If the ranks do not save to one place that all of them reach.
        StorageError: If the storage fails.
        ExchangeError: If a rank died.
    """
    check_order("save_as", state, path)
    exchange, storage = exchange_of(group), open_storage(path)
    emit = timed(emitter(on_event, exchange.rank), "save", exchange.rank, storage.url)
    options = options_of(overwrite, None, buffers, verify_replicas)
    save = prepare(exchange, storage, state, writer_of(format), options, emit=emit)

    def write() -> bytes:
        for name, layout in save.files:
            emit("save.file_created", layout.num_bytes)
            write_file(storage, name, layout, lambda size: emit("save.chunk_written", size))
            emit("save.file_finished", layout.num_bytes)
        storage.sync()
        return b""

    def join(_replies: list[bytes]) -> list[bytes]:
        finish(save, emit)
        return [b""] * exchange.world_size

    try:
        run_joined(exchange, write, join, lambda: give_up(save))
    except NotSharedError:
        remove_own(save)
        raise
    emit("save.done")


def writer_of(name: str) -> Writer:
    """The writer of a format.

    Raises:
        StateError: If there is none.
    """
    if name not in WRITERS:
        raise StateError(f"format {name!r} cannot be written; known are {', '.join(WRITERS)}")
    return WRITERS[name]


def prepare(
    exchange: Exchange,
    storage: Storage,
    state: Any,
    writer: Writer,
    options: SaveOptions,
    *,
    emit: Emit,
) -> ForeignSave:
    """Agree on who writes what, and lay out this rank's files. Collective.

    Raises:
        StateError: As `remesh.save`.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        NoSpaceError: If there is too little room.
    """
    replaced = run_on_one(
        exchange, lambda: msgspec.msgpack.encode(_replaced(storage, writer, options.overwrite))
    )
    mine = make_save_plan(exchange, storage, state, options, cache=PlanCache(), emit=emit)
    boxes, grid = _own_boxes(exchange, mine, writer)
    frames = writer.frames(boxes, exchange.rank, mine.save_id, grid)
    saved = None
    if mine.global_plan is not None:
        agreed = mine.global_plan
        saved = Saved(mine.save_id, agreed.boxes, agreed.assignments, agreed.document, grid)
    return ForeignSave(
        writer,
        storage,
        [(frame.path, _layout(frame, boxes, mine.layout)) for frame in frames],
        saved,
        tuple(msgspec.msgpack.decode(replaced, type=list[str])),
    )


def _replaced(storage: Storage, writer: Writer, overwrite: bool) -> list[str]:
    """Data files of a checkpoint of the format that is there."""
    if not exists(storage, writer.mark):
        return []
    if not overwrite:
        raise CheckpointExistsError(
            f"{storage.url}: there is a checkpoint already ({writer.mark}). Save to another path, "
            "or pass overwrite=True to replace it."
        )
    if writer.name == zarr.NAME:
        raise StateError(
            f"{storage.url}: a zarr checkpoint cannot be replaced in place, because its files have "
            "fixed names; save to another path"
        )
    try:
        return [file.path for file in read_contents(Place(storage)).index.files]
    except (CheckpointError, StateError):
        return []  # What it refers to is unknown; what lies there harms nobody.


def _own_boxes(exchange: Exchange, mine: RankSavePlan, writer: Writer) -> tuple[BoxTable, Grid]:
    """The boxes that this rank writes, in the order of its layout, and the grid of all."""

    def tell(_replies: list[bytes]) -> list[bytes]:
        plan = mine.on_rank_0.boxes
        grid = writer.grid(plan)
        return [
            msgspec.msgpack.encode((encode_columns(_rows(plan, rows).columns()), grid))
            for rows in mine.on_rank_0.assignments
        ]

    told = run_joined(exchange, lambda: b"", tell)
    encoded, grid = msgspec.msgpack.decode(told, type=tuple[bytes, dict[str, list[int]]])
    columns, _ = decode_columns(encoded, "boxes")
    return BoxTable.from_columns(columns), grid


def _rows(boxes: BoxTable, rows: Any) -> BoxTable:
    return BoxTable(boxes.tensors, boxes.tensor[rows], boxes.offsets[rows], boxes.extents[rows])


def _layout(frame: Frame, boxes: BoxTable, own: FileLayout) -> FileLayout:
    """The layout of a framed file.

    Args:
        frame: What lies where in it.
        boxes: The boxes that this rank writes.
        own: Where each of them is in memory, in the same order.
    """
    pieces = [
        FilePiece(HostMemory(np.frombuffer(data, np.uint8)), (len(data),), _BYTE, position)
        for position, data in frame.fillers
        if data
    ]
    for piece in frame.pieces:
        source, whole = own.pieces[piece.row], boxes.box(piece.row)
        memory = source.memory
        if piece.box != whole:
            memory = PaddedMemory(memory, whole, piece.box)
        pieces.append(FilePiece(memory, piece.box.shape, source.dtype, piece.position))
    pieces.sort(key=lambda piece: piece.position)
    return FileLayout(b"", pieces, [piece.position for piece in pieces], frame.num_bytes)


def finish(save: ForeignSave, emit: Emit) -> None:
    """Rank 0, when all data files are durable: make the checkpoint exist.

    Args:
        save: Its side of the save.
        emit: Told of the moments from `save.parts_gathered` to `save.committed`.

    Raises:
        NotSharedError: If data files of other ranks are not there.
        StorageError: If the storage fails.
    """
    storage, frames = save.storage, _all_frames(save)
    emit("save.parts_gathered", sum(frame.num_bytes for _, frame in frames))
    try:
        if frames and frames[-1][0] > 0:
            check_arrived(
                storage, "", ((rank, frame.path, frame.num_bytes) for rank, frame in frames)
            )
        assert save.saved is not None
        *others, (mark, content) = save.writer.small_files(save.saved)
        for name, data in others:
            storage.put(name, data, overwrite=True)
        storage.sync()
        emit("save.before_commit")
    except BaseException:
        give_up(save)
        raise
    storage.put(mark, content, overwrite=True)
    emit("save.committed")
    _remove(storage, save.replaced)


def give_up(save: ForeignSave) -> None:
    """Rank 0, when a rank has failed: remove the data files of all."""
    _remove(save.storage, [frame.path for _, frame in _all_frames(save)])


def remove_own(save: ForeignSave) -> None:
    """Remove the data files of this rank, where rank 0 does not see them."""
    _remove(save.storage, [name for name, _ in save.files])


def _all_frames(save: ForeignSave) -> list[tuple[int, Frame]]:
    """The data files of all ranks, each with its rank, as each of them has planned its own."""
    saved = save.saved
    assert saved is not None
    return [
        (rank, frame)
        for rank, rows in enumerate(saved.assignments)
        for frame in save.writer.frames(_rows(saved.boxes, rows), rank, saved.save_id, saved.grid)
    ]


def _remove(storage: Storage, names: Sequence[str]) -> None:
    """Remove files of no checkpoint, as far as the storage can."""
    for name in names:
        with suppress(StorageError):
            storage.delete(name)
