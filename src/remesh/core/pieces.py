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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from remesh.core.geometry import MAX_ELEMENTS, IntArray

Number = TypeVar("Number", np.int64, np.bool_)

CHUNK_ROWS = 1 << 17
"""Rows that are worked on at a time; see `chunks`."""

MAX_POSITION = MAX_ELEMENTS // 2
"""No part of a position is larger, so that their sum fits into 64 bits."""


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Numbers from each start on, as many as its length says, one range after the other."""
    ends = np.cumsum(lengths)
    numbers = np.arange(int(lengths.sum()), dtype=np.int64)
    numbers += np.repeat(starts - (ends - lengths), lengths)
    return numbers


def joined(values: npt.NDArray[Number], starts: IntArray, lengths: IntArray) -> npt.NDArray[Number]:
    """Rows from each start on, as many as its length says; not copied where ranges adjoin."""
    if len(starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
        return values[starts[0] : starts[-1] + lengths[-1]]
    return values.take(ranges(starts, lengths), axis=0)


def chunks(lengths: IntArray) -> list[tuple[int, int]]:
    """First tensor and one past the last of groups of tensors, of about `CHUNK_ROWS` rows each.

    Large columns need memory that is slow when it is new, so long ones are made in chunks.
    """
    ends = np.cumsum(lengths)
    full = np.searchsorted(ends, np.arange(CHUNK_ROWS, int(lengths.sum()), CHUNK_ROWS))
    inner = np.unique(full[full + 1 < len(lengths)] + 1).tolist()
    return list(pairwise([0, *inner, len(lengths)]))


def distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """The first of each kind of equal rows of some columns, and the kind of each row."""
    of = np.zeros(len(columns[0]), dtype=np.int64)
    first = of
    for column in columns:
        _, small = np.unique(column, return_inverse=True)
        keys = of * (int(small.max(initial=0)) + 1) + small
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    return first, of


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list for each tensor, of numbers or of rows of numbers; what tensors share is kept once."""

    number: IntArray  # which list each tensor has
    ends: IntArray  # one past the last row in `values` of each list
    values: IntArray  # the rows of the different lists, one list after the other

    @classmethod
    def apart(cls, values: IntArray, bounds: IntArray) -> Lists:
        """Lists that follow each other; `bounds` are their first rows, and the number of rows."""
        return cls(np.arange(len(bounds) - 1), bounds[1:], values)

    @classmethod
    def of(cls, values: IntArray, bounds: IntArray) -> Lists:
        """Lists as `apart` makes them, of which equal ones are kept once."""
        return cls.apart(values, bounds).once

    @classmethod
    def gathered(cls, lists: Iterable[IntArray], no_rows: IntArray) -> Lists:
        """A list of rows for each tensor; equal ones are kept once. `no_rows` is an empty list."""
        known: dict[bytes, int] = {}
        kept = [no_rows]
        number = []
        for rows in lists:
            key = xxhash.xxh3_128_digest(rows.data) if len(rows) else b""
            number.append(known.setdefault(key, len(known)))
            if len(known) == len(kept):
                kept.append(rows)
        ends = np.cumsum([len(rows) for rows in kept[1:]], dtype=np.int64)
        return cls(np.array(number, dtype=np.int64), ends, np.concatenate(kept))

    @property
    def once(self) -> Lists:
        """The same lists, of which equal ones are kept once, in order of the tensors."""
        _, first, of = np.unique(self.number, return_index=True, return_inverse=True)
        used = np.sort(first)
        starts, lengths = self.among(used).starts.tolist(), self.among(used).lengths.tolist()
        values = np.ascontiguousarray(self.values)
        slices = (values[start : start + n] for start, n in zip(starts, lengths, strict=True))
        found = Lists.gathered(slices, values[:0])
        number = found.number[np.argsort(np.argsort(first))][of]
        return Lists(number, found.ends, found.values)

    @property
    def lengths(self) -> IntArray:
        """Rows of each tensor's list."""
        lengths: IntArray = np.diff(self.ends, prepend=0)[self.number]
        return lengths

    @property
    def starts(self) -> IntArray:
        """First row in `values` of each tensor's list."""
        starts: IntArray = self.ends[self.number - 1] * (self.number > 0)
        return starts

    @property
    def rows(self) -> IntArray:
        """The rows of all tensors."""
        return joined(self.values, self.starts, self.lengths)

    def among(self, tensors: IntArray) -> Lists:
        """The lists of some tensors."""
        return Lists(self.number[tensors], self.ends, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of tensors, those of one after those of the other."""

    offsets: Lists  # offset of each piece in its tensor, padded
    extents: Lists  # shape of each, padded
    files: Lists  # row of the file of each
    steps: Lists  # what the position of each has beside `in_file` and `in_tensor`
    in_file: IntArray  # what the positions of all pieces of a file have in common
    in_tensor: IntArray  # what the positions of all pieces of a tensor have in common

    @classmethod
    def of(
        cls,
        offsets: Lists,
        extents: Lists,
        file: IntArray,
        position: IntArray,
        num_files: int,
    ) -> Pieces:
        """The pieces of columns: the row of the file of each, and its first byte there."""
        in_file = np.full(num_files, MAX_POSITION, dtype=np.int64)
        np.minimum.at(in_file, file, position)
        in_file[in_file == MAX_POSITION] = 0
        lengths = offsets.lengths
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        in_tensor = np.zeros(len(lengths), dtype=np.int64)
        filled = np.flatnonzero(lengths)
        at = bounds[filled]
        in_tensor[filled] = position[at] - in_file[file[at]]

        def steps_of_tensors() -> Iterator[IntArray]:
            for start, stop in chunks(lengths):
                here = slice(int(bounds[start]), int(bounds[stop]))
                steps = position[here] - in_file.take(file[here])
                steps -= np.repeat(in_tensor[start:stop], lengths[start:stop])
                cuts = (bounds[start : stop + 1] - here.start).tolist()
                yield from (steps[first:last] for first, last in pairwise(cuts))

        files, steps = Lists.of(file, bounds), Lists.gathered(steps_of_tensors(), file[:0])
        return cls(offsets.once, extents.once, files, steps, in_file, in_tensor)

    @property
    def lists(self) -> tuple[Lists, Lists, Lists, Lists]:
        """The lists that tensors share."""
        return self.offsets, self.extents, self.files, self.steps

    def among(self, tensors: IntArray) -> Pieces:
        """The pieces of some tensors."""
        offsets, extents, files, steps = (one.among(tensors) for one in self.lists)
        return Pieces(offsets, extents, files, steps, self.in_file, self.in_tensor[tensors])


@dataclass(frozen=True, slots=True, eq=False)
class PieceRows:
    """Some pieces; a column is made when it is asked for."""

    pieces: Pieces  # all pieces
    tensor: IntArray  # row of the tensor of each
    within: IntArray  # number of each among the pieces of its tensor

    def take(self, rows: IntArray) -> PieceRows:
        """Some of them."""
        return PieceRows(self.pieces, self.tensor.take(rows), self.within.take(rows))

    def _column(self, lists: Lists) -> IntArray:
        rows = lists.among(self.tensor).starts  # of all lists, they would be made for each read
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
