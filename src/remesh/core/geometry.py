"""Boxes of tensors: the integers under everything else.

A *box* is a rectangle of an n-dimensional tensor, given by its offset and its shape. All that
remesh knows about parallelism is which boxes of a tensor lie on which rank, so saving, loading
and resharding come down to cutting boxes with boxes, which is what this module does. It knows
nothing of bytes, files, ranks or torch.

Two kinds of code live here. `Box` and the functions on it are for reading and for small numbers.
The functions over *box arrays* do the same for many boxes at once and are what the planner uses.
A box array is two int64 arrays of shape (n, d), offsets and shapes; tensors with fewer than d
dims are padded at the end with offset 0 and extent 1, which changes neither their order in memory
nor any of the arithmetic.

The flat form deserves a word. In row-major order the elements of a tensor have flat numbers
0, 1, 2, ...; optimizers that cut flattened tensors (ZeRO, Megatron's distributed optimizer, FSDP1)
own ranges of them. Such a range is at most 2n - 1 boxes (`boxes_of_flat_range`), each contiguous in
flat order, so nothing above this module has to know that flattened tensors exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_DIMS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
"""Dims that an array can have."""
MAX_ELEMENTS = 2**62
"""Numbers of elements and bytes, and offsets, are at most this, so that sums fit into 64 bits."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangle of a tensor, in elements.

    Raises:
        ValueError: If offset and shape differ in length or hold a negative number.
    """

    offset: tuple[int, ...]
    """First index in each dim."""
    shape: tuple[int, ...]
    """Extent in each dim; any extent may be 0, then the box is empty."""

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box needs one extent per offset, got {self.offset}, {self.shape}")
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise ValueError(f"a box has no negative numbers, got {self.offset}, {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """The box that is all of a tensor of the given shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_slices(cls, *bounds: tuple[int, int]) -> Self:
        """The box of the half-open (start, stop) bounds of each dim."""
        return cls(tuple(a for a, _ in bounds), tuple(max(b - a, 0) for a, b in bounds))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index for numpy and torch that selects this box."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes, or None if it is empty."""
        bounds = [
            (max(a, b), min(a + m, b + n))
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(start >= stop for start, stop in bounds):
            return None
        return Box.from_slices(*bounds)

    def contains(self, other: Box) -> bool:
        """True if every element of `other` is in this box; an empty box is in every box."""
        return other.size == 0 or all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def shift(self, by: Sequence[int], sign: int = 1) -> Box:
        """This box moved by `by` (backwards for `sign` -1)."""
        return Box(tuple(o + sign * b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of a box that contains it."""
        return self.shift(outer.offset, -1)

    def __str__(self) -> str:
        bounds = ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.end, strict=True))
        return f"[{bounds}]"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def ravel_offset(offset: Sequence[int], shape: Sequence[int]) -> int:
    """Flat number of the element at `offset` in a tensor of the given shape."""
    return sum(o * s for o, s in zip(offset, strides_of(shape), strict=True))


def boxes_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the flat range [start, stop) of a tensor into boxes, in flat order.

    Each box is contiguous in flat order, so the elements of the range, in order, are the elements
    of the boxes, in order. There are at most 2n - 1 boxes for n >= 1 dims. A ValueError says that
    the range is reversed or leaves the tensor.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"flat range {start}:{stop} does not lie in a tensor of {size} elements")
    return list(_flat_boxes(tuple(shape), start, stop)) if start < stop else []


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes of a non-empty flat range: a ragged head, whole rows, a ragged tail."""
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row

    def in_row(number: int, begin: int, end: int) -> Iterator[Box]:
        for box in _flat_boxes(shape[1:], begin, end):
            yield Box((number, *box.offset), (1, *box.shape))

    if first == last:
        yield from in_row(first, start % row, stop % row)
        return
    if start % row:
        yield from in_row(first, start % row, row)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if stop % row:
        yield from in_row(last, 0, stop % row)


def subtract(box: Box, hole: Box) -> list[Box]:
    """The parts of `box` outside `hole`, as disjoint boxes (at most two per dim)."""
    common = box.intersect(hole)
    if common is None:
        return [box] if box.size else []
    rest = []
    offset, end = list(box.offset), list(box.end)
    for dim in range(box.ndim):
        for start, stop in ((offset[dim], common.offset[dim]), (common.end[dim], end[dim])):
            if start < stop:
                bounds = list(zip(offset, end, strict=True))
                bounds[dim] = (start, stop)
                rest.append(Box.from_slices(*bounds))
        offset[dim], end[dim] = common.offset[dim], common.end[dim]
    return rest


def uncovered(whole: Box, boxes: Sequence[Box]) -> list[Box]:
    """The parts of `whole` that none of `boxes` covers, as disjoint boxes."""
    rest = [whole] if whole.size else []
    for box in boxes:
        rest = [part for piece in rest for part in subtract(piece, box)]
        if not rest:
            break
    return rest


def flat_span(shape: Sequence[int], box: Box) -> tuple[int, int, bool]:
    """First element and end of a box in the flat order, and if all in between are in the box."""
    start = ravel_offset(box.offset, shape)
    last = ravel_offset([e - 1 for e in box.end], shape)
    return start, last + 1, last + 1 - start == box.size


# ---------------------------------------------------------------------------------------------
# Many boxes at once
#
# Rows are many and dims are few, so these go from dim to dim, over all rows at once: numpy's own
# reductions along the short axis take several times as long.
# ---------------------------------------------------------------------------------------------


def flat_runs(shape: Sequence[int], box: Box) -> tuple[IntArray, int]:
    """The flat element at which each contiguous run of a box begins, and a run's elements."""
    strides, whole = strides_of(shape), len(shape)
    while whole and box.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    # All dims from here on belong to one run.
    split = max(whole - 1, 0)
    starts = np.array([ravel_offset(box.offset, shape)], np.int64)
    for dim in range(split):
        steps = np.arange(box.shape[dim], dtype=np.int64) * strides[dim]
        starts = (starts[:, None] + steps).reshape(-1)
    return starts, math.prod(box.shape[split:])


def pad_dims(rows: Sequence[Sequence[int]], num_dims: int, fill: int) -> IntArray:
    """Stack ragged integer rows into one (n, num_dims) array, padded at the end with `fill`."""
    padded = np.full((len(rows), num_dims), fill, dtype=np.int64)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    padded[np.arange(num_dims) < lengths[:, None]] = list(chain.from_iterable(rows))
    return padded


def row_products(shapes: IntArray) -> IntArray:
    """Number of elements of each row of an (n, d) array of shapes."""
    sizes = np.ones(len(shapes), dtype=np.int64)
    for dim in range(shapes.shape[1]):
        sizes *= shapes[:, dim]
    return sizes


def row_strides(shapes: IntArray) -> IntArray:
    """Row-major strides, in elements, of each row of an (n, d) array of shapes."""
    strides = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 1, 0, -1):
        np.multiply(strides[:, dim], shapes[:, dim], out=strides[:, dim - 1])
    return strides


def flat_spans(
    shapes: IntArray, offsets: IntArray, extents: IntArray
) -> tuple[IntArray, IntArray, BoolArray]:
    """`flat_span` of many non-empty boxes, row by row: starts, stops, contiguous."""
    strides = row_strides(shapes)
    starts = np.zeros(len(shapes), dtype=np.int64)
    stops = np.ones(len(shapes), dtype=np.int64)
    for dim in range(shapes.shape[1]):
        starts += offsets[:, dim] * strides[:, dim]
        stops += (extents[:, dim] - 1) * strides[:, dim]
    stops += starts
    return starts, stops, stops - starts == row_products(extents)


def intersect_rows(
    offsets: IntArray, extents: IntArray, other_offsets: IntArray, other_extents: IntArray
) -> tuple[IntArray, IntArray, BoolArray]:
    """Intersect boxes row by row (broadcast): offsets and extents, defined where not empty."""
    start = np.maximum(offsets, other_offsets)
    extent = np.minimum(offsets + extents, other_offsets + other_extents) - start
    meets = np.ones(extent.shape[:-1], dtype=np.bool_)
    for dim in range(extent.shape[-1]):
        meets &= extent[..., dim] > 0
    return start, extent, meets
