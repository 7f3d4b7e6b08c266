"""Indices, flat ranges and overlaps, in the argument shapes of Flex Checkpoint.

A flat range of a tensor in row-major order is rarely a rectangle. The smallest rectangle around it
follows from the first and the last element of the range: up to the first axis in which their
indices differ both have the same index, in that axis everything between the two is touched, and
below it the range has passed from the end of one row to the beginning of the next, so it touches
the whole extent of every further axis.

The elements of a range lie next to each other in any box that holds all of them, because what
row-major order of the box puts between two of them would lie between them in the tensor too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remesh.core.geometry import Box, ravel_offset

Overlap = tuple[bool, list[int] | None, list[int] | None, list[int] | None, list[int] | None]


def ravel_index(indices: Sequence[int], shape: Sequence[int]) -> int:
    """The flat number of an element in row-major order."""
    if len(indices) != len(shape) or not all(
        0 <= i < n for i, n in zip(indices, shape, strict=True)
    ):
        raise ValueError(f"there is no element {tuple(indices)} in a tensor of {tuple(shape)}")
    return ravel_offset(indices, shape)


def unravel_index(idx: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index in each axis of the element with a flat number."""
    if not 0 <= idx < math.prod(shape):
        raise ValueError(f"there is no element number {idx} in a tensor of {tuple(shape)}")
    indices = []
    for extent in reversed(shape):
        idx, index = divmod(idx, extent)
        indices.append(index)
    return tuple(reversed(indices))


def minimal_nd_slice(
    shape: Sequence[int], flat_start: int, flat_end: int
) -> tuple[list[tuple[int, int]], tuple[int, ...], tuple[int, ...]]:
    """The smallest slice that holds a flat range, and the indices of its first and last element."""
    if flat_start >= flat_end:
        raise ValueError(f"the flat range [{flat_start}, {flat_end}) is empty")
    first, last = unravel_index(flat_start, shape), unravel_index(flat_end - 1, shape)
    slices: list[tuple[int, int]] = []
    same_row = True
    for start, stop, extent in zip(first, last, shape, strict=True):
        slices.append((start, stop + 1) if same_row else (0, extent))
        same_row = same_row and start == stop
    return slices, first, last


def flat_range_in_min_slice(
    shape: Sequence[int],
    min_slices: Sequence[tuple[int, int]],
    flat_start: int,
    flat_end: int,
) -> tuple[int, int]:
    """Where a flat range of a tensor lies in the flattened content of a slice of the tensor.

    Any slice that holds the whole range will do, not the smallest alone.
    """
    box = Box.from_slices(*min_slices)

    def place(flat: int) -> int:
        inside = [i - o for i, o in zip(unravel_index(flat, shape), box.offset, strict=True)]
        return ravel_index(inside, box.shape)

    start, end = place(flat_start), place(flat_end - 1) + 1
    if end - start != flat_end - flat_start:
        raise ValueError(f"the slice {box} does not hold all of [{flat_start}, {flat_end})")
    return start, end


def get_overlap_region(
    desc_offset: Sequence[int],
    desc_shape: Sequence[int],
    shard_offset: Sequence[int],
    shard_shape: Sequence[int],
) -> Overlap:
    """True if two boxes of a tensor overlap, and where.

    Then come offset and shape of what they have in common, and where that begins in the first and
    in the second box; these are None if they do not overlap.
    """
    desc = Box(tuple(desc_offset), tuple(desc_shape))
    shard = Box(tuple(shard_offset), tuple(shard_shape))
    common = desc.intersect(shard)
    if common is None:
        return False, None, None, None, None
    return (
        True,
        list(common.offset),
        list(common.shape),
        list(common.relative_to(desc).offset),
        list(common.relative_to(shard).offset),
    )
