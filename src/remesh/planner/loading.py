"""Which bytes a load reads.

`plan_load` needs no talk between ranks: it intersects what this rank wants with the pieces of the
index, turns the intersections into byte ranges, cuts long ranges, and merges near ones into *runs*,
each of which is one read into a bounded buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.errors import CoverageError
from remesh.geometry import (
    MAX_ELEMENTS,
    BoolArray,
    Box,
    IntArray,
    boxes_of_flat_range,
    flat_span,
    flat_spans,
    intersect_rows,
    row_products,
    row_strides,
    strides_of,
)
from remesh.index import Index
from remesh.pieces import PieceRows, distinct, ranges
from remesh.tables import BoxTable


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How a load cuts and merges reads.

    Attributes:
        window_bytes: Files are read in windows that begin at multiples of this, which is a
            multiple of every digest block. No read crosses a window's end, so it bounds the buffer
            of each reading thread, and no block is read twice.
        gap_bytes: Bytes between two ranges that are read rather than skipped: on disks and object
            stores a request costs as much as reading this much.
    """

    window_bytes: int = 2 << 20
    gap_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes, each of which lies in one piece of an index, a row each.

    Attributes:
        want: Number of the wanted box that each is a part of.
        piece: Row in the index's pieces of each.
        offsets: (rows, d) offset of each in its tensor.
        extents: (rows, d) shape of each.
    """

    want: IntArray
    piece: IntArray
    offsets: IntArray
    extents: IntArray

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
class LoadPlan:
    """What a rank reads, sorted by file and byte; regions of a run lie together.

    Attributes:
        regions: What is read.
        limits: How it was cut.
        start: First byte of each region in its file.
        stop: One past its last byte. The region is all of [start, stop) or lies strided in it.
        run_first: First region of each run, and the number of regions.
        run_start: First byte of each run, at a digest block's beginning.
        run_stop: One past its last byte, at a digest block's or the file's end.
    """

    regions: Regions
    limits: ReadLimits
    start: IntArray
    stop: IntArray
    run_first: IntArray
    run_start: IntArray
    run_stop: IntArray

    @property
    def num_runs(self) -> int:
        """Number of reads."""
        return len(self.run_start)

    @property
    def longest_run(self) -> int:
        """Bytes of the longest run."""
        return int((self.run_stop - self.run_start).max(initial=0))

    @property
    def bytes_read(self) -> int:
        """Bytes that the runs read."""
        return int((self.run_stop - self.run_start).sum())


def plan_load(index: Index, wanted: BoxTable, limits: ReadLimits) -> LoadPlan:
    """Plan the reads of one rank.

    Args:
        index: What is stored.
        wanted: Boxes to fill; `wanted.tensors` is the index's own table of tensors.
        limits: How to cut and merge reads.

    Raises:
        CoverageError: If the stored pieces do not hold every wanted element (a foreign or damaged
            index; what remesh writes is checked when it is saved).
    """
    return plan_regions(index, _cut(index, _intersections(index, wanted), limits), limits)


def plan_regions(index: Index, found: Regions, limits: ReadLimits) -> LoadPlan:
    """Plan the reads of regions that have been cut already: sort them, and merge them into runs.

    Args:
        index: What is stored.
        found: The regions.
        limits: Those that the regions were cut with.
    """
    file, start, stop = _byte_ranges(index, found)
    order = _order(file, start)
    found, file, start, stop = found.take(order), file[order], start[order], stop[order]
    run_first, run_start, run_stop = _merge_runs(index, file, start, stop, limits)
    return LoadPlan(found, limits, start, stop, run_first, run_start, run_stop)


def _order(file: IntArray, start: IntArray) -> IntArray:
    """The order of byte ranges by file, then by first byte."""
    longest = int(start.max(initial=0)) + 1
    if (int(file.max(initial=0)) + 1) * longest < MAX_ELEMENTS:
        # Those of a tensor are mostly in order, which makes one sort by one key fast.
        return np.argsort(file * longest + start, kind="stable")
    return np.lexsort((start, file))


def _byte_ranges(index: Index, found: Regions) -> tuple[IntArray, IntArray, IntArray]:
    """Where regions lie: rows of their files, first bytes, and one past the last."""
    rows = index.rows(found.piece)
    starts, stops, _ = flat_spans(rows.extents, found.offsets - rows.offsets, found.extents)
    itemsizes, position = index.tensors.itemsizes.take(rows.tensor), rows.position
    return rows.file, position + starts * itemsizes, position + stops * itemsizes


def windows_of(index: Index, regions: Regions, limits: ReadLimits) -> IntArray:
    """The number of the window in which each region begins, the same on every rank.

    Args:
        index: What is stored.
        regions: The regions.
        limits: Those that the regions were cut with.
    """
    file, start, _ = _byte_ranges(index, regions)
    windows: IntArray = file * _windows_per_file(index, limits)
    return windows + start // limits.window_bytes


def files_of_windows(index: Index, windows: IntArray, limits: ReadLimits) -> IntArray:
    """The file in which each window lies, as rows of `index.files`."""
    return windows // _windows_per_file(index, limits)


def _windows_per_file(index: Index, limits: ReadLimits) -> int:
    return max((file.num_bytes for file in index.files), default=0) // limits.window_bytes + 1


def longest_gaps(shapes: IntArray, extents: IntArray, spans: IntArray) -> IntArray:
    """Longest stretch of flat elements between two elements of a box, row by row.

    It is the one after a step of the first dim in which the box extends: gaps inside a step leave
    out fewer dims.

    Args:
        shapes: Shapes of the tensors or pieces.
        extents: Shapes of non-empty boxes in them.
        spans: From the first to one past the last flat element of each box.
    """
    dim = np.argmax(extents > 1, axis=1)[:, None]
    step = np.take_along_axis(row_strides(shapes), dim, axis=1)[:, 0]
    num_steps = np.take_along_axis(extents, dim, axis=1)[:, 0]
    return np.where(num_steps > 1, step * num_steps - spans, 0)


def _intersections(index: Index, wanted: BoxTable) -> Regions:
    """Every non-empty intersection of a wanted box with a piece.

    Equal boxes that are wanted of tensors that are cut alike are intersected once.
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
    counts = np.bincount(kind, minlength=len(kinds))
    again = ranges((np.cumsum(counts) - counts)[of], counts[of])
    want = np.repeat(np.arange(len(wanted)), counts[of])
    piece = within.take(again)
    piece += index.first_pieces.take(wanted.tensor).take(want)
    return Regions(want, piece, offsets.take(again, axis=0), extents.take(again, axis=0))


def _cut(index: Index, found: Regions, limits: ReadLimits) -> Regions:
    """Cut regions that cross the end of a window or have long gaps."""
    _, start, stop = _byte_ranges(index, found)
    must_cut = start // limits.window_bytes != (stop - 1) // limits.window_bytes
    rows = index.rows(found.piece)
    itemsizes = index.tensors.itemsizes.take(rows.tensor)
    gaps = longest_gaps(rows.extents, found.extents, (stop - start) // itemsizes)
    has_gaps = gaps * itemsizes > limits.gap_bytes
    easy = np.flatnonzero(must_cut & ~has_gaps)
    must_cut |= has_gaps
    if not must_cut.any():
        return found
    between, is_done = _cut_between_steps(
        index, found.take(easy), start[easy], stop[easy], limits.window_bytes
    )
    parts = [found.take(np.flatnonzero(~must_cut)), between]
    must_cut[easy[is_done]] = False
    left = found.take(np.flatnonzero(must_cut))
    rows = index.rows(left.piece)
    itemsizes, positions = index.tensors.itemsizes[rows.tensor].tolist(), rows.position.tolist()
    corners, shapes = rows.offsets, rows.extents.tolist()
    for row, (itemsize, position) in enumerate(zip(itemsizes, positions, strict=True)):
        corner = corners[row]
        region = Box(
            tuple((left.offsets[row] - corner).tolist()), tuple(left.extents[row].tolist())
        )
        cut = list(cut_region(tuple(shapes[row]), region, position, itemsize, limits))
        parts.append(
            Regions(
                np.full(len(cut), left.want[row]),
                np.full(len(cut), left.piece[row]),
                np.array([box.offset for box in cut], dtype=np.int64) + corner,
                np.array([box.shape for box in cut], dtype=np.int64),
            )
        )
    return Regions.join(parts)


def _cut_between_steps(
    index: Index, found: Regions, start: IntArray, stop: IntArray, window_bytes: int
) -> tuple[Regions, BoolArray]:
    """Cut regions at the ends of windows, as far as these fall between steps of a region.

    A region's steps are those of the first dim in which it extends. Columns of what was saved in
    rows are thousands of such regions, so they are cut at once.

    Args:
        index: What is stored.
        found: The regions.
        start: First byte of each in its file.
        stop: One past its last byte.
        window_bytes: Length of the windows.

    Returns:
        The parts of regions without a step that lies in two windows; and which these are.
    """
    rows = index.rows(found.piece)
    dim = np.argmax(found.extents > 1, axis=1)[:, None]
    strides = np.take_along_axis(row_strides(rows.extents), dim, axis=1)[:, 0]
    step = strides * index.tensors.itemsizes[rows.tensor]
    num_steps = np.take_along_axis(found.extents, dim, axis=1)[:, 0]
    length = stop - start - (num_steps - 1) * step
    first = start // window_bytes
    num_windows = (stop - 1) // window_bytes - first + 1
    row = np.repeat(np.arange(len(start)), num_windows)
    within = np.arange(len(row)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    begin = (first[row] + within) * window_bytes - start[row]
    low = np.clip(-(-begin // step[row]), 0, num_steps[row])
    high = np.clip((begin + window_bytes - length[row]) // step[row] + 1, 0, num_steps[row])
    whole_steps = np.zeros(len(start), dtype=np.int64)
    np.add.at(whole_steps, row, np.maximum(high - low, 0))
    is_done = whole_steps == num_steps
    kept = is_done[row] & (high > low)
    parts, here, low, high = found.take(row[kept]), dim[row[kept]], low[kept], high[kept]
    np.put_along_axis(
        parts.offsets, here, np.take_along_axis(parts.offsets, here, axis=1) + low[:, None], axis=1
    )
    np.put_along_axis(parts.extents, here, (high - low)[:, None], axis=1)
    return parts, is_done


def cut_region(
    shape: tuple[int, ...], region: Box, position: int, itemsize: int, limits: ReadLimits
) -> Iterator[Box]:
    """Cut a region of a row-major piece so that every part lies in one window, without long gaps.

    Args:
        shape: Shape of the piece.
        region: A non-empty box in the piece.
        position: First byte of the piece in its file, a multiple of `itemsize`.
        itemsize: Bytes of an element.
        limits: Windows and gaps.
    """
    for part in _split_at_gaps(shape, region, limits.gap_bytes // itemsize):
        start, stop, _ = flat_span(shape, part)
        while start < stop:
            window = (position + start * itemsize) // limits.window_bytes + 1
            end = min(stop, -(-(window * limits.window_bytes - position) // itemsize))
            for box in boxes_of_flat_range(shape, start, end):
                inside = box.intersect(part)
                if inside is not None:
                    yield inside
            start = end


def _split_at_gaps(shape: tuple[int, ...], region: Box, max_gap: int) -> Iterator[Box]:
    """Split a region until no gap between its elements, in flat order, is longer than `max_gap`."""
    dim = next((d for d, extent in enumerate(region.shape) if extent > 1), None)
    if dim is None:
        yield region
        return

    def step(number: int) -> Box:
        offset = (*region.offset[:dim], region.offset[dim] + number, *region.offset[dim + 1 :])
        return Box(offset, (*region.shape[:dim], 1, *region.shape[dim + 1 :]))

    start, stop, _ = flat_span(shape, step(0))
    # As in `longest_gaps`.
    if strides_of(shape)[dim] - (stop - start) <= max_gap:
        yield region
        return
    for number in range(region.shape[dim]):
        yield from _split_at_gaps(shape, step(number), max_gap)


def _merge_runs(
    index: Index, file: IntArray, start: IntArray, stop: IntArray, limits: ReadLimits
) -> tuple[IntArray, IntArray, IntArray]:
    """Merge sorted byte ranges of one window into runs: first rows (and the end), starts, stops."""
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return np.zeros(1, dtype=np.int64), empty, empty
    window = start // limits.window_bytes
    if index.block_size:
        # Whole blocks are read, so the gaps that count are those between blocks.
        sizes = np.array([stored.num_bytes for stored in index.files], dtype=np.int64)
        start = start - start % index.block_size
        stop = np.minimum(stop + -stop % index.block_size, sizes[file])
    is_first = np.ones(len(start), dtype=np.bool_)
    is_first[1:] = (file[1:] != file[:-1]) | (window[1:] != window[:-1])
    # Ranges may overlap, so what counts is how far any range of the window has reached.
    begin = window * limits.window_bytes
    ahead = np.cumsum(is_first) * (int((stop - begin).max()) + 1)
    reached = np.maximum.accumulate(ahead + stop - begin) - ahead + begin
    is_first[1:] |= start[1:] - reached[:-1] > limits.gap_bytes
    run_first = np.flatnonzero(is_first)
    run_stop = np.maximum.reduceat(stop, run_first)
    return np.append(run_first, len(start)), start[run_first], run_stop
