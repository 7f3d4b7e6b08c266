"""Frozen tensors that did not change since the save before are not written again.

A state declares what is frozen: parameters that need no gradient. On each rank they have data files
of their own, and a `Saver` keeps a `History`: these files of the last committed save, with the
digests of their blocks.

When a save is planned, each of its frozen files that the last save has as well, with the same
pieces, is digested where it lies in the trainer's memory, up to the first block that differs. If
none does, the storage is asked to copy the file from the last checkpoint (`Storage.copy_from`): a
hard link or a copy on the server. Where that cannot be done (another file system, a checkpoint that
was removed, a store without copies) the file is written. So a checkpoint always has all of its
files. A copy on the server takes as long as a trainer would wait for staging or longer, so a
background save makes hard links alone.

Digests decide, and not versions of tensors or what a framework says, because memory may be changed
in many ways. Whether the stored file still has these digests is not read again: damage to a file
that several checkpoints share is damage to all of them, and every load finds it. A process has no
history when it starts, so its first save writes everything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from remesh.checkpoint.local import LocalTensors
from remesh.checkpoint.stream_layout import lay_out
from remesh.core.geometry import IntArray
from remesh.core.integrity import raw_digest
from remesh.errors import CheckpointNotFoundError, StorageError
from remesh.formats.framing import Frame, Grid, Part, Writer, as_written
from remesh.formats.native import data_path
from remesh.pipeline import has_digests
from remesh.pipeline.source import stored_copies
from remesh.storage import Storage

MIN_BYTES = 4 << 20
"""Bytes of frozen tensors; less is written with what changes."""

MAX_BYTES = 1 << 30
"""Bytes of a file of them: stores copy one with a request, in seconds; S3 up to 5 GiB."""

_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True, eq=False)
class OwnFile:
    """A data file of this rank."""

    frame: Frame  # what it is; the rows are those of the rank's boxes
    numbers: IntArray  # numbers of its boxes in the rank's assignment
    is_frozen: bool  # whether it holds frozen tensors
    key: bytes  # digest of its header: equal for files of equal pieces


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The knowledge of this rank about the last committed save."""

    layout: bytes = b""  # fingerprint of the rank's boxes
    storage: Storage | None = None  # where the save is; None if there was none
    parts: Mapping[bytes, Part] = field(default_factory=dict)  # its frozen files, by their keys

    @classmethod
    def after(
        cls, layout: bytes, storage: Storage, files: Sequence[OwnFile], parts: Sequence[Part]
    ) -> History:
        """The history once a save is committed, given what this rank said of its files."""
        of_path = {part.path: part for part in parts}
        known = {file.key: of_path.get(file.frame.path) for file in files if file.is_frozen}
        # A writer process that died after the commit said nothing.
        return cls(layout, storage, {key: part for key, part in known.items() if part is not None})

    def num_bytes_to_keep(self, layout: bytes) -> int:
        """Bytes that a save of these boxes will probably not write."""
        return sum(part.num_bytes for part in self.parts.values() if layout == self.layout)


def own_files(
    writer: Writer, tensors: LocalTensors, rows: IntArray, place: tuple[int, str, Grid]
) -> list[OwnFile]:
    """The data files of a rank that writes some rows: what changes, and what is frozen.

    The place is the number of the rank, the save's id, and the grid.
    """
    rank, save_id, grid = place
    is_frozen, sizes = tensors.is_frozen[rows], tensors.boxes.num_bytes[rows]
    frozen_sizes = np.where(is_frozen, sizes, 0)
    if frozen_sizes.sum() < MIN_BYTES:
        is_frozen = np.zeros_like(is_frozen)
    cuts = np.where(is_frozen, 1 + (np.cumsum(frozen_sizes) - frozen_sizes) // MAX_BYTES, 0)
    # Number 0 is the file of what changes, whether there is one or not.
    first = int(is_frozen.all())
    files: list[OwnFile] = []
    for number, cut in enumerate(np.unique(cuts).tolist(), first):
        numbers = np.flatnonzero(cuts == cut)
        [frame] = writer.frames(tensors.boxes, rows[numbers], rank, save_id, grid)
        frame = replace(frame, path=data_path(save_id, rank, number))
        files.append(OwnFile(frame, numbers, cut > 0, raw_digest(frame.fillers[0][1])))
    return files


def keep_files(
    storage: Storage,
    history: History,
    files: Sequence[OwnFile],
    tensors: LocalTensors,
    *,
    at_once: bool,
) -> list[Part]:
    """Let the storage copy the files that did not change; what the rank says of them then.

    With `at_once` only copies are made that take no time.
    """
    kept: list[Part] = []
    if storage.copying == "none" or (at_once and storage.copying != "at once"):
        return kept
    try:
        for file in files:
            source = history.parts.get(file.key)
            if source is not None and _keep(storage, history.storage, source, file, tensors):
                stream = lay_out([file.frame], tensors, [file.numbers])
                part = as_written(stream.parts[0], source.written)
                kept.append(msgspec.structs.replace(part, is_kept=True))
    except BaseException:
        remove_paths(storage, [part.path for part in kept])
        raise
    return kept


def _keep(
    storage: Storage,
    last: Storage | None,
    part: Part,
    file: OwnFile,
    tensors: LocalTensors,
) -> bool:
    """Let the storage copy a file, unless it changed or cannot be had."""
    assert last is not None
    try:
        is_there = last.size(part.path) == part.stored_size
    except (CheckpointNotFoundError, StorageError) as error:
        _LOGGER.debug("%s is written again: %s", file.frame.path, error)
        return False
    layout = lay_out([file.frame], tensors).layout
    copies = stored_copies(tensors.memories)
    return (
        is_there
        and has_digests(layout, part.written.digests, copies)
        and storage.copy_from(last, part.path, file.frame.path, part.stored_size)
    )


def remove_paths(storage: Storage, paths: Sequence[str]) -> None:
    """Remove files of no checkpoint, as far as the storage can."""
    with suppress(StorageError):
        storage.delete_many(paths)
