"""Ranks without processes: sources and targets cut into boxes, moved box by box.

This is what an engine does with a resolved transformation, with nothing but numpy: each rank asks
for the regions of the boxes that it holds, finds the stored pieces that each region touches, and
takes of a piece only what the region asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.core.geometry import Box
from remesh.transform import Region
from remesh.transform.arrays import arranged

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on some rank; elements outside of it exist on other ranks only."""

    box: Box
    data: Array


def cut_evenly(shape: Sequence[int], num_parts: Sequence[int]) -> list[Box]:
    """A grid of boxes, as even as can be."""
    bounds = []
    for extent, count in zip(shape, num_parts, strict=True):
        cuts = [extent * number // count for number in range(count + 1)]
        bounds.append(list(itertools.pairwise(cuts)))
    return [Box.from_slices(*cell) for cell in itertools.product(*bounds)]


def numbered(*shape: int, start: int = 0) -> Array:
    """An array whose elements are their flat numbers, from a first one on."""
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def pieces_of(array: Array, boxes: Sequence[Box]) -> list[Piece]:
    """An array cut into pieces, each with memory of its own."""
    return [Piece(box, array[box.slices].copy()) for box in boxes]


def round_bf16(values: npt.ArrayLike) -> Array:
    """Values rounded to bfloat16, nearest even, as float32. NaN is not expected."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def converted(block: Array, dtypes: Sequence[str]) -> Array:
    """Elements converted as a region says, but kept as float32."""
    for dtype in dtypes:
        if dtype == "bfloat16":
            block = round_bf16(block)
        else:
            with np.errstate(over="ignore"):
                block = block.astype(dtype).astype(np.float32)
    return block


def fetch(regions: Sequence[Region], sources: Mapping[str, Sequence[Piece]], box: Box) -> Array:
    """One box of a target, put together from pieces; every element must come exactly once."""
    result = np.full(box.shape, np.nan, np.float32)
    times = np.zeros(box.shape, np.int64)
    for region in regions:
        for piece in sources[region.source]:
            for part in region.restrict(piece.box):
                data = piece.data[part.source_box.relative_to(piece.box).slices]
                place = part.target_box.relative_to(box).slices
                result[place] = converted(arranged(data, part), part.dtypes)
                times[place] += 1
    assert (times == 1).all(), f"elements come {times.tolist()} times"
    return result
