"""Files that did not change since the save before are not written again.

A `Saver` keeps a `History` on each rank: the files of the last committed save, with the digests of
their blocks, and for each of the rank's boxes the group that it belongs to. Each group has files of
its own:

* group 0 is what changes from save to save;
* group 1 is what the state declares to be frozen: parameters that need no gradient;
* further groups are what was found not to have changed between two saves, all found at one time in
  one group. A box of such a group that changes after all moves to group 0 and stays there.

When a save is planned, each file of the other groups that the last save has as well, with the same
pieces, is digested where it lies in the trainer's memory, up to the first block that differs. If
none does, the storage is asked to copy the file from the last checkpoint (`Storage.copy_from`): a
hard link or a copy on the server. Where that cannot be done (another file system, a checkpoint that
was removed, a store without copies) the file is written. So a checkpoint always has all of its
files.

A copy on the server takes time that a trainer does not have to wait for. So for a background save
to an object store such files are staged like others, as long as the arena can hold everything, and
the background compares and copies them (`remesh.pipeline.write.FileCopy`).

Digests decide, and not versions of tensors or what a framework says, because memory may be changed
in many ways. Whether the stored file still has these digests is not read again: damage to a file
that several checkpoints share is damage to all of them, and every load finds it. A process has no
history when it starts, so its first save writes everything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from remesh.checkpoint.local import LocalTensors
from remesh.checkpoint.stream_layout import lay_out
from remesh.core.geometry import IntArray
from remesh.core.integrity import BLOCK_SIZE, WrittenFile, raw_digest
from remesh.errors import CheckpointNotFoundError, StorageError
from remesh.formats.framing import Frame, Grid, Part, Writer, as_written
from remesh.formats.native import data_path
from remesh.pipeline import has_digests
from remesh.pipeline.source import stored_copies
from remesh.storage import Storage

MIN_BYTES = 4 << 20
"""Bytes of a group; less is written with what changes."""

MAX_BYTES = 1 << 30
"""Bytes of a file of a group: stores copy one with a request, in seconds; S3 up to 5 GiB."""

MIN_SHARE = 1 / 16
"""Part of a rank's bytes that makes a further group, so that files do not become many."""

_LOGGER = logging.getLogger("remesh")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class OwnFile:
    """A data file of this rank."""

    frame: Frame  # what it is; the rows are those of the rank's boxes
    numbers: IntArray  # numbers of its boxes in the rank's assignment
    group: int  # the group whose boxes it holds
    key: bytes  # digest of its header: equal for files of equal pieces


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The knowledge of this rank about the last committed save."""

    layout: bytes = b""  # fingerprint of the rank's boxes that the columns are of
    group: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # group of each box
    has_moved: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Boxes that are in group 0 because they have changed in another one."""
    storage: Storage | None = None  # where the save is; None if there was none
    files: tuple[tuple[OwnFile, WrittenFile], ...] = ()
    """Its files of this rank, and what is known of each."""

    def of_layout(self, layout: bytes, is_frozen: Flags) -> History:
        """The history for boxes that may be others than those of the last save."""
        if layout == self.layout:
            return self
        group = is_frozen.astype(np.int64)
        return replace(self, layout=layout, group=group, has_moved=np.zeros(len(group), np.bool_))

    def num_bytes_to_keep(self, layout: bytes) -> int:
        """Bytes that a save of these boxes will probably not write."""
        if layout != self.layout:
            return 0
        return sum(file.frame.num_bytes for file, _ in self.files if file.group)

    def after(
        self,
        storage: Storage,
        files: Sequence[OwnFile],
        parts: Iterable[Part],
        num_bytes: IntArray,
    ) -> History:
        """The history after a save was committed, with bytes of each of the rank's boxes."""
        of_path = {part.path: part for part in parts}
        written_files = [(file, of_path[file.frame.path].written) for file in files]
        before = {file.key: written.digests for file, written in self.files}
        stays, changes = np.zeros((2, len(num_bytes)), np.bool_)
        for file, written in written_files:
            if file.key in before:
                rows, positions = file.frame.rows, file.frame.positions
                differs = (written.digests != before[file.key]).any(axis=1)
                stays[rows] = ~_touch(differs, positions, num_bytes[rows])
                changes[rows] = ~stays[rows] & (file.group > 0)
        group = np.where(changes, 0, self.group)
        has_moved = self.has_moved | changes
        found = stays & (group == 0) & ~has_moved
        if num_bytes[found].sum() >= max(MIN_BYTES, MIN_SHARE * num_bytes.sum()):
            group = np.where(found, max(group.max(), 1) + 1, group)
        return History(self.layout, group, has_moved, storage, tuple(written_files))


def _touch(differs: Flags, positions: IntArray, num_bytes: IntArray) -> Flags:
    """Which pieces of a file lie in blocks that differ.

    Of a piece that has blocks of its own, those count: blocks at its ends are its neighbours', too.
    """
    before = np.concatenate(([0], np.cumsum(differs)))
    first, stop = positions // BLOCK_SIZE, -(-(positions + num_bytes) // BLOCK_SIZE)
    own_first, own_stop = -(-positions // BLOCK_SIZE), (positions + num_bytes) // BLOCK_SIZE
    has_own = own_stop > own_first
    first, stop = np.where(has_own, own_first, first), np.where(has_own, own_stop, stop)
    found: Flags = before[stop] > before[first]
    return found


def own_files(
    writer: Writer,
    tensors: LocalTensors,
    rows: IntArray,
    group: IntArray,
    place: tuple[int, str, Grid],
) -> list[OwnFile]:
    """The data files of a rank, group by group, given the rows that it writes.

    The place is the number of the rank, the save's id, and the grid.
    """
    rank, save_id, grid = place
    groups, sizes = group[rows], tensors.boxes.num_bytes[rows]
    if not len(rows):
        return []
    groups = np.where(np.bincount(groups, sizes)[groups] < MIN_BYTES, 0, groups)
    # Number 0 is the file of group 0, whether there is one or not.
    first = int(groups.min() > 0)
    files: list[OwnFile] = []
    for number in np.unique(groups).tolist():
        members = np.flatnonzero(groups == number)
        cuts = (np.cumsum(sizes[members]) - sizes[members]) // MAX_BYTES * (number > 0)
        for cut in np.unique(cuts).tolist():
            numbers = members[cuts == cut]
            [frame] = writer.frames(tensors.boxes, rows[numbers], rank, save_id, grid)
            frame = replace(frame, path=data_path(save_id, rank, len(files) + first))
            files.append(OwnFile(frame, numbers, number, raw_digest(frame.fillers[0][1])))
    return files


def sources_of(history: History, files: Sequence[OwnFile]) -> dict[int, Part]:
    """The files of the last checkpoint that some files of a save may be, by their numbers.

    Of each, what was said of it, without the places of its pieces.
    """
    before = {
        file.key: as_written(Part(file.frame.path, file.frame.num_bytes, b"", b""), written)
        for file, written in history.files
    }
    return {
        number: before[file.key]
        for number, file in enumerate(files)
        if file.group and file.key in before
    }


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
    if at_once and storage.copying != "at once":
        return kept
    try:
        for number, source in sources_of(history, files).items():
            file = files[number]
            if _keep(storage, history.storage, source, file, tensors):
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
    if last is None or storage.copying == "none":
        return False
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
