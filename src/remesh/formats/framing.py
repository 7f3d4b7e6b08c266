"""What a writer of a foreign format says of its files, before a byte of a tensor moves.

A data file of any format is bytes that are known beforehand (headers, padding) and boxes of
tensors between them. The engine makes a file layout of that and writes it as it writes its own
files, staged or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remesh.formats.native import ValuesDocument
from remesh.geometry import Box, IntArray
from remesh.index import BoxTable

Grid = Mapping[str, Sequence[int]]
"""Something that all ranks must know of each tensor before they frame their boxes."""

SmallFile = tuple[str, bytes]
"""A path and its content."""


@dataclass(frozen=True, slots=True)
class FramedPiece:
    """A box of a tensor in a file.

    Attributes:
        row: Row of the stored box of which this is a part.
        box: What lies there, in global elements; what leaves the stored box is written as zeros.
        position: Byte of the file at which it begins.
    """

    row: int
    box: Box
    position: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A data file.

    Attributes:
        path: Its name.
        num_bytes: Its size.
        pieces: What lies in it, by position.
        fillers: Position and content of all other bytes.
    """

    path: str
    num_bytes: int
    pieces: tuple[FramedPiece, ...]
    fillers: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What rank 0 knows when all data files are durable.

    Attributes:
        save_id: Names the save.
        boxes: The distinct boxes that were stored.
        assignments: Rows of `boxes` that each rank wrote, in the order of its files.
        document: The values of all ranks.
        grid: What the writer's `grid` made of the boxes.
    """

    save_id: str
    boxes: BoxTable
    assignments: Sequence[IntArray]
    document: ValuesDocument
    grid: Grid


@dataclass(frozen=True, slots=True)
class Writer:
    """How a foreign format is written.

    Attributes:
        name: What a user calls it.
        mark: The file that makes a checkpoint of it exist.
        grid: What all ranks must know of the boxes of all ranks; may be empty.
        frames: The data files of a rank, given its boxes, its number, the save's id and the grid.
        small_files: What rank 0 writes when all data files are durable, in this order; the last
            makes the checkpoint exist.
    """

    name: str
    mark: str
    grid: Callable[[BoxTable], Grid]
    frames: Callable[[BoxTable, int, str, Grid], Sequence[Frame]]
    small_files: Callable[[Saved], Sequence[SmallFile]]
