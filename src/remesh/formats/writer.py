"""What the writer of a format says of its files, before a byte of a tensor moves.

A data file of any format is bytes that are known beforehand (headers, padding) and boxes of
tensors between them. `remesh.checkpoint` makes a file layout of that, writes it, at once or staged,
and then writes the small files, of which the last makes the checkpoint exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.integrity import WrittenFile
from remesh.core.tables import BoxTable, Cuts
from remesh.formats.native import ValuesDocument
from remesh.storage import Storage

SmallFile = tuple[str, bytes]
"""A path and its content."""


@dataclass(frozen=True, slots=True)
class Rename:
    """A data file that gets its final name."""

    path: str  # the name under which it was written
    new: str  # its final name


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A data file."""

    path: str  # its name
    num_bytes: int  # its size
    rows: IntArray  # rows of the stored boxes that lie in it, by position
    positions: IntArray
    """Byte of the file at which each begins; of a shared file, at which the tensor of each begins.
    """
    literals: tuple[tuple[int, bytes], ...] = ()
    """Position and content of all other bytes that this rank writes."""
    is_shared: bool = False
    """Whether tensors lie there whole, and other ranks write their boxes of them."""
    checksums: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """First byte, end, and bytes at which a CRC-32 of that range stands, behind it."""


class Part(msgspec.Struct, frozen=True):
    """A file that one rank wrote: sent to rank 0, which makes the checkpoint of all parts."""

    path: str  # the data file
    num_bytes: int  # its size
    positions: bytes  # int64 positions of the boxes in it, as bytes
    digests: bytes  # uint64 block digests, as bytes
    numbers: bytes | None = None
    """int64 numbers of the boxes in the rank's assignment, as bytes; None for all boxes of it, in
    its order."""
    is_kept: bool = False
    """Whether the file did not change since the save before, and was not written again."""
    stored_begin: bytes | None = None
    """int64 bytes of the stored file at which its blocks begin, as bytes; None if it is not
    compressed."""
    stored_bytes: int | None = None  # size of the stored file; None if it is not compressed

    @property
    def stored_size(self) -> int:
        """Bytes of the file as it is stored."""
        return self.num_bytes if self.stored_bytes is None else self.stored_bytes

    @property
    def written(self) -> WrittenFile:
        """Digests of the file, and where its blocks lie."""
        begin = self.stored_begin
        return WrittenFile(
            np.frombuffer(self.digests, "<u8").reshape(-1, 2),
            None if begin is None else np.frombuffer(begin, "<i8"),
            self.stored_bytes,
        )


def part_of(path: str, num_bytes: int, positions: IntArray, written: WrittenFile) -> Part:
    """The part of a rank that wrote a single file."""
    return as_written(Part(path, num_bytes, column_bytes(positions), b""), written)


def as_written(part: Part, written: WrittenFile) -> Part:
    """The part of a file once it is written."""
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
    """A save as rank 0 knows it when all parts are written."""

    save_id: str  # names the save
    cuts: Cuts  # the distinct boxes that are stored
    assignments: Sequence[IntArray]
    """Rows of these that each rank writes, in the order of its files."""
    document: ValuesDocument  # the values of all ranks
    plan: bytes  # what the writer's `plan` made of the boxes
    metadata: Mapping[str, object]  # what is recorded beside the state
    world_size: int  # number of ranks
    parts: Sequence[Sequence[Part]] = ()
    """The files of each rank, in rank order, when all of them are durable."""
    options: Mapping[str, object] = field(default_factory=dict)  # options of the format

    @property
    def boxes(self) -> BoxTable:
        """The distinct boxes, a row each."""
        return self.cuts.boxes


@dataclass(frozen=True, slots=True)
class Existing:
    """A checkpoint that is where another one is to be saved."""

    what: str  # what tells it from others, for messages
    save_id: str = ""  # the save that wrote it, if its files lie in a folder of their own
    paths: tuple[str, ...] = ()  # its files besides, the one that makes it exist first


class Writer(ABC):
    """How a format is written."""

    name: str  # what a user calls it
    options: tuple[str, ...] = ()  # names of the options that a caller may give
    has_record = False
    """Whether a commit record refers to everything. Then all files but the record lie in the folder
    `data-<save id>`, the digests of their blocks are recorded, a rank may write several files, and
    the record shows which save is committed."""
    has_metadata = False  # whether metadata can be recorded beside the state
    has_checksums = False
    """Whether shared files hold checksums of their tensors. Then each has one writer, which
    collects its tensors."""
    object_names = ""
    """How files of which ranks write parts are named in a storage in which each file has one
    writer: by the save (`by_save`), or, if it is a single file, at once by its final name
    (`final`). Empty if each file of the format is written by one rank anyway."""
    is_beside_others = False  # whether checkpoints of other formats may be at the same place

    def plan(self, _cuts: Cuts, _document: ValuesDocument, _options: Mapping[str, object]) -> bytes:
        """What all ranks must know of the files, made on rank 0 and encoded; may be empty.

        Raises a `StateError` if the format has no form for something.
        """
        return b""

    @abstractmethod
    def frames(
        self, boxes: BoxTable, rows: IntArray, rank: int, save_id: str, plan: bytes
    ) -> Sequence[Frame]:
        """The data files of a rank, which writes some rows of the boxes."""

    @abstractmethod
    def small_files(self, saved: Saved) -> Sequence[SmallFile | Rename]:
        """What rank 0 writes, or renames, when all data files are durable, in this order.

        The last makes the checkpoint exist.
        """

    @abstractmethod
    def existing(self, storage: Storage, options: Mapping[str, object]) -> Existing | None:
        """The checkpoint of this format at a place; a `CheckpointError` if it cannot be read."""
