"""Hypothesis strategies for shapes, boxes, and ways of cutting a tensor into boxes.

Frameworks cut tensors in a few ways, and each has its own traps: even grids (tensor and data
parallelism), ragged grids (uneven shards, experts), flat ranges (ZeRO-style optimizers), and no
grid at all (several frameworks that hold parts of one tensor). `partitions` draws all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from remesh.core.geometry import Box, boxes_of_flat_range

Shape = tuple[int, ...]


def shapes(
    *, min_dims: int = 0, max_dims: int = 4, min_extent: int = 1, max_extent: int = 5
) -> st.SearchStrategy[Shape]:
    """Shapes of small tensors."""
    extents = st.integers(min_extent, max_extent)
    return st.lists(extents, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape, *, min_extent: int = 0) -> Box:
    """A box in a tensor of the given shape, in each dim at least `min_extent` long if it can be."""
    bounds = []
    for extent in shape:
        start = draw(st.integers(0, extent - min(min_extent, extent)))
        bounds.append((start, draw(st.integers(min(start + min_extent, extent), extent))))
    return Box.from_slices(*bounds)


def cells(cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The cells of a grid, given the cut points of each dim, ends included."""
    return [Box.from_slices(*bounds) for bounds in itertools.product(*map(pairwise, cuts))]


@st.composite
def even_grids(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """A grid as `torch.chunk` makes it: equal cells, but for shorter ones at the end."""
    cuts = []
    for extent in shape:
        step = -(-extent // draw(st.integers(1, max(extent, 1))))
        cuts.append([*range(0, extent, max(step, 1)), extent])
    return cells(cuts)


@st.composite
def ragged_grids(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """A grid whose cells are of any extents."""
    cuts = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, max(extent - 1, 1)), max_size=3))
        cuts.append(sorted({0, extent} | {cut for cut in inner if cut < extent}))
    return cells(cuts)


@st.composite
def guillotines(draw: st.DrawFn, shape: Shape, *, max_cuts: int = 6) -> list[Box]:
    """What is left of a tensor after cutting it, then one of its parts, and so on, in two."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.shape[dim] - 1))
        rest = (*box.shape[:dim], box.shape[dim] - cut, *box.shape[dim + 1 :])
        moved = (*box.offset[:dim], box.offset[dim] + cut, *box.offset[dim + 1 :])
        boxes.append(Box(box.offset, (*box.shape[:dim], cut, *box.shape[dim + 1 :])))
        boxes.append(Box(moved, rest))
    return boxes


@st.composite
def flat_ranges(draw: st.DrawFn, shape: Shape, *, max_ranges: int = 4) -> list[Box]:
    """The boxes of a flattened tensor that is cut into ranges."""
    size = math.prod(shape)
    inner = draw(st.sets(st.integers(0, size), max_size=max_ranges - 1))
    cuts = sorted(inner | {0, size})
    return [
        box for start, stop in pairwise(cuts) for box in boxes_of_flat_range(shape, start, stop)
    ]


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Non-empty boxes, in any order, that hold every element of a tensor exactly once."""
    boxes = draw(
        st.one_of(even_grids(shape), ragged_grids(shape), guillotines(shape), flat_ranges(shape))
    )
    return draw(st.permutations([box for box in boxes if box.size]))
