"""What the writer of a format says of its files, before a byte of a tensor moves.

A data file of any format is bytes that are known beforehand (headers, padding) and boxes of
tensors between them. `remesh.checkpoint` makes a file layout of that, writes it, at once or staged,
and then writes the small files, of which the last makes the checkpoint exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from remesh.errors import CheckpointError
from remesh.formats.building import exists
from remesh.formats.native import ValuesDocument
from remesh.geometry import Box, IntArray
from remesh.index import Index
from remesh.integrity import WrittenFile
from remesh.storage import Storage
from remesh.tables import BoxTable, Cuts

Grid = bytes
"""What all ranks must know of the boxes of all ranks, as the writer encodes it."""

SmallFile = tuple[str, bytes]
"""A path and its content."""


@dataclass(frozen=True, slots=True)
class Rename:
    """A data file that gets its final name.

    Attributes:
        path: The name under which it was written.
        new: Its final name.
    """

    path: str
    new: str


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A data file.

    Attributes:
        path: Its name.
        num_bytes: Its size.
        rows: Rows of the stored boxes that lie in it, by position.
        positions: Byte of the file at which each begins; of a shared file, at which the tensor of
            each begins.
        boxes: What lies there in place of the whole stored boxes, in global elements; what leaves
            the stored box is written as zeros.
        fillers: Position and content of all other bytes that this rank writes.
        is_shared: Whether tensors lie there whole, and other ranks write their boxes of them.
        checksums: First byte, end, and bytes at which a CRC-32 of that range stands, behind it.
    """

    path: str
    num_bytes: int
    rows: IntArray
    positions: IntArray
    boxes: tuple[Box, ...] | None = None
    fillers: tuple[tuple[int, bytes], ...] = ()
    is_shared: bool = False
    checksums: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


class Part(msgspec.Struct, frozen=True):
    """A file that one rank wrote: sent to rank 0, which makes the checkpoint of all parts.

    Attributes:
        path: The data file.
        num_bytes: Its size.
        positions: int64 positions of the boxes in it, as bytes.
        digests: uint64 block digests, as bytes.
        numbers: int64 numbers of the boxes in the rank's assignment, as bytes; None for all boxes
            of it, in its order.
        is_kept: Whether the file did not change since the save before, and was not written again.
        stored_begin: int64 bytes of the stored file at which its blocks begin, as bytes; None if it
            is not compressed.
        stored_bytes: Size of the stored file; None if it is not compressed.
    """

    path: str
    num_bytes: int
    positions: bytes
    digests: bytes
    numbers: bytes | None = None
    is_kept: bool = False
    stored_begin: bytes | None = None
    stored_bytes: int | None = None

    @property
    def stored_size(self) -> int:
        """Bytes of the file as it is stored."""
        return self.num_bytes if self.stored_bytes is None else self.stored_bytes

    @property
    def written(self) -> WrittenFile:
        """What is known of the file."""
        begin = self.stored_begin
        return WrittenFile(
            np.frombuffer(self.digests, "<u8").reshape(-1, 2),
            None if begin is None else np.frombuffer(begin, "<i8"),
            self.stored_bytes,
        )


def part_of(path: str, num_bytes: int, positions: IntArray, written: WrittenFile) -> Part:
    """What a rank says of the only file that it wrote."""
    return as_written(Part(path, num_bytes, column_bytes(positions), b""), written)


def as_written(part: Part, written: WrittenFile) -> Part:
    """What a rank says of a file once it is written."""
    begin = written.stored_begin
    return msgspec.structs.replace(
        part,
        digests=written.digests.astype("<u8", copy=False).tobytes(),
        stored_begin=None if begin is None else column_bytes(begin),
        stored_bytes=written.stored_bytes,
    )


def column_bytes(numbers: IntArray) -> bytes:
    """Numbers as they lie in a `Part`."""
    return numbers.astype("<i8", copy=False).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What rank 0 knows of a save.

    Attributes:
        save_id: Names the save.
        cuts: The distinct boxes that are stored.
        assignments: Rows of these that each rank writes, in the order of its files.
        document: The values of all ranks.
        grid: What the writer's `grid` made of the boxes.
        metadata: What is recorded beside the state.
        world_size: Number of ranks.
        parts: The files of each rank, in rank order, when all of them are durable.
        options: Options of the format.
    """

    save_id: str
    cuts: Cuts
    assignments: Sequence[IntArray]
    document: ValuesDocument
    grid: Grid
    metadata: Mapping[str, object]
    world_size: int
    parts: Sequence[Sequence[Part]] = ()
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def boxes(self) -> BoxTable:
        """The distinct boxes, a row each."""
        return self.cuts.boxes


@dataclass(frozen=True, slots=True)
class Existing:
    """A checkpoint that is where another one is to be saved.

    Attributes:
        what: What tells it from others, for messages.
        save_id: The save that wrote it, if its files lie in a folder of their own.
        paths: Its files besides, the one that makes it exist first.
        is_fixed: Whether it cannot be replaced, because the names of its data files are fixed.
    """

    what: str
    save_id: str = ""
    paths: tuple[str, ...] = ()
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class Writer:
    """How a format is written.

    Attributes:
        name: What a user calls it.
        grid: What all ranks must know of the boxes of all ranks, made on rank 0 with the values and
            the options of the format; may be empty. Raises a `StateError` if the format has no
            form for something.
        frames: The data files of a rank, given boxes, those rows of them that it writes, its
            number, the save's id and the grid.
        small_files: What rank 0 writes, or renames, when all data files are durable, in this order;
            the last makes the checkpoint exist.
        existing: The checkpoint of this format that is at a place, given the options of the format.
            Raises a `CheckpointError` if it cannot be read.
        early_files: What rank 0 writes while the data files are written.
        is_committed: Whether the checkpoint at a place is that of a save; None if files do not
            tell. Raises a `CheckpointError` if there is none.
        has_folder: Whether all files but the last lie in the folder `data-<save id>`.
        has_metadata: Whether metadata can be recorded beside the state.
        has_digests: Whether the digests of the blocks of files are recorded, and a rank may write
            several files.
        has_checksums: Whether shared files hold checksums of their tensors. Then each has one
            writer, which collects its tensors.
        object_names: How files of which ranks write parts are named in a storage in which each file
            has one writer: by the save (`by_save`), or, if it is a single file, at once by its
            final name (`final`). Empty if each file of the format is written by one rank anyway.
        is_beside_others: Whether checkpoints of other formats may be at the same place.
        options: Names of the options that a caller may give.
    """

    name: str
    grid: Callable[[Cuts, ValuesDocument, Mapping[str, object]], Grid]
    frames: Callable[[BoxTable, IntArray, int, str, Grid], Sequence[Frame]]
    small_files: Callable[[Saved], Sequence[SmallFile | Rename]]
    existing: Callable[[Storage, Mapping[str, object]], Existing | None]
    early_files: Callable[[Saved], Sequence[SmallFile]] = lambda _saved: []
    is_committed: Callable[[Storage, str], bool] | None = None
    has_folder: bool = False
    has_metadata: bool = False
    has_digests: bool = False
    has_checksums: bool = False
    object_names: str = ""
    is_beside_others: bool = False
    options: tuple[str, ...] = ()


def no_grid(_cuts: Cuts, _document: ValuesDocument, _options: Mapping[str, object]) -> Grid:
    """Files that need to know nothing of each other."""
    return b""


def existing_files(
    storage: Storage, mark: str, read_index: Callable[[], Index], small: Sequence[str]
) -> Existing | None:
    """The checkpoint that a mark makes exist: with the data files of its index, and small ones."""
    if not exists(storage, mark):
        return None
    try:
        files = (file.path for file in read_index().files)
    except CheckpointError:
        return Existing(mark)  # what it refers to is unknown, and stays
    beside = (path for path in small if exists(storage, path))
    return Existing(mark, paths=tuple(dict.fromkeys((mark, *beside, *files))))
