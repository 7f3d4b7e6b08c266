"""Files in which tensors lie whole, written by all ranks together.

Rank 0 decides which tensor lies where in which file. Then every rank writes the bytes that it holds
at their place in the file, so all ranks write at the same time, no tensor is sent anywhere, and no
rank ever holds more than its boxes. Rows of a box that are not neighbours in the tensor are written
one by one.

Files have the id of the save behind their names until all of them are durable.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from remesh.formats.framing import Frame, Grid, Rename, Saved
from remesh.geometry import IntArray
from remesh.tables import BoxTable


class WholeFile(msgspec.Struct, frozen=True):
    """A file.

    Attributes:
        name: Its final name.
        num_bytes: Its size.
        fillers: Position and content of all bytes that are not of tensors.
    """

    name: str
    num_bytes: int
    fillers: list[tuple[int, bytes]]


class WholeFiles(msgspec.Struct, frozen=True):
    """All files.

    Attributes:
        files: The files.
        places: For each tensor its file and its first byte there.
    """

    files: list[WholeFile]
    places: dict[str, tuple[int, int]]

    def encode(self) -> Grid:
        """What all ranks get to know."""
        return msgspec.msgpack.encode(self)


def decode_files(grid: Grid) -> WholeFiles:
    """The files of their encoded form."""
    return msgspec.msgpack.decode(grid, type=WholeFiles)


def frames(boxes: BoxTable, rows: IntArray, rank: int, save_id: str, grid: Grid) -> list[Frame]:
    """The files of which a rank writes something; rank 0 writes all fillers."""
    plan = decode_files(grid)
    names = boxes.tensors.names
    placed = [plan.places[names[tensor]] for tensor in boxes.tensor[rows].tolist()]
    numbers, positions = np.array(placed, np.int64).reshape(-1, 2).T
    found = []
    for number, file in enumerate(plan.files):
        here = numbers == number
        if rank == 0 or here.any():
            frame = Frame(
                _written_name(file, save_id),
                file.num_bytes,
                rows[here],
                positions[here],
                fillers=tuple(file.fillers) if rank == 0 else (),
                is_shared=True,
            )
            found.append(frame)
    return found


def renames(saved: Saved) -> Sequence[Rename]:
    """How the files get their final names."""
    return [
        Rename(_written_name(file, saved.save_id), file.name)
        for file in decode_files(saved.grid).files
    ]


def _written_name(file: WholeFile, save_id: str) -> str:
    return f"{file.name}.{save_id}"
