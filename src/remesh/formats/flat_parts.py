"""Tensors whose flattened elements lie in parts: ranges of arrays in files, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import boxes_of_flat_range
from remesh.core.state import Path, name_of
from remesh.errors import CorruptCheckpointError
from remesh.formats.building import IndexBuilder


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Elements of a flattened tensor that lie next to each other in a file."""

    path: str  # the file
    position: int  # byte at which they begin
    num_elements: int  # how many there are
    dtype: str  # name of their element type

    def range(self, start: int, stop: int) -> FlatPart:
        """Some of the elements."""
        assert 0 <= start <= stop <= self.num_elements
        position = self.position + start * BY_NAME[self.dtype].itemsize
        return FlatPart(self.path, position, stop - start, self.dtype)


def add_flat_parts(
    builder: IndexBuilder, place: Path, shape: tuple[int, ...], parts: Sequence[FlatPart]
) -> None:
    """Add a tensor whose flattened elements are those of some parts, one after the other."""
    name = name_of(place)
    found = sum(part.num_elements for part in parts)
    dtypes = sorted({part.dtype for part in parts})
    if found != math.prod(shape) or len(dtypes) != 1:
        raise CorruptCheckpointError(
            f"{builder.storage.url}: {name}\n"
            f"The files have {found} elements of {dtypes} for shape {shape}"
        )
    row = builder.add_tensor(name, dtypes[0], shape)
    builder.set_path(name, place)
    start = 0
    for part in parts:
        position = part.position
        for box in boxes_of_flat_range(shape, start, start + part.num_elements):
            builder.add_piece(row, box, part.path, position)
            position += box.size * BY_NAME[part.dtype].itemsize
        start += part.num_elements
