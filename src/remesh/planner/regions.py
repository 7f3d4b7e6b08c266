"""Parts of stored pieces that a rank wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remesh.core.geometry import Box, IntArray, intersect_rows, row_products
from remesh.core.index import Index
from remesh.core.pieces import PieceRows, distinct, ranges
from remesh.core.tables import BoxTable
from remesh.errors import CoverageError


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes, each of which lies in one piece of an index, a row each."""

    want: IntArray  # number of the wanted box that each is a part of
    piece: IntArray  # row in the index's pieces of each
    offsets: IntArray  # (rows, d) offset of each in its tensor
    extents: IntArray  # (rows, d) shape of each

    def __len__(self) -> int:
        return len(self.piece)

    @classmethod
    def join(cls, parts: Sequence[Regions]) -> Regions:
        """The regions of several tables in one."""
        return cls(
            np.concatenate([part.want for part in parts]),
            np.concatenate([part.piece for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.extents for part in parts]),
        )

    def take(self, rows: IntArray) -> Regions:
        """Some of the rows."""
        # `take` is several times as fast as indexing where rows are short.
        return Regions(
            self.want.take(rows),
            self.piece.take(rows),
            self.offsets.take(rows, axis=0),
            self.extents.take(rows, axis=0),
        )

    def num_bytes(self, index: Index) -> IntArray:
        """Bytes of each region."""
        tensors = index.tensors
        sizes: IntArray = row_products(self.extents)
        sizes *= tensors.itemsizes.take(index.tensor_of(self.piece))
        return sizes

    def boxes(self, index: Index) -> list[Box]:
        """The box of each region in its tensor, without padding."""
        ndims = index.tensors.ndims[index.tensor_of(self.piece)].tolist()
        return [
            Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            for ndim, offset, extent in zip(
                ndims, self.offsets.tolist(), self.extents.tolist(), strict=True
            )
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Wanted parts of pieces, for one of all wanted boxes that are alike; sorted by kind of box."""

    of: IntArray  # the kind of each wanted box
    kind: IntArray  # the kind of box of each part
    within: IntArray  # the number of its piece in the tensor
    offsets: IntArray  # (parts, d) offset of each in its tensor
    extents: IntArray  # (parts, d) shape of each

    def of_kinds(self, kinds: IntArray) -> tuple[IntArray, IntArray]:
        """Parts of some kinds of boxes: for each the place of its kind among these, and its row."""
        counts = np.bincount(self.kind, minlength=int(self.of.max(initial=-1)) + 1)
        rows = ranges((np.cumsum(counts) - counts)[kinds], counts[kinds])
        return np.repeat(np.arange(len(kinds)), counts[kinds]), rows

    def regions(self, index: Index, wanted: BoxTable) -> Regions:
        """The parts of all wanted boxes."""
        want, row = self.of_kinds(self.of)
        piece = self.within.take(row)
        piece += index.first_pieces.take(wanted.tensor).take(want)
        return Regions(want, piece, self.offsets.take(row, axis=0), self.extents.take(row, axis=0))


def intersections(index: Index, wanted: BoxTable) -> Parts:
    """Every non-empty intersection of a wanted box with a piece.

    Equal boxes that are wanted of tensors that are cut alike are intersected once.

    Raises:
        CoverageError: If pieces do not hold every element of these exactly once.
    """
    pieces = index.pieces_of_tensors
    kinds, of = distinct(
        pieces.offsets.number[wanted.tensor],
        pieces.extents.number[wanted.tensor],
        *wanted.offsets.T,
        *wanted.extents.T,
    )
    tensor = wanted.tensor[kinds]
    num_pieces = pieces.offsets.lengths[tensor]
    kind = np.repeat(np.arange(len(kinds)), num_pieces)
    within = ranges(np.zeros(len(kinds), np.int64), num_pieces)
    rows = PieceRows(pieces, tensor.take(kind), within)
    want = kinds.take(kind)
    offsets, extents, meets = intersect_rows(
        wanted.offsets.take(want, axis=0),
        wanted.extents.take(want, axis=0),
        rows.offsets,
        rows.extents,
    )
    met = np.flatnonzero(meets)
    kind, within = kind.take(met), within.take(met)
    offsets, extents = offsets.take(met, axis=0), extents.take(met, axis=0)
    sizes = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(sizes, kind, row_products(extents))
    is_wrong = sizes != row_products(wanted.extents[kinds])
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong[of])[0])
        raise CoverageError(
            f"{wanted.tensors.names[wanted.tensor[row]]}: the checkpoint's pieces do not hold "
            f"box {wanted.box(row)} exactly once"
        )
    return Parts(of, kind, within, offsets, extents)
