"""Frozen tensors that did not change since the save before are not written again.

A state declares what is frozen: parameters that need no gradient. On each rank they have a data
file of their own, and a `Saver` keeps a `History`: this file of the last committed save, with the
digests of its blocks.

When a save is planned that has a frozen file with the same pieces, its content is digested where it
lies in the trainer's memory, up to the first block that differs. If none does, the new checkpoint
gets a hard link to the file of the last one (`Storage.link_from`). Where no link can be made
(another file system, a checkpoint that was removed, an object store) the file is written. So a
checkpoint always has all of its files.

Digests decide, and not versions of tensors or what a framework says, because memory may be changed
in many ways. Whether the stored file still has these digests is not read again: damage to a file
that several checkpoints share is damage to all of them, and every load finds it. A process has no
history when it starts, so its first save writes everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from remesh.checkpoint.local import LocalTensors
from remesh.checkpoint.stream_layout import lay_out
from remesh.core.geometry import IntArray
from remesh.core.integrity import raw_digest
from remesh.errors import StorageError
from remesh.formats.native import data_path
from remesh.formats.writer import Frame, Part, Writer, as_written
from remesh.pipeline.source import stored_copies
from remesh.pipeline.stage import has_digests
from remesh.storage import Storage

MIN_BYTES = 4 << 20
"""Bytes of frozen tensors; less is written with what changes."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnFile:
    """A data file of this rank."""

    frame: Frame  # what it is; the rows are those of the rank's boxes
    numbers: IntArray  # numbers of its boxes in the rank's assignment
    key: bytes  # digest of its header: equal for files of equal pieces


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The knowledge of this rank about the last committed save."""

    layout: bytes = b""  # fingerprint of the rank's boxes
    storage: Storage | None = None  # where the save is
    key: bytes = b""  # that of its frozen file
    part: Part | None = None  # what the rank said of that; None if there is none

    @classmethod
    def after(
        cls, layout: bytes, storage: Storage, frozen: OwnFile | None, parts: Sequence[Part]
    ) -> History:
        """The history once a save is committed, given what this rank said of its files."""
        # A writer process that died after the commit said nothing.
        part = next((one for one in parts if frozen and one.path == frozen.frame.path), None)
        return cls() if frozen is None or part is None else cls(layout, storage, frozen.key, part)

    def num_bytes_to_keep(self, layout: bytes) -> int:
        """Bytes that a save of these boxes will probably not write."""
        return self.part.num_bytes if self.part is not None and layout == self.layout else 0


def own_files(
    writer: Writer, tensors: LocalTensors, rows: IntArray, place: tuple[int, str, bytes]
) -> list[OwnFile | None]:
    """The data files of a rank that writes some rows: of what changes, and of what is frozen.

    The place is the number of the rank, the save's id, and the plan of the files.
    """
    rank, save_id, file_plan = place
    is_frozen = tensors.is_frozen[rows]
    if tensors.boxes.num_bytes[rows][is_frozen].sum() < MIN_BYTES:
        is_frozen[:] = False
    files: list[OwnFile | None] = []
    for number, members in enumerate((~is_frozen, is_frozen)):
        numbers, file = np.flatnonzero(members), None
        if len(numbers):
            [frame] = writer.frames(tensors.boxes, rows[numbers], rank, save_id, file_plan)
            frame = replace(frame, path=data_path(save_id, rank, number))
            file = OwnFile(frame, numbers, raw_digest(frame.literals[0][1]))
        files.append(file)
    return files


def keep_frozen(
    storage: Storage, history: History, frozen: OwnFile | None, tensors: LocalTensors
) -> list[Part]:
    """Make a link to the frozen file, unless it changed or cannot be had.

    What the rank says of it then.
    """
    last, source = history.storage, history.part
    if last is None or source is None or frozen is None or frozen.key != history.key:
        return []
    stream = lay_out([frozen.frame], tensors, [frozen.numbers])
    if (
        storage.shares_files
        and has_digests(stream.layout, source.written.digests, stored_copies(tensors.memories))
        and storage.link_from(last, source.path, frozen.frame.path, source.stored_size)
    ):
        part = as_written(stream.parts[0], source.written)
        return [msgspec.structs.replace(part, is_kept=True)]
    return []


def remove_paths(storage: Storage, paths: Sequence[str]) -> None:
    """Remove files of no checkpoint, as far as the storage can."""
    with suppress(StorageError):
        storage.delete_many(paths)
