"""Which bytes a load reads.

`plan_load` needs no talk between ranks: it intersects what this rank wants with the pieces of the
index, turns the intersections into byte ranges, cuts long ranges, and merges near ones into *runs*,
each of which is one read into a bounded buffer. Where thousands of files hold alike, this is done
for one file of each kind (`LoadPlan`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remesh.core.geometry import (
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
from remesh.core.index import Index
from remesh.core.pieces import Lists, PieceRows, distinct, ranges
from remesh.core.tables import BoxTable
from remesh.errors import CoverageError


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes, each of which lies in one piece of an index, a row each."""

    want: IntArray  # number of the wanted box that each is a part of
    piece: IntArray  # row in the index's pieces of each
    offsets: IntArray  # (rows, d) offset of each in its tensor
    extents: IntArray  # (rows, d) shape of each

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
class Parts:
    """Wanted parts of pieces, for one of all wanted boxes that are alike; sorted by kind of box."""

    of: IntArray  # the kind of each wanted box
    kind: IntArray  # the kind of box of each part
    within: IntArray  # the number of its piece in the tensor
    offsets: IntArray  # (parts, d) offset of each in its tensor
    extents: IntArray  # (parts, d) shape of each

    def of_kinds(self, kinds: IntArray) -> tuple[IntArray, IntArray]:
        """Parts of some kinds of boxes: for each the place of its kind among these, and its row."""
        counts = np.bincount(self.kind, minlength=int(self.of.max(initial=-1)) + 1)
        rows = ranges((np.cumsum(counts) - counts)[kinds], counts[kinds])
        return np.repeat(np.arange(len(kinds)), counts[kinds]), rows

    def regions(self, index: Index, wanted: BoxTable) -> Regions:
        """The parts of all wanted boxes."""
        want, row = self.of_kinds(self.of)
        piece = self.within.take(row)
        piece += index.first_pieces.take(wanted.tensor).take(want)
        return Regions(want, piece, self.offsets.take(row, axis=0), self.extents.take(row, axis=0))


def intersections(index: Index, wanted: BoxTable) -> Parts:
    """Every non-empty intersection of a wanted box with a piece.

    Equal boxes that are wanted of tensors that are cut alike are intersected once.

    Raises:
        CoverageError: If pieces do not hold every element of these exactly once.
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
    return Parts(of, kind, within, offsets, extents)


MIN_ALIKE = 2
"""Boxes of a kind, and files of a kind, on average, for which one file of each kind is planned."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How a load cuts and merges reads."""

    window_bytes: int = 8 << 20
    """Files are read in windows that begin at multiples of this, which is a multiple of every
    digest block. No read crosses a window's end, so it bounds the buffer of each reading thread,
    and no block is read twice. What a read costs besides its bytes weighs little in one of this
    length."""
    gap_bytes: int = 256 << 10
    """Bytes between two ranges that are read rather than skipped: on disks and object stores a
    request costs as much as reading this much."""
    num_reads: int = 4  # reads of a rank under way at a time
    page_bytes: int = mmap.PAGESIZE
    """Files without digest blocks are read from a multiple of this to another, for only such reads
    can go past the page cache. It divides `window_bytes`."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Reads, sorted by file and byte; regions of a run lie together."""

    regions: Regions  # what is read
    start: IntArray
    """First byte of each region in its file; the region lies there as a whole or strided."""
    first: IntArray  # first region of each run, and the number of regions
    run_start: IntArray  # first byte of each run, at the beginning of a digest block or a page
    run_stop: IntArray  # one past its last byte, at the end of one or of the file
    file: IntArray  # file of each run


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The columns that tell regions of files that are read alike apart."""

    part: IntArray  # for each region, its number among the wanted parts of pieces of its file
    first: IntArray  # the first wanted part of each file
    within: IntArray  # the number of each part's piece in its tensor
    corner: IntArray  # the offset of that piece


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """The reads of one rank.

    Files that hold alike, of which the same is wanted, are planned once: `runs` are those of one
    file of each kind. They have a row for each region, of which there may be many millions in all;
    `taken` makes the regions of some runs.
    """

    limits: ReadLimits  # how it was cut
    runs: Runs
    """Reads of files of each kind. Where there are `places`, their regions are relative to the
    pieces, and `piece` is the first of the tensor."""
    run: IntArray  # what each run of the plan repeats; runs are sorted by file and byte
    file: IntArray  # the file of each run
    places: _Places | None = None  # None if every file was planned

    @property
    def num_runs(self) -> int:
        """Number of reads."""
        return len(self.run)

    @property
    def run_start(self) -> IntArray:
        """First byte of each run, at the beginning of a digest block or a page."""
        return self.runs.run_start[self.run]

    @property
    def run_stop(self) -> IntArray:
        """One past the last byte of each run, at the end of one or of the file."""
        return self.runs.run_stop[self.run]

    @property
    def run_first(self) -> IntArray:
        """First region of each run, and the number of regions."""
        return np.append(0, np.cumsum(self.num_regions(np.arange(self.num_runs))))

    @property
    def longest_run(self) -> int:
        """Bytes of the longest run."""
        return int((self.runs.run_stop - self.runs.run_start).max(initial=0))

    @property
    def bytes_read(self) -> int:
        """Bytes that the runs read."""
        return int((self.runs.run_stop - self.runs.run_start)[self.run].sum())

    @property
    def regions(self) -> Regions:
        """All regions that are read."""
        return self.taken(np.arange(self.num_runs))[0]

    def num_regions(self, runs: IntArray) -> IntArray:
        """Number of the regions of each of some runs."""
        which = self.run[runs]
        counts: IntArray = self.runs.first[which + 1] - self.runs.first[which]
        return counts

    def taken(self, runs: IntArray) -> tuple[Regions, IntArray]:
        """The regions of some runs, and the first byte of each."""
        if self.places is None and len(runs) == self.num_runs:
            return self.runs.regions, self.runs.start
        num_regions = self.num_regions(runs)
        rows = ranges(self.runs.first[self.run[runs]], num_regions)
        regions, places = self.runs.regions.take(rows), self.places
        if places is not None:
            file = np.repeat(self.file[runs], num_regions)
            part = places.first[file] + places.part[rows]
            regions.piece[:] += places.within[part]
            regions.offsets[:] += places.corner[part]
        return regions, self.runs.start[rows]

    def num_bytes(self, index: Index) -> IntArray:
        """Bytes of the regions of each run."""
        if not self.num_runs:
            return self.run
        needed = np.add.reduceat(self.runs.regions.num_bytes(index), self.runs.first[:-1])
        return needed[self.run]

    def windows(self, index: Index) -> IntArray:
        """The number of the window in which each run lies, the same on every rank."""
        windows: IntArray = self.file * _windows_per_file(index, self.limits)
        return windows + self.run_start // self.limits.window_bytes


def plan_load(index: Index, wanted: BoxTable, limits: ReadLimits) -> LoadPlan:
    """Plan the reads of one rank; `wanted.tensors` is the index's own table of tensors.

    Raises:
        CoverageError: If the stored pieces do not hold every wanted element (a foreign or damaged
            index; what remesh writes is checked when it is saved).
    """
    parts = intersections(index, wanted)
    plan = _plan_files_alike(index, wanted, parts, limits)
    if plan is not None:
        return plan
    return plan_regions(index, _cut(index, parts.regions(index, wanted), limits), limits)


def plan_regions(index: Index, found: Regions, limits: ReadLimits) -> LoadPlan:
    """Plan the reads of regions that have been cut already: sort them, and merge them into runs."""
    file, start, stop = byte_ranges(index, found)
    order = np.lexsort((start, file))
    found, file, start, stop = found.take(order), file[order], start[order], stop[order]
    first, run_start, run_stop = _merge_runs(index, file, start, stop, limits)
    runs = Runs(found, start, first, run_start, run_stop, file[first[:-1]])
    return LoadPlan(limits, runs, np.arange(len(run_start)), runs.file)


def _plan_files_alike(
    index: Index, wanted: BoxTable, parts: Parts, limits: ReadLimits
) -> LoadPlan | None:
    """Plan one file of each kind; None if few are alike, or boxes of few tensors are wanted.

    Files are alike if they have the same size and the same parts of pieces are wanted of them, at
    the same bytes and for the same boxes.
    """
    pieces, tensor = index.pieces_of_tensors, wanted.tensor
    kinds, of = distinct(
        parts.of,
        pieces.files.number[tensor],
        pieces.steps.number[tensor],
        index.tensors.itemsizes[tensor],
    )
    if len(kinds) * MIN_ALIKE > len(wanted):
        return None
    kind, row = parts.of_kinds(parts.of[kinds])
    rows = PieceRows(pieces, tensor[kinds][kind], parts.within[row])
    by_file = np.argsort(rows.file, kind="stable")
    kind, row, rows = kind[by_file], row[by_file], rows.take(by_file)
    file, corner, offsets, extents = rows.file, rows.offsets, parts.offsets[row], parts.extents[row]
    files, first = np.unique(file, return_index=True)
    bounds = np.append(first, len(file))
    sizes = np.array([stored.num_bytes for stored in index.files], dtype=np.int64)
    begin = rows.position - pieces.in_tensor[rows.tensor]
    columns = (kind, begin, sizes[file], *(offsets - corner).T, *extents.T, *rows.extents.T)
    alike = Lists.of(np.column_stack(columns), bounds).number
    _, sample = np.unique(alike, return_index=True)
    if len(sample) * MIN_ALIKE > len(files):
        return None
    # The parts of pieces of one file of each kind, for all boxes that want them.
    in_sample = ranges(first[sample], np.diff(bounds)[sample])
    by_kind = np.argsort(of, kind="stable")
    num_wants = np.bincount(of, minlength=len(kinds))
    wants_before = np.cumsum(num_wants) - num_wants
    counts = num_wants[kind[in_sample]]
    want = by_kind[ranges(wants_before[kind[in_sample]], counts)]
    part = np.repeat(in_sample, counts)
    piece = index.first_pieces[tensor[want]] + rows.within[part]
    # While it is cut and sorted, a region is known by its number.
    found = Regions(np.arange(len(part)), piece, offsets[part], extents[part])
    runs = plan_regions(index, _cut(index, found, limits), limits).runs
    number = runs.regions.want
    want, part = want[number], part[number]
    piece = runs.regions.piece - rows.within[part]
    regions = Regions(want, piece, runs.regions.offsets - corner[part], runs.regions.extents)
    first_of_files = np.zeros(len(index.files), dtype=np.int64)
    first_of_files[files] = first
    places = _Places(part - first_of_files[file[part]], first_of_files, rows.within, corner)
    num_runs = np.bincount(runs.file, minlength=len(index.files))
    runs_before = np.cumsum(num_runs) - num_runs
    like = files[sample][alike]
    return LoadPlan(
        limits,
        replace(runs, regions=regions),
        ranges(runs_before[like], num_runs[like]),
        np.repeat(files, num_runs[like]),
        places,
    )


def byte_ranges(index: Index, found: Regions) -> tuple[IntArray, IntArray, IntArray]:
    """Where regions lie: rows of their files, first bytes, and one past the last."""
    rows = index.rows(found.piece)
    starts, stops, _ = flat_spans(rows.extents, found.offsets - rows.offsets, found.extents)
    itemsizes, position = index.tensors.itemsizes.take(rows.tensor), rows.position
    return rows.file, position + starts * itemsizes, position + stops * itemsizes


def files_of_windows(index: Index, windows: IntArray, limits: ReadLimits) -> IntArray:
    """The file in which each window lies, as rows of `index.files`."""
    return windows // _windows_per_file(index, limits)


def _windows_per_file(index: Index, limits: ReadLimits) -> int:
    return max((file.num_bytes for file in index.files), default=0) // limits.window_bytes + 1


def longest_gaps(shapes: IntArray, extents: IntArray, spans: IntArray) -> IntArray:
    """Longest stretch of flat elements between two elements of a non-empty box, row by row.

    It is the one after a step of the first dim in which the box extends: gaps inside a step leave
    out fewer dims. `spans` reach from the first to one past the last flat element of each box.
    """
    dim = np.argmax(extents > 1, axis=1)[:, None]
    step = np.take_along_axis(row_strides(shapes), dim, axis=1)[:, 0]
    num_steps = np.take_along_axis(extents, dim, axis=1)[:, 0]
    return np.where(num_steps > 1, step * num_steps - spans, 0)


def _cut(index: Index, found: Regions, limits: ReadLimits) -> Regions:
    """Cut regions that cross the end of a window or have long gaps."""
    _, start, stop = byte_ranges(index, found)
    must_cut = start // limits.window_bytes != (stop - 1) // limits.window_bytes
    rows = index.rows(found.piece)
    itemsizes = index.tensors.itemsizes.take(rows.tensor)
    gaps = longest_gaps(rows.extents, found.extents, (stop - start) // itemsizes)
    must_cut |= gaps * itemsizes > limits.gap_bytes
    if not must_cut.any():
        return found
    parts = [found.take(np.flatnonzero(~must_cut))]
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


def cut_region(
    shape: tuple[int, ...], region: Box, position: int, itemsize: int, limits: ReadLimits
) -> Iterator[Box]:
    """Cut a region of a row-major piece so that every part lies in one window, without long gaps.

    `position` is the first byte of the piece in its file, a multiple of `itemsize`.
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
    # Whole blocks are read, so the gaps that count are those between blocks.
    unit = index.block_size or limits.page_bytes
    sizes = np.array([stored.num_bytes for stored in index.files], dtype=np.int64)
    start = start - start % unit
    stop = np.minimum(stop + -stop % unit, sizes[file])
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
