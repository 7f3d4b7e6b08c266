"""The boxes that each rank holds, on their way to rank 0.

In a large job rank 0 gets a table from each of thousands of ranks. Two things keep that small:
columns travel in as few bytes as their numbers need, and ranks that hold parts of the same tensors,
as almost all do, share one table of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.geometry import IntArray
from remesh.integrity import raw_digest
from remesh.planner import LocalBoxes
from remesh.tables import BoxTable, Columns, TensorTable, decode_columns, encode_columns

_NARROW = np.iinfo(np.int32)


def encode_local_boxes(boxes: BoxTable, roles: IntArray) -> bytes:
    """A message that says what this rank holds; equal for equal boxes.

    Args:
        boxes: Its boxes.
        roles: The role of each (`remesh.state.Role`).
    """
    columns = {**boxes.columns(), "role": roles}
    return encode_columns({name: _narrowed(column) for name, column in columns.items()})


def decode_local_boxes(messages: Sequence[bytes]) -> list[LocalBoxes]:
    """What `encode_local_boxes` said on each rank.

    Raises:
        CorruptCheckpointError: If a message is something else.
    """
    known: dict[bytes, TensorTable] = {}
    found = []
    for message in messages:
        columns, _ = decode_columns(message, "local boxes")
        tensors = _tensors_of(columns, known)
        boxes = BoxTable(
            tensors,
            columns["box.tensor"].astype(np.int64),
            columns["box.offset"].astype(np.int64),
            columns["box.shape"].astype(np.int64),
        )
        found.append(LocalBoxes(boxes, columns["role"].astype(np.int64)))
    return found


def _narrowed(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column in 32 bits if its numbers fit."""
    if column.dtype != np.int64 or not column.size:
        return column
    fits = _NARROW.min <= column.min() and column.max() <= _NARROW.max
    return column.astype(np.int32) if fits else column


def _tensors_of(columns: Columns, known: dict[bytes, TensorTable]) -> TensorTable:
    """The table of tensors of a message, the same object for the same table."""
    names = sorted(name for name in columns if name.startswith("tensor."))
    key = raw_digest(b"".join(columns[name].tobytes() for name in names))
    tensors = known.get(key)
    if tensors is None:
        wide = {
            name: columns[name] if name == "tensor.name_bytes" else columns[name].astype(np.int64)
            for name in names
        }
        tensors = known[key] = TensorTable.from_columns(wide)
    return tensors
