"""Do boxes cover tensors exactly once? Asked of every save, so it must be fast for millions.

Three tests of rising cost, each applied to the tensors that the one before could not decide:

1. *Chain*: every box of the tensor is contiguous in flat order, and sorted by flat start each
   begins where the one before ends. Decides whole tensors, dim-0 shards, and flattened ranges, for
   all tensors at once.
2. *Grid*: the extents add up to the tensor, and the boxes are cells between the cut points of each
   dim. Decides every regular or ragged grid, one tensor at a time.
3. *Search*: the extents add up to the tensor and no two boxes overlap. Decides everything else.

Only when a tensor fails are the offending boxes worked out, for the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from remesh._repr import listed
from remesh.core.geometry import (
    BoolArray,
    Box,
    IntArray,
    flat_spans,
    intersect_rows,
    row_products,
    uncovered,
)
from remesh.core.tables import BoxTable
from remesh.errors import CoverageError

MAX_SHOWN = 4
"""How many boxes of a faulty tensor an error message lists."""


def check_coverage(boxes: BoxTable, holders: Callable[[int], str]) -> None:
    """Check that distinct boxes, sorted by tensor, cover each tensor exactly once.

    `holders` says which ranks hold a row, for the message about the first faulty tensors.
    """
    num_tensors = len(boxes.tensors)
    faulty = faulty_tensors(boxes)
    if faulty:
        bounds = _bounds(boxes)
        shown = [_explain(boxes, row, bounds, holders) for row in faulty[:MAX_SHOWN]]
        more = f"\n... and {len(faulty) - MAX_SHOWN} more" if len(faulty) > MAX_SHOWN else ""
        raise CoverageError(
            f"{len(faulty)} of {num_tensors} tensors are not covered exactly once by main "
            "replicas:\n" + "\n".join(shown) + more
        )


def faulty_tensors(boxes: BoxTable) -> list[int]:
    """Rows of tensors that distinct boxes, sorted by tensor, do not cover exactly once."""
    sizes = row_products(boxes.tensors.shapes)
    covered = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(covered, boxes.tensor, row_products(boxes.extents))
    bounds = _bounds(boxes)
    faulty = []
    for row in np.flatnonzero(_undecided_by_chain(boxes, sizes)).tolist():
        rows = slice(int(bounds[row]), int(bounds[row + 1]))
        offsets, extents = boxes.offsets[rows], boxes.extents[rows]
        exact = covered[row] == sizes[row]
        if not exact or not (_is_grid(offsets, extents) or not _overlaps(offsets, extents)):
            faulty.append(row)
    return faulty


def _bounds(boxes: BoxTable) -> IntArray:
    """First box of each tensor, and the number of boxes."""
    bounds: IntArray = np.searchsorted(boxes.tensor, np.arange(len(boxes.tensors) + 1))
    return bounds


def _undecided_by_chain(boxes: BoxTable, sizes: IntArray) -> BoolArray:
    """Which tensors the chain test does not prove to be covered exactly once."""
    num_tensors = len(sizes)
    starts, stops, contiguous = flat_spans(
        boxes.tensors.shapes[boxes.tensor], boxes.offsets, boxes.extents
    )
    order = np.lexsort((starts, boxes.tensor))
    tensor, starts, stops = boxes.tensor[order], starts[order], stops[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = tensor[1:] != tensor[:-1]
    expected = np.zeros(len(order), dtype=np.int64)
    expected[1:] = stops[:-1]
    expected[is_first] = 0
    breaks = (starts != expected) | ~contiguous[order]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = is_first[1:]
    breaks |= is_last & (stops != sizes[tensor])
    undecided = np.zeros(num_tensors, dtype=np.bool_)
    undecided[tensor[breaks]] = True
    has_boxes = np.zeros(num_tensors, dtype=np.bool_)
    has_boxes[tensor] = True
    undecided |= ~has_boxes & (sizes > 0)
    return undecided


def _is_grid(offsets: IntArray, extents: IntArray) -> bool:
    """True if boxes are cells between the cut points of each dim; distinct ones do not overlap."""
    for dim in range(offsets.shape[1]):
        cuts = np.unique(np.concatenate((offsets[:, dim], offsets[:, dim] + extents[:, dim])))
        first = np.searchsorted(cuts, offsets[:, dim])
        last = np.searchsorted(cuts, offsets[:, dim] + extents[:, dim])
        if (last - first != 1).any():
            return False
    return True


def _overlaps(offsets: IntArray, extents: IntArray) -> bool:
    """True if any two boxes have an element in common."""
    return next(_overlapping_pairs(offsets, extents), None) is not None


def _overlapping_pairs(offsets: IntArray, extents: IntArray) -> Iterator[tuple[int, int]]:
    """Pairs of rows whose boxes overlap, swept along the dim with most distinct offsets."""
    sweep = max(range(offsets.shape[1]), key=lambda dim: len(np.unique(offsets[:, dim])))
    order = np.argsort(offsets[:, sweep], kind="stable")
    offsets, extents = offsets[order], extents[order]
    begins = offsets[:, sweep]
    # Boxes that begin before this one ends are the only ones that can meet it.
    limits = np.searchsorted(begins, begins + extents[:, sweep])
    for row, limit in enumerate(limits.tolist()):
        others = slice(row + 1, limit)
        _, _, meets = intersect_rows(offsets[row], extents[row], offsets[others], extents[others])
        for other in np.flatnonzero(meets).tolist():
            yield int(order[row]), int(order[row + 1 + other])


def _explain(boxes: BoxTable, row: int, bounds: IntArray, holders: Callable[[int], str]) -> str:
    """Say what is wrong with one tensor."""
    first, last = int(bounds[row]), int(bounds[row + 1])
    shape = boxes.tensors.shape(row)
    pieces = [boxes.box(piece) for piece in range(first, last)]
    complaints = []
    holes = uncovered(Box.whole(shape), pieces)
    if holes:
        complaints.append(f"no rank holds {listed(holes, MAX_SHOWN)}")
    pairs = []
    for a, b in _overlapping_pairs(boxes.offsets[first:last], boxes.extents[first:last]):
        pairs.append(f"{pieces[a]} ({holders(first + a)}) and {pieces[b]} ({holders(first + b)})")
        if len(pairs) > MAX_SHOWN:
            break
    if pairs:
        complaints.append(f"these overlap: {listed(pairs, MAX_SHOWN)}")
    return f"  {boxes.tensors.names[row]} {shape}: " + "; ".join(complaints)
