"""What tensors are cut into, and where the pieces lie: lists that many tensors share.

In a regular layout most tensors are cut alike: a thousand tensors over ten thousand ranks have ten
million pieces, but a handful of different lists of offsets, of shapes and of files. A list is
therefore kept once (`Lists`), however many tensors have it. Where nothing repeats, each tensor has
lists of its own, which take what columns of all pieces would.

Where a piece begins depends on the tensors before it in its file, so positions hardly repeat. They
are sums of three numbers that do: one of the file, one of the tensor, and a *step*, which is 0 for
all pieces of a tensor where all files hold alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from remesh.geometry import MAX_ELEMENTS, IntArray, row_products

Number = TypeVar("Number", np.int64, np.bool_)

LONG_RANGE = 256
"""Ranges of so many rows on average are copied as such."""

MAX_POSITION = MAX_ELEMENTS // 2
"""No part of a position is larger, so that their sum fits into 64 bits."""


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Numbers from each start on, as many as its length says, one range after the other."""
    ends = np.cumsum(lengths)
    numbers = np.arange(int(lengths.sum()), dtype=np.int64)
    numbers += np.repeat(starts - (ends - lengths), lengths)
    return numbers


def joined(values: npt.NDArray[Number], starts: IntArray, lengths: IntArray) -> npt.NDArray[Number]:
    """Rows from each start on, as many as its length says, one range after the other.

    Where the ranges follow each other, no row is copied.
    """
    if len(starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
        return values[starts[0] : starts[-1] + lengths[-1]]
    if LONG_RANGE * len(starts) > lengths.sum():
        return values.take(ranges(starts, lengths), axis=0)
    # Long ranges are copied several times as fast as their rows.
    parts = [values[:0]]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        parts.append(values[start : start + length])
    return np.concatenate(parts)


def distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """The different rows of some columns.

    Returns:
        The first row of each kind, and the kind of each row.
    """
    of = np.zeros(len(columns[0]), dtype=np.int64)
    first = of
    for column in columns:
        _, small = np.unique(column, return_inverse=True)
        keys = of * (int(small.max(initial=0)) + 1) + small
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    return first, of


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list for each tensor, of numbers or of rows of numbers; equal ones are kept once.

    Attributes:
        number: Which list each tensor has.
        ends: One past the last row in `values` of each list.
        values: The rows of the different lists, one list after the other.
    """

    number: IntArray
    ends: IntArray
    values: IntArray

    @classmethod
    def of(cls, values: IntArray, bounds: IntArray) -> Lists:
        """Lists that follow each other, of which equal ones are kept once.

        Args:
            values: The rows of all tensors.
            bounds: First row of each tensor, and the number of rows.
        """
        values = np.ascontiguousarray(values)
        known: dict[bytes, int] = {}
        kept: list[slice] = []
        number = []
        stops = bounds.tolist()
        for start, stop in pairwise(stops):
            rows = slice(start, stop)
            key = xxhash.xxh3_128_digest(values[rows].data) if stop > start else b""
            number.append(known.setdefault(key, len(kept)))
            if number[-1] == len(kept):
                kept.append(rows)
        lengths = [rows.stop - rows.start for rows in kept]
        return cls(
            np.array(number, dtype=np.int64),
            np.cumsum(lengths, dtype=np.int64),
            np.concatenate([values[:0], *(values[rows] for rows in kept)]),
        )

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """Its columns."""
        return self.number, self.ends, self.values

    @property
    def lengths(self) -> IntArray:
        """Rows of each tensor's list."""
        lengths: IntArray = np.diff(self.ends, prepend=0)[self.number]
        return lengths

    @property
    def starts(self) -> IntArray:
        """First row in `values` of each tensor's list."""
        starts: IntArray = (self.ends - np.diff(self.ends, prepend=0))[self.number]
        return starts

    def among(self, tensors: IntArray) -> Lists:
        """The lists of some tensors."""
        return Lists(self.number[tensors], self.ends, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of tensors, those of one after those of the other.

    Attributes:
        lists: Offsets of pieces in their tensors, and shapes, both padded; rows of their files; and
            what their positions have beside `in_file` and `in_tensor`.
        in_file: What the positions of all pieces of a file have in common.
        in_tensor: What the positions of all pieces of a tensor have in common.
    """

    lists: tuple[Lists, ...]
    in_file: IntArray
    in_tensor: IntArray

    @classmethod
    def of(
        cls,
        bounds: IntArray,
        boxes: tuple[IntArray, IntArray],
        file: IntArray,
        position: IntArray,
        num_files: int,
    ) -> Pieces:
        """The pieces of columns.

        Args:
            bounds: First piece of each tensor, and the number of pieces.
            boxes: Offset of each piece, and its shape.
            file: Row of the file of each.
            position: First byte of each in its file.
            num_files: Number of files.
        """
        in_file = np.full(num_files, MAX_POSITION, dtype=np.int64)
        np.minimum.at(in_file, file, position)
        in_file[in_file == MAX_POSITION] = 0
        steps = position - in_file[file]
        has_pieces = np.diff(bounds) > 0
        in_tensor = np.zeros(len(bounds) - 1, dtype=np.int64)
        in_tensor[has_pieces] = steps[bounds[:-1][has_pieces]]
        steps -= np.repeat(in_tensor, np.diff(bounds))
        columns = (*boxes, file, steps)
        return cls(tuple(Lists.of(one, bounds) for one in columns), in_file, in_tensor)

    @property
    def offsets(self) -> Lists:
        """Offset of each piece in its tensor."""
        return self.lists[0]

    @property
    def extents(self) -> Lists:
        """Shape of each piece."""
        return self.lists[1]

    @property
    def files(self) -> Lists:
        """Row of the file of each piece."""
        return self.lists[2]

    @property
    def steps(self) -> Lists:
        """What the position of each piece has beside `in_file` and `in_tensor`."""
        return self.lists[3]

    def among(self, tensors: IntArray) -> Pieces:
        """The pieces of some tensors."""
        lists = tuple(one.among(tensors) for one in self.lists)
        return Pieces(lists, self.in_file, self.in_tensor[tensors])

    def alike(self, *columns: IntArray) -> tuple[IntArray, IntArray]:
        """Tensors that have the same lists, and the same number in each of some columns.

        Returns:
            One tensor of each kind, and the kind of each tensor.
        """
        return distinct(*(one.number for one in self.lists), *columns)


@dataclass(frozen=True, slots=True, eq=False)
class PieceRows:
    """Some pieces; a column is made when it is asked for.

    Attributes:
        pieces: All pieces.
        tensor: Row of the tensor of each.
        within: Number of each among the pieces of its tensor.
    """

    pieces: Pieces
    tensor: IntArray
    within: IntArray

    def take(self, rows: IntArray) -> PieceRows:
        """Some of them."""
        return PieceRows(self.pieces, self.tensor.take(rows), self.within.take(rows))

    def _column(self, lists: Lists) -> IntArray:
        rows = lists.starts.take(self.tensor)
        rows += self.within
        return lists.values.take(rows, axis=0)

    @property
    def offsets(self) -> IntArray:
        """(rows, d) offsets in the tensors, padded with 0."""
        return self._column(self.pieces.offsets)

    @property
    def extents(self) -> IntArray:
        """(rows, d) shapes, padded with 1."""
        return self._column(self.pieces.extents)

    @property
    def sizes(self) -> IntArray:
        """Elements of each."""
        return row_products(self.extents)

    @property
    def file(self) -> IntArray:
        """Row of the file of each."""
        return self._column(self.pieces.files)

    @property
    def position(self) -> IntArray:
        """First byte of each in its file."""
        position = self._column(self.pieces.steps)
        position += self.pieces.in_tensor.take(self.tensor)
        position += self.pieces.in_file.take(self.file)
        return position
