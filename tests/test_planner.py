"""Plans against brute force: elements written are counted, and reads are played on bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredFile
from remesh.core.state import Role
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CoverageError
from remesh.planner import LoadPlan, LocalBoxes, ReadLimits, SavePlan, loading, plan_load, plan_save
from remesh.planner.assignment import touched_windows
from tests.strategies import Shape, boxes_in, partitions, shapes

Bytes = npt.NDArray[np.uint8]

MAIN, REPLICA, EQUAL, ASSUMED = Role.MAIN, Role.REPLICA, Role.EQUAL, Role.ASSUMED
DTYPE_NAMES = ["uint8", "float16", "float32", "float64", "complex128"]


# ---------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A box that a rank holds."""

    name: str
    dtype: str
    shape: Shape
    box: Box
    role: Role


def local_boxes_of(held: list[Held]) -> LocalBoxes:
    tensors: dict[str, tuple[str, str, Shape]] = {}
    for one in held:
        tensors.setdefault(one.name, (one.name, one.dtype, one.shape))
    names = list(tensors)
    table = TensorTable.of(list(tensors.values()))
    boxes = BoxTable.of(table, [(names.index(one.name), one.box) for one in held])
    return LocalBoxes.of(boxes, np.array([one.role for one in held], dtype=np.int64))


def plan_of(job: list[list[Held]]) -> SavePlan:
    return plan_save([local_boxes_of(held) for held in job])


@st.composite
def jobs(draw: st.DrawFn) -> list[list[Held]]:
    """What the ranks of a job hold; every element can be written exactly once."""
    world_size = draw(st.integers(1, 4))
    job: list[list[Held]] = [[] for _ in range(world_size)]
    ranks = st.integers(0, world_size - 1)
    for number in range(draw(st.integers(0, 3))):
        name, dtype = f"layer.{number}", draw(st.sampled_from(DTYPE_NAMES))
        shape = draw(shapes(max_dims=3, min_extent=0, max_extent=4))
        for box in draw(partitions(shape)):
            holders = sorted(draw(st.sets(ranks, min_size=1)))
            role = draw(st.sampled_from([MAIN, EQUAL, ASSUMED]))
            main = draw(st.sampled_from(holders))
            for rank in holders:
                own = REPLICA if role is MAIN and rank != main else role
                job[rank].append(Held(name, dtype, shape, box, own))
        if shape:
            # An empty box is nothing, wherever it lies and whoever holds it.
            nothing = Box(shape, (0,) * len(shape))
            job[draw(ranks)].append(Held(name, dtype, shape, nothing, MAIN))
    return [draw(st.permutations(held)) for held in job]


@given(jobs())
def test_every_element_is_written_once_by_a_rank_that_holds_it(job: list[list[Held]]) -> None:
    plan = plan_of(job)
    boxes, writer = plan.cuts.boxes, plan.writers.rows
    tensors = boxes.tensors
    everything = {one.name: one for held in job for one in held}
    assert set(tensors.names) == set(everything)
    written = {name: np.zeros(one.shape, dtype=np.int64) for name, one in everything.items()}
    for row in range(len(boxes)):
        name, box = tensors.names[boxes.tensor[row]], boxes.box(row)
        source = job[writer[row]][plan.row[row]]
        assert (source.name, source.box) == (name, box)
        assert tensors.dtype(int(boxes.tensor[row])).name == source.dtype
        assert tensors.shape(int(boxes.tensor[row])) == source.shape
        written[name][box.slices] += 1
    assert all((count == 1).all() for count in written.values())
    assert (np.diff(boxes.tensor) >= 0).all()
    # Ranks share the rows, which lie aligned in their files.
    assignments = plan.assignments(len(job))
    assert sorted(np.concatenate(assignments).tolist()) == list(range(len(boxes)))
    for rank, rows in enumerate(assignments):
        assert (writer[rows] == rank).all()
        itemsizes = tensors.itemsizes[boxes.tensor[rows]]
        positions = np.cumsum(boxes.num_bytes[rows]) - boxes.num_bytes[rows]
        assert (positions % itemsizes == 0).all()
        assert plan.bytes_per_rank(len(job))[rank] == boxes.num_bytes[rows].sum()


def vector(name: str, start: int, size: int, role: Role, *, whole: int = 1000) -> Held:
    return Held(name, "uint8", (whole,), Box((start,), (size,)), role)


@given(
    st.lists(st.integers(1, 100), max_size=12),
    st.lists(st.integers(0, 200), min_size=1, max_size=6),
)
@example([50, 50, 50, 50], [0, 100, 100])
def test_bytes_are_balanced(shared: list[int], own: list[int]) -> None:
    # Every rank has one tensor of its own and all the shared ones; only those can move.
    job = [
        [Held(f"own.{rank}", "uint8", (size,), Box.whole((size,)), MAIN)]
        + [
            Held(f"shared.{n}", "uint8", (size,), Box.whole((size,)), EQUAL)
            for n, size in enumerate(shared)
        ]
        for rank, size in enumerate(own)
    ]
    loads = plan_of(job).bytes_per_rank(len(own))
    ideal = (sum(shared) + sum(own)) / len(own)
    assert loads.sum() == sum(shared) + sum(own)
    assert loads.max() <= max(*own, ideal + max(shared, default=0))


def test_boxes_of_few_holders_are_given_away_first() -> None:
    # If the tensor that both hold went first, rank 0 would have to write both.
    pair = [vector("pair", 0, 10, EQUAL, whole=10)]
    plan = plan_of([[*pair, vector("own", 0, 10, EQUAL, whole=10)], pair])
    assert plan.bytes_per_rank(2).tolist() == [10, 10]


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A checkpoint in memory: its index, its files, and the tensors that they hold."""

    index: Index
    files: list[Bytes]
    tensors: list[Bytes]
    """One of shape (*tensor shape, itemsize) for each tensor."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Random tensors in random pieces, in random order, with gaps, in a few files."""
    tensor_shapes = st.one_of(
        shapes(min_dims=1, max_dims=3, min_extent=3, max_extent=9), shapes(min_extent=0)
    )
    rows = [
        (f"t{n}", draw(st.sampled_from(DTYPE_NAMES)), draw(tensor_shapes))
        for n in range(draw(st.integers(1, 3)))
    ]
    table = TensorTable.of(rows)
    pieces = [(n, box) for n, (_, _, shape) in enumerate(rows) for box in draw(partitions(shape))]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    tensors = [
        rng.integers(0, 256, (*shape, BY_NAME[dtype].itemsize), np.uint8)
        for _, dtype, shape in rows
    ]
    num_files = draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([0, 16, 64]))
    contents = [bytearray() for _ in range(num_files)]
    file, position = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.int64)
    for row in draw(st.permutations(range(len(pieces)))):
        tensor, box = pieces[row]
        number = draw(st.integers(0, num_files - 1))
        content = contents[number]
        content += bytes(draw(st.sampled_from([0, 0, 3, 100])))
        content += bytes(-len(content) % tensors[tensor].shape[-1])
        file[row], position[row] = number, len(content)
        content += tensors[tensor][box.slices].tobytes()
    files = tuple(StoredFile(f"{n}.bin", len(content)) for n, content in enumerate(contents))
    index = Index.of(BoxTable.of(table, pieces), file, position, files, block_size=block_size)
    return World(index, [np.frombuffer(bytes(c), np.uint8) for c in contents], tensors)


@st.composite
def limits_for(draw: st.DrawFn) -> ReadLimits:
    window = draw(st.sampled_from([1 << 20, 192, 64]))
    gap, page = draw(st.sampled_from([0, 7, 20, 90])), draw(st.sampled_from([1, 32]))
    return ReadLimits(window, gap, page_bytes=page)


def wanted_boxes(world: World) -> st.SearchStrategy[list[tuple[int, Box]]]:
    table = world.index.tensors
    one = st.integers(0, len(table) - 1).flatmap(
        lambda row: st.tuples(st.just(row), boxes_in(table.shape(row), min_extent=1))
    )
    return st.lists(one, min_size=1, max_size=5)


LOADS = worlds().flatmap(lambda world: st.tuples(st.just(world), wanted_boxes(world), limits_for()))
Load = tuple[World, list[tuple[int, Box]], ReadLimits]


def plan_for(load: Load) -> LoadPlan:
    world, wants, limits = load
    return plan_load(world.index, BoxTable.of(world.index.tensors, wants), limits)


def files_of_runs(world: World, plan: LoadPlan) -> list[int]:
    return [int(world.index.file[plan.regions.piece[first]]) for first in plan.run_first[:-1]]


def read(load: Load, plan: LoadPlan) -> list[Bytes]:
    """Play a plan: what it puts into each wanted box, of shape (*box shape, itemsize)."""
    world, wants, _ = load
    index = world.index
    filled = [
        np.zeros((*box.shape, world.tensors[tensor].shape[-1]), np.uint8) for tensor, box in wants
    ]
    times = [np.zeros(box.shape, np.int64) for _, box in wants]
    _, begins, ends = loading.byte_ranges(index, plan.regions)
    for run, file in enumerate(files_of_runs(world, plan)):
        start, stop = int(plan.run_start[run]), int(plan.run_stop[run])
        buffer = world.files[file][start:stop]
        assert len(buffer) == stop - start
        for row in range(int(plan.run_first[run]), int(plan.run_first[run + 1])):
            piece, want = int(plan.regions.piece[row]), int(plan.regions.want[row])
            assert index.file[piece] == file
            begin, end = int(begins[row]), int(ends[row])
            assert start <= begin < end <= stop
            stored, (tensor, box) = index.boxes.box(piece), wants[want]
            ndim, itemsize = box.ndim, filled[want].shape[-1]
            region = Box(
                tuple(plan.regions.offsets[row, :ndim].tolist()),
                tuple(plan.regions.extents[row, :ndim].tolist()),
            )
            assert index.boxes.tensor[piece] == tensor
            assert region.size
            assert stored.contains(region)
            assert box.contains(region)
            # The piece as it lies in the file, of which the buffer holds a part.
            flat = np.arange(stored.size).reshape(stored.shape)[region.relative_to(stored).slices]
            first = int(index.position[piece]) + flat[..., None] * itemsize + np.arange(itemsize)
            assert first.min() == begin
            assert first.max() + 1 == end
            inside = region.relative_to(box).slices
            filled[want][inside] = buffer[first - start]
            times[want][inside] += 1
    assert all((count == 1).all() for count in times)
    return filled


@given(LOADS)
def test_wanted_boxes_are_filled_once_with_what_is_stored(load: Load) -> None:
    world, wants, _ = load
    filled = read(load, plan_for(load))
    for (tensor, box), found in zip(wants, filled, strict=True):
        assert (found == world.tensors[tensor][box.slices]).all()


@given(LOADS)
def test_runs_stay_in_their_windows_and_read_no_block_twice(load: Load) -> None:
    world, _, limits = load
    plan = plan_for(load)
    block = world.index.block_size or limits.page_bytes
    seen: set[tuple[int, int]] = set()
    before = (-1, 0)
    for run, file in enumerate(files_of_runs(world, plan)):
        start, stop = int(plan.run_start[run]), int(plan.run_stop[run])
        assert start // limits.window_bytes == (stop - 1) // limits.window_bytes
        assert start % block == 0
        assert stop % block == 0 or stop == world.index.files[file].num_bytes
        assert before <= (file, start)
        before = (file, stop)
        blocks = {(file, number) for number in range(start // block, -(-stop // block))}
        assert not seen & blocks
        seen |= blocks
    assert plan.bytes_read == sum((plan.run_stop - plan.run_start).tolist())
    assert plan.num_runs == len(plan.run_start)


@given(LOADS)
def test_no_more_is_read_than_needed_blocks_and_short_gaps(load: Load) -> None:
    world, wants, limits = load
    plan = plan_for(load)
    index = world.index
    needed = [np.zeros(file.num_bytes, bool) for file in index.files]
    for piece in range(index.num_pieces):
        stored = index.boxes.box(piece)
        for tensor, box in wants:
            common = stored.intersect(box) if tensor == index.boxes.tensor[piece] else None
            if common is not None:
                itemsize = world.tensors[tensor].shape[-1]
                inside = np.zeros((*stored.shape, itemsize), bool)
                inside[common.relative_to(stored).slices] = True
                at = int(index.position[piece])
                needed[index.file[piece]][at : at + inside.size] |= inside.reshape(-1)
    slack = 2 * ((index.block_size or limits.page_bytes) - 1)
    for run, file in enumerate(files_of_runs(world, plan)):
        start, stop = int(plan.run_start[run]), int(plan.run_stop[run])
        used = np.flatnonzero(needed[file][start:stop])
        assert used[0] <= slack / 2
        assert stop - start - 1 - used[-1] <= slack / 2
        assert (np.diff(used, prepend=used[0]) - 1).max(initial=0) <= limits.gap_bytes + slack


@st.composite
def regular_loads(draw: st.DrawFn) -> Load:
    """Tensors that are cut alike, lie alike in most files, and equal boxes of some of them."""
    shape = draw(shapes(min_dims=1, max_dims=2, min_extent=3, max_extent=7))
    boxes = draw(partitions(shape))
    num_tensors, itemsize = draw(st.integers(2, 5)), 4
    table = TensorTable.of([(f"t{n}", "float32", shape) for n in range(num_tensors)])
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    tensors = [rng.integers(0, 256, (*shape, itemsize), np.uint8) for _ in range(num_tensors)]
    number = np.array(draw(st.permutations(range(len(boxes)))))
    contents = [bytearray(draw(st.sampled_from([0, 0, 0, 8]))) for _ in boxes]
    file, position = [], []
    for tensor in tensors:
        if draw(st.sampled_from([False, False, True])):
            number = np.roll(number, 1)
        for box, where in zip(boxes, number.tolist(), strict=True):
            file.append(where)
            position.append(len(contents[where]))
            contents[where] += tensor[box.slices].tobytes()
    files = tuple(StoredFile(f"{n}.bin", len(content)) for n, content in enumerate(contents))
    pieces = BoxTable.of(table, [(n, box) for n in range(num_tensors) for box in boxes])
    index = Index.of(
        pieces, np.array(file), np.array(position), files, block_size=draw(st.sampled_from([0, 16]))
    )
    world = World(index, [np.frombuffer(bytes(c), np.uint8) for c in contents], tensors)
    wanted = draw(st.lists(boxes_in(shape, min_extent=1), min_size=1, max_size=2))
    rows = draw(st.lists(st.integers(0, num_tensors - 1), min_size=1, unique=True))
    return world, [(row, box) for row in rows for box in wanted], draw(limits_for())


def regions_of(index: Index, plan: LoadPlan) -> list[tuple[int, ...]]:
    """The regions of each run of a plan, in the same order for all plans that read the same."""
    regions = plan.regions
    _, begins, ends = loading.byte_ranges(index, regions)
    run = np.repeat(np.arange(plan.num_runs), np.diff(plan.run_first))
    columns = (run, begins, ends, regions.want, regions.piece)
    return sorted(zip(*columns, *regions.offsets.T, *regions.extents.T, strict=True))


@given(st.one_of(LOADS, regular_loads()))
def test_files_that_hold_alike_are_planned_as_if_each_were(load: Load) -> None:
    index = load[0].index
    with mock.patch.object(loading, "MIN_ALIKE", 1000):
        each = plan_for(load)
    with mock.patch.object(loading, "MIN_ALIKE", 0):
        alike = plan_for(load)
    assert each.places is None
    assert alike.places is not None
    assert (alike.num_runs, alike.longest_run) == (each.num_runs, each.longest_run)
    assert alike.bytes_read == each.bytes_read
    for column in ("run_start", "run_stop", "run_first", "file"):
        np.testing.assert_array_equal(getattr(alike, column), getattr(each, column))
    assert regions_of(index, alike) == regions_of(index, each)
    np.testing.assert_array_equal(touched_windows(index, alike), touched_windows(index, each))
    _, begins, _ = loading.byte_ranges(index, alike.regions)
    for run in range(alike.num_runs):
        rows = slice(*alike.run_first[run : run + 2])
        regions, start = alike.taken(np.array([run]))
        np.testing.assert_array_equal(regions.piece, alike.regions.piece[rows])
        np.testing.assert_array_equal(regions.offsets, alike.regions.offsets[rows])
        np.testing.assert_array_equal(start, begins[rows])
    read(load, alike)


def test_columns_of_rows_are_planned_for_one_file() -> None:
    shape, num_tensors, num_files = (96, 8), 10, 96
    table = TensorTable.of([(f"t{n}", "float32", shape) for n in range(num_tensors)])
    pieces = [(n, Box((row, 0), (1, 8))) for n in range(num_tensors) for row in range(num_files)]
    file = np.tile(np.arange(num_files), num_tensors)
    position = np.repeat(np.arange(num_tensors) * 32, num_files)
    files = tuple(StoredFile(f"{n}.bin", num_tensors * 32) for n in range(num_files))
    index = Index.of(BoxTable.of(table, pieces), file, position, files)
    wants = [(n, Box((0, 3), (96, 1))) for n in range(num_tensors)]
    plan = plan_load(index, BoxTable.of(table, wants), ReadLimits())
    assert plan.num_runs == num_files
    assert len(plan.runs.regions) == num_tensors
    assert len(plan.regions) == num_tensors * num_files


def vector_index(num_bytes: int, *, block_size: int) -> Index:
    table = TensorTable.of([("w", "uint8", (num_bytes,))])
    boxes = BoxTable.of(table, [(0, Box.whole((num_bytes,)))])
    zero = np.zeros(1, np.int64)
    return Index.of(boxes, zero, zero, (StoredFile("f", num_bytes),), block_size=block_size)


@pytest.mark.parametrize(
    ("wants", "block_size", "runs"),
    [
        # Two ranges in one block, farther apart than a gap: the block is read once.
        ([(0, 10), (50, 60)], 64, [(0, 64)]),
        ([(0, 10), (50, 60)], 0, [(0, 10), (50, 60)]),
        ([(0, 10), (19, 20)], 0, [(0, 20)]),
        # Neighbouring blocks are read together, and so are those a short gap apart.
        ([(0, 10), (64, 65)], 64, [(0, 128)]),
        ([(0, 10), (130, 140)], 64, [(0, 64), (128, 192)]),
        # A run ends where its window or the file does.
        ([(100, 300)], 64, [(64, 256), (256, 320)]),
        ([(0, 1), (399, 400)], 64, [(0, 64), (384, 400)]),
        # One range inside another.
        ([(0, 100), (10, 20), (90, 120)], 0, [(0, 120)]),
        # How far the ranges of one window reach says nothing of the next one.
        ([(0, 250), (256, 258), (300, 302)], 0, [(0, 250), (256, 258), (300, 302)]),
    ],
)
def test_runs(wants: list[tuple[int, int]], block_size: int, runs: list[tuple[int, int]]) -> None:
    index = vector_index(400, block_size=block_size)
    boxes = [(0, Box((start,), (stop - start,))) for start, stop in wants]
    plan = plan_load(index, BoxTable.of(index.tensors, boxes), ReadLimits(256, 9, page_bytes=1))
    assert list(zip(plan.run_start.tolist(), plan.run_stop.tolist(), strict=True)) == runs


def test_nothing_wanted_reads_nothing() -> None:
    index = vector_index(400, block_size=64)
    for wants in ([], [(0, Box((7,), (0,)))]):
        plan = plan_load(index, BoxTable.of(index.tensors, wants), ReadLimits())
        assert (plan.num_runs, plan.bytes_read, plan.run_first.tolist()) == (0, 0, [0])


@given(LOADS, st.data())
def test_what_is_not_stored_once_is_named(load: Load, data: st.DataObject) -> None:
    world, wants, limits = load
    boxes = world.index.boxes
    if not len(boxes):
        return
    victim = data.draw(st.integers(0, len(boxes) - 1))
    rows = list(range(len(boxes)))
    rows[victim : victim + 1] = data.draw(st.sampled_from([[], [victim, victim]]))
    index = Index.of(
        BoxTable(boxes.tensors, boxes.tensor[rows], boxes.offsets[rows], boxes.extents[rows]),
        world.index.file[rows],
        world.index.position[rows],
        world.index.files,
    )
    hit = [
        box
        for tensor, box in wants
        if tensor == boxes.tensor[victim] and box.intersect(boxes.box(victim)) is not None
    ]
    if not hit:
        plan_for((World(index, world.files, world.tensors), wants, limits))
        return
    name = boxes.tensors.names[boxes.tensor[victim]]
    message = re.escape(f"{name}: the checkpoint's pieces do not hold box {hit[0]} exactly once")
    with pytest.raises(CoverageError, match=f"^{message}"):
        plan_for((World(index, world.files, world.tensors), wants, limits))
