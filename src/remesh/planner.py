"""Plans: who writes which box, and which bytes a load reads. Pure functions over tables.

Saving. Every rank says which boxes of which tensors it holds. `plan_save` finds the distinct boxes,
checks that they cover each tensor exactly once, and gives each to one of the ranks that hold it, so
that bytes are balanced: boxes with few holders first, large before small, each to the holder with
least to write so far.

Loading. `plan_load` needs no talk between ranks: it intersects what this rank wants with the pieces
of the index, turns the intersections into byte ranges, cuts long ranges, and merges near ones into
*runs*, each of which is one read into a bounded buffer.

Everything is columns of integers (see `remesh.index`): a job of a thousand ranks with a thousand
tensors each is a million rows, which numpy handles in a second and objects would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.coverage import MAX_SHOWN, check_coverage
from remesh.errors import CoverageError, StateError
from remesh.geometry import (
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
from remesh.index import BoxTable, Index, TensorTable
from remesh.state import Role

# ---------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """What one rank holds: boxes, and the role of each (`remesh.state.Role`)."""

    boxes: BoxTable
    roles: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Which rank writes which box.

    Attributes:
        boxes: The distinct boxes to store, sorted by tensor.
        writer: Rank that writes each box.
        row: Row of each box in its writer's holdings.
    """

    boxes: BoxTable
    writer: IntArray
    row: IntArray

    def assignments(self, world_size: int) -> list[IntArray]:
        """Rows of this plan that each rank writes, in the order of its file.

        Wide elements come first, so that every piece begins at a multiple of its element size.
        """
        itemsizes = self.boxes.tensors.itemsizes[self.boxes.tensor]
        order = np.lexsort((-itemsizes, self.writer))
        ends = np.searchsorted(self.writer[order], np.arange(1, world_size))
        return np.split(order, ends)

    def bytes_per_rank(self, world_size: int) -> IntArray:
        """Bytes of tensor data that each rank writes."""
        totals = np.zeros(world_size, dtype=np.int64)
        np.add.at(totals, self.writer, self.boxes.num_bytes)
        return totals


def plan_save(holdings: Sequence[Holdings]) -> SavePlan:
    """Plan a save.

    Args:
        holdings: What each rank holds, in rank order.

    Raises:
        StateError: If ranks disagree about the dtype or global shape of a tensor.
        CoverageError: If a tensor is not covered exactly once by main replicas.
    """
    tensors, renumber = merge_tensors([held.boxes.tensors for held in holdings])
    num_dims = tensors.shapes.shape[1]
    counts = [len(held.boxes) for held in holdings]
    rank = np.repeat(np.arange(len(holdings)), counts)
    row = np.concatenate([np.arange(count) for count in counts])
    tensor = np.concatenate(
        [to_new[held.boxes.tensor] for held, to_new in zip(holdings, renumber, strict=True)]
    )
    offsets = np.concatenate([_widen(held.boxes.offsets, num_dims, 0) for held in holdings])
    extents = np.concatenate([_widen(held.boxes.extents, num_dims, 1) for held in holdings])
    roles = np.concatenate([held.roles for held in holdings])

    filled = (extents > 0).all(axis=1)
    keys = [extents[filled, dim] for dim in reversed(range(num_dims))]
    keys += [offsets[filled, dim] for dim in reversed(range(num_dims))]
    order = np.flatnonzero(filled)[np.lexsort((rank[filled], *keys, tensor[filled]))]
    rank, row, roles = rank[order], row[order], roles[order]
    tensor, offsets, extents = tensor[order], offsets[order], extents[order]

    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (
        (tensor[1:] != tensor[:-1])
        | (offsets[1:] != offsets[:-1]).any(axis=1)
        | (extents[1:] != extents[:-1]).any(axis=1)
    )
    first = np.append(np.flatnonzero(is_new), len(order))
    boxes = BoxTable(tensors, tensor[is_new], offsets[is_new], extents[is_new])

    def holders(number: int) -> str:
        ranks = rank[first[number] : first[number + 1]].tolist()
        shown = ", ".join(map(str, ranks[:MAX_SHOWN])) + (", ..." if len(ranks) > MAX_SHOWN else "")
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

    _check_roles(boxes, roles, first, rank)
    check_coverage(boxes, holders)
    chosen = choose_writers(boxes.num_bytes, rank, first, len(holdings))
    return SavePlan(boxes, rank[chosen], row[chosen])


def merge_tensors(tables: Sequence[TensorTable]) -> tuple[TensorTable, list[IntArray]]:
    """Unite the tensors that ranks know, in order of first appearance.

    Returns:
        The united table, and for each table the new row of each of its rows.

    Raises:
        StateError: If ranks disagree about the dtype or global shape of a tensor.
    """
    rows: dict[str, int] = {}
    first_seen: list[tuple[int, int]] = []
    renumber = []
    known: dict[tuple[str, ...], IntArray] = {}
    for rank, table in enumerate(tables):
        to_new = known.get(table.names)
        if to_new is None:
            numbers = []
            for row, name in enumerate(table.names):
                number = rows.setdefault(name, len(rows))
                if number == len(first_seen):
                    first_seen.append((rank, row))
                numbers.append(number)
            to_new = np.array(numbers, dtype=np.int64)
            known[table.names] = to_new
        renumber.append(to_new)
    num_dims = max(table.shapes.shape[1] for table in tables)
    united = _gather_rows(tables, first_seen, num_dims)
    compared: set[int] = set()
    for rank, (table, to_new) in enumerate(zip(tables, renumber, strict=True)):
        # Ranks that hold parts of the same tensors may share one table.
        if id(table) in compared:
            continue
        compared.add(id(table))
        same = (
            (united.dtypes[to_new] == table.dtypes)
            & (united.ndims[to_new] == table.ndims)
            & (united.shapes[to_new] == _widen(table.shapes, num_dims, 1)).all(axis=1)
        )
        if not same.all():
            row = int(np.flatnonzero(~same)[0])
            other = int(to_new[row])
            raise StateError(
                f"{table.names[row]}: rank {rank} says {table.dtype(row).name} {table.shape(row)}, "
                f"rank {first_seen[other][0]} says {united.dtype(other).name} "
                f"{united.shape(other)}; the global shape and dtype must be the same on all ranks. "
                "If each rank holds a shard, describe it as a DTensor or remesh.ShardedTensor."
            )
    return united, renumber


def _gather_rows(
    tables: Sequence[TensorTable], places: Sequence[tuple[int, int]], num_dims: int
) -> TensorTable:
    """A table of rows picked from several tables."""
    dtypes = np.zeros(len(places), dtype=np.int64)
    ndims = np.zeros(len(places), dtype=np.int64)
    shapes = np.ones((len(places), num_dims), dtype=np.int64)
    at = np.array(places, dtype=np.int64).reshape(-1, 2)
    for number in np.unique(at[:, 0]).tolist():
        table, here = tables[number], at[:, 0] == number
        rows = at[here, 1]
        dtypes[here], ndims[here] = table.dtypes[rows], table.ndims[rows]
        shapes[here, : table.shapes.shape[1]] = table.shapes[rows]
    names = tuple(tables[table].names[row] for table, row in places)
    return TensorTable(names, dtypes, ndims, shapes)


def _widen(rows: IntArray, num_dims: int, fill: int) -> IntArray:
    """Rows padded to more dims."""
    missing = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows


def _check_roles(boxes: BoxTable, roles: IntArray, first: IntArray, rank: IntArray) -> None:
    """Every box needs somebody who may write it, and at most one who says to be the main one."""
    if not len(boxes):
        return
    mains = np.add.reduceat((roles == Role.MAIN).astype(np.int64), first[:-1])
    willing = np.add.reduceat((roles != Role.REPLICA).astype(np.int64), first[:-1])
    for wrong, complaint in (
        (mains > 1, "has several main replicas"),
        (willing == 0, "has replicas but no main replica"),
    ):
        if wrong.any():
            number = int(np.flatnonzero(wrong)[0])
            ranks = rank[first[number] : first[number + 1]].tolist()
            raise CoverageError(
                f"{boxes.tensors.names[boxes.tensor[number]]}: box {boxes.box(number)} {complaint}"
                f", held by ranks {ranks}; exactly one rank must hold a box with replica_id 0"
            )


def choose_writers(
    num_bytes: IntArray, rank: IntArray, first: IntArray, world_size: int
) -> IntArray:
    """For each distinct box, which of its holders (rows of `rank`) writes it."""
    num_holders = np.diff(first)
    chosen: IntArray = first[:-1].copy()
    alone = num_holders == 1
    loads = np.zeros(world_size, dtype=np.int64)
    np.add.at(loads, rank[chosen[alone]], num_bytes[alone])
    shared = np.flatnonzero(~alone)
    for number in shared[np.lexsort((-num_bytes[shared], num_holders[shared]))].tolist():
        ranks = rank[first[number] : first[number + 1]]
        best = int(np.argmin(loads[ranks]))
        chosen[number] = first[number] + best
        loads[ranks[best]] += num_bytes[number]
    return chosen


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


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
class LoadPlan:
    """What a rank reads, sorted by file and byte; rows of a run lie together.

    Attributes:
        want: Row in the wanted boxes of each region.
        piece: Row in the index's pieces of each region.
        offsets: (rows, d) offset of each region in its tensor.
        extents: (rows, d) shape of each region.
        start: First byte of each region in its file.
        stop: One past its last byte. The region is all of [start, stop) or lies strided in it.
        run_first: First row of each run, and the number of rows.
        run_start: First byte of each run, at a digest block's beginning.
        run_stop: One past its last byte, at a digest block's or the file's end.
    """

    want: IntArray
    piece: IntArray
    offsets: IntArray
    extents: IntArray
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
    return _arrange(index, _cut(index, _intersections(index, wanted), limits), limits)


def plan_regions(
    index: Index,
    regions: Sequence[tuple[IntArray, IntArray, IntArray, IntArray]],
    limits: ReadLimits,
) -> LoadPlan:
    """The plan that reads given regions, which have been cut already.

    Args:
        index: What is stored.
        regions: Tables of columns `want`, `piece`, `offsets` and `extents`; see `LoadPlan`.
        limits: Those that the regions were cut with.
    """
    return _arrange(index, _join([_Regions(*columns) for columns in regions]), limits)


def _arrange(index: Index, found: _Regions, limits: ReadLimits) -> LoadPlan:
    """Sort regions by place and merge them into runs."""
    start, stop = _byte_ranges(index, found)
    order = np.lexsort((start, index.file[found.piece]))
    found, start, stop = found.take(order), start[order], stop[order]
    run_first, run_start, run_stop = _merge_runs(index, found, start, stop, limits)
    return LoadPlan(
        found.want,
        found.piece,
        found.offsets,
        found.extents,
        start,
        stop,
        run_first,
        run_start,
        run_stop,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """Non-empty intersections of wanted boxes with pieces, a row each; see `LoadPlan`."""

    want: IntArray
    piece: IntArray
    offsets: IntArray
    extents: IntArray

    def take(self, rows: IntArray) -> _Regions:
        """Some of the rows."""
        return _Regions(
            self.want.take(rows),
            self.piece.take(rows),
            self.offsets.take(rows, axis=0),
            self.extents.take(rows, axis=0),
        )


def _byte_ranges(index: Index, found: _Regions) -> tuple[IntArray, IntArray]:
    """Where regions lie in their files: first bytes, and one past the last."""
    stored = index.boxes
    # `take` is several times as fast as indexing where rows are short.
    shapes = stored.extents.take(found.piece, axis=0)
    corners = stored.offsets.take(found.piece, axis=0)
    starts, stops, _ = flat_spans(shapes, found.offsets - corners, found.extents)
    itemsizes = stored.tensors.itemsizes.take(stored.tensor.take(found.piece))
    position = index.position.take(found.piece)
    return position + starts * itemsizes, position + stops * itemsizes


def windows_of(
    index: Index, piece: IntArray, offsets: IntArray, extents: IntArray, limits: ReadLimits
) -> IntArray:
    """The number of the window in which each region begins, the same on every rank.

    Args:
        index: What is stored.
        piece: Row in the index's pieces of each region.
        offsets: (rows, d) offset of each region in its tensor.
        extents: (rows, d) shape of each region.
        limits: Those that the regions were cut with.
    """
    start, _ = _byte_ranges(index, _Regions(piece, piece, offsets, extents))
    windows: IntArray = index.file[piece] * _windows_per_file(index, limits)
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


def _intersections(index: Index, wanted: BoxTable) -> _Regions:
    """Every non-empty intersection of a wanted box with a piece."""
    stored = index.boxes
    bounds = np.searchsorted(stored.tensor, np.arange(len(stored.tensors) + 1))
    num_pieces = bounds[wanted.tensor + 1] - bounds[wanted.tensor]
    want = np.repeat(np.arange(len(wanted)), num_pieces)
    ends = np.cumsum(num_pieces)
    piece = np.arange(len(want)) - np.repeat(ends - num_pieces, num_pieces)
    piece += np.repeat(bounds[wanted.tensor], num_pieces)
    offsets, extents, meets = intersect_rows(
        wanted.offsets.take(want, axis=0),
        wanted.extents.take(want, axis=0),
        stored.offsets.take(piece, axis=0),
        stored.extents.take(piece, axis=0),
    )
    found = _Regions(want, piece, offsets, extents).take(np.flatnonzero(meets))
    sizes = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(sizes, found.want, row_products(found.extents))
    wrong = np.flatnonzero(sizes != row_products(wanted.extents))
    if len(wrong):
        row = int(wrong[0])
        raise CoverageError(
            f"{wanted.tensors.names[wanted.tensor[row]]}: the checkpoint's pieces do not hold "
            f"box {wanted.box(row)} exactly once"
        )
    return found


def _cut(index: Index, found: _Regions, limits: ReadLimits) -> _Regions:
    """Cut regions that cross the end of a window or have long gaps."""
    stored = index.boxes
    start, stop = _byte_ranges(index, found)
    must_cut = start // limits.window_bytes != (stop - 1) // limits.window_bytes
    itemsizes = stored.tensors.itemsizes.take(stored.tensor.take(found.piece))
    shapes = stored.extents.take(found.piece, axis=0)
    gaps = longest_gaps(shapes, found.extents, (stop - start) // itemsizes)
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
    for row in np.flatnonzero(must_cut).tolist():
        piece = int(found.piece[row])
        corner = stored.offsets[piece]
        region = Box(
            tuple((found.offsets[row] - corner).tolist()), tuple(found.extents[row].tolist())
        )
        itemsize = stored.tensors.dtype(int(stored.tensor[piece])).itemsize
        shape = tuple(stored.extents[piece].tolist())
        cut = list(cut_region(shape, region, int(index.position[piece]), itemsize, limits))
        parts.append(
            _Regions(
                np.full(len(cut), found.want[row]),
                np.full(len(cut), piece),
                np.array([box.offset for box in cut], dtype=np.int64) + corner,
                np.array([box.shape for box in cut], dtype=np.int64),
            )
        )
    return _join(parts)


def _cut_between_steps(
    index: Index, found: _Regions, start: IntArray, stop: IntArray, window_bytes: int
) -> tuple[_Regions, BoolArray]:
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
    stored = index.boxes
    dim = np.argmax(found.extents > 1, axis=1)[:, None]
    strides = np.take_along_axis(row_strides(stored.extents[found.piece]), dim, axis=1)[:, 0]
    step = strides * stored.tensors.itemsizes[stored.tensor[found.piece]]
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


def _join(parts: Sequence[_Regions]) -> _Regions:
    """The regions of several tables in one."""
    return _Regions(
        np.concatenate([part.want for part in parts]),
        np.concatenate([part.piece for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.extents for part in parts]),
    )


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
    index: Index, found: _Regions, start: IntArray, stop: IntArray, limits: ReadLimits
) -> tuple[IntArray, IntArray, IntArray]:
    """Merge sorted byte ranges of one window into runs: first rows (and the end), starts, stops."""
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return np.zeros(1, dtype=np.int64), empty, empty
    file = index.file[found.piece]
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
