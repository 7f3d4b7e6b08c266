"""Indices, flat ranges and overlaps: the examples of the documentation, and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from remesh.compat.flex_checkpoint import (
    flat_range_in_min_slice,
    get_overlap_region,
    minimal_nd_slice,
    ravel_index,
    unravel_index,
)


def check_range(shape: tuple[int, ...], start: int, end: int) -> None:
    slices, first, last = minimal_nd_slice(shape, start, end)
    indices = [unravel_index(flat, shape) for flat in range(start, end)]
    assert indices == [tuple(map(int, np.unravel_index(n, shape))) for n in range(start, end)]
    bounds = [(min(of_axis), max(of_axis) + 1) for of_axis in zip(*indices, strict=True)]
    assert slices == bounds
    assert (ravel_index(first, shape), ravel_index(last, shape)) == (start, end - 1)
    whole = np.arange(math.prod(shape)).reshape(shape)
    inside = whole[tuple(slice(a, b) for a, b in slices)].reshape(-1)
    begin, stop = flat_range_in_min_slice(shape, slices, start, end)
    assert inside[begin:stop].tolist() == list(range(start, end))
    # A slice that is larger than needed will do, too.
    assert flat_range_in_min_slice(shape, [(0, n) for n in shape], start, end) == (start, end)


def test_documented_examples() -> None:
    assert ravel_index((1, 2, 3), (2, 3, 4)) == 23
    assert unravel_index(23, (2, 3, 4)) == (1, 2, 3)
    assert minimal_nd_slice((4, 3), 5, 8) == ([(1, 3), (0, 3)], (1, 2), (2, 1))
    assert flat_range_in_min_slice((4, 3), [(1, 3), (0, 3)], 5, 8) == (2, 5)
    found = get_overlap_region((0, 0), (4, 4), (2, 2), (4, 4))
    assert found == (True, [2, 2], [2, 2], [2, 2], [0, 0])
    assert get_overlap_region((0, 0), (2, 4), (2, 0), (2, 4)) == (False, None, None, None, None)


def test_every_range_of_three_dims() -> None:
    """The listing that is in common use is wrong for 42 of these 300."""
    ranges = list(itertools.combinations(range(25), 2))
    assert len(ranges) == 300
    for start, end in ranges:
        check_range((2, 3, 4), start, end)


def test_what_is_outside_is_refused() -> None:
    for wrong in ((2, 0, 0), (0, 3, 0), (-1, 0, 0), (0, 0)):
        with pytest.raises(ValueError, match=r"coordinates|multi_index"):
            ravel_index(wrong, (2, 3, 4))
    for flat in (-1, 24):
        with pytest.raises(ValueError, match="out of bounds"):
            unravel_index(flat, (2, 3, 4))
    with pytest.raises(ValueError, match="empty"):
        minimal_nd_slice((2, 3, 4), 5, 5)
    with pytest.raises(ValueError, match="does not hold all of"):
        flat_range_in_min_slice((4, 3), [(1, 3), (0, 2)], 4, 8)
