"""The boxes that each rank holds, on their way to rank 0.

In a large job rank 0 gets a message from each of thousands of ranks. Almost all ranks hold boxes of
the same tensors, of as many kinds (`remesh.planner.LocalBoxes`). Which tensors have which kind is
therefore told once, by the first rank of those that have the same to tell; all others name it by
its digest, and send no more than a few numbers for each kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.integrity import raw_digest
from remesh.core.packing import pack, unpack
from remesh.core.tables import BoxTable, TensorTable, decode_columns, encode_columns
from remesh.planner import LocalBoxes


class BoxesMessage(msgspec.Struct, frozen=True):
    """The boxes of a rank; equal for equal boxes."""

    digest: bytes = b""  # names `shared`
    shared: bytes = b""
    """Its tensors, and for each box the tensor and the kind; empty if another rank tells."""
    kinds: bytes = b""  # offset, shape and role of each kind, as bytes

    @property
    def layout(self) -> bytes:
        """A digest that tells it from all others."""
        return raw_digest(self.digest + self.kinds)


def encode_local_boxes(boxes: BoxTable, roles: IntArray) -> BoxesMessage:
    """A message that says what this rank holds: its boxes, and the role of each."""
    held = LocalBoxes.of(boxes, roles)
    columns = held.tensors.columns() | {"box.tensor": held.tensor, "box.kind": held.kind}
    shared = encode_columns(
        {
            name: pack(column.reshape(-1)) if column.dtype == np.int64 else column
            for name, column in columns.items()
        }
    )
    kinds = np.concatenate([held.offsets, held.extents, held.roles[:, None]], axis=1)
    return BoxesMessage(raw_digest(shared), shared, kinds.astype("<i8").tobytes())


def decode_local_boxes(messages: Sequence[BoxesMessage]) -> list[LocalBoxes]:
    """The boxes of each rank, as `encode_local_boxes` said them.

    Of the messages with equal digests, one has what they share.
    """
    known = {one.digest: _shared(one.shared) for one in messages if one.shared}
    found = []
    for message in messages:
        tensors, tensor, kind = known[message.digest]
        num_dims = tensors.shapes.shape[1]
        kinds = np.frombuffer(message.kinds, dtype="<i8").reshape(-1, 2 * num_dims + 1)
        offsets, extents = kinds[:, :num_dims], kinds[:, num_dims:-1]
        found.append(LocalBoxes(tensors, tensor, kind, offsets, extents, kinds[:, -1]))
    return found


def _shared(message: bytes) -> tuple[TensorTable, IntArray, IntArray]:
    """The tensors; and of each box, the tensor and the kind."""
    columns, _ = decode_columns(message, "local boxes")
    # A rank of the same job says how many there are.
    wide = {
        name: unpack(column, 1 << 62) if column.dtype == np.int64 else column
        for name, column in columns.items()
    }
    num_tensors = len(wide["tensor.dtype"])
    wide["tensor.shape"] = wide["tensor.shape"].reshape(num_tensors, -1 if num_tensors else 1)
    return TensorTable.from_columns(wide), wide["box.tensor"], wide["box.kind"]
