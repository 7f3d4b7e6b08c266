"""Who writes which box.

Every rank says which boxes of which tensors it holds. `plan_save` finds the distinct boxes, checks
that they cover each tensor exactly once, and gives each to one of the ranks that hold it, so that
bytes are balanced: boxes with few holders first, large before small, each to the holder with least
to write so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from remesh.coverage import MAX_SHOWN, check_coverage
from remesh.errors import CoverageError, StateError
from remesh.geometry import IntArray
from remesh.index import Index, StoredFile
from remesh.planner.holding import Distinct, Held, LocalBoxes, find_alike, widen
from remesh.state import Role
from remesh.tables import BoxTable, TensorTable


def _no_rows() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Boxes that several ranks hold, one row for each of these ranks, sorted by box and rank.

    Attributes:
        box: Row of the box in the plan.
        rank: The rank that holds it.
        row: Its row in that rank's boxes.
    """

    box: IntArray = field(default_factory=_no_rows)
    rank: IntArray = field(default_factory=_no_rows)
    row: IntArray = field(default_factory=_no_rows)

    def rows_of(self, rank: int) -> IntArray:
        """Rows of a rank's boxes that other ranks hold as well."""
        rows: IntArray = self.row[self.rank == rank]
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Which rank writes which box.

    Attributes:
        boxes: The distinct boxes to store, sorted by tensor.
        writer: Rank that writes each box.
        row: Row of each box in its writer's boxes.
        copies: Boxes that several ranks hold.
    """

    boxes: BoxTable
    writer: IntArray
    row: IntArray
    copies: Copies = field(default_factory=Copies)

    def assignments(self, world_size: int) -> list[IntArray]:
        """Rows of this plan that each rank writes, in the order of its file.

        Wide elements come first, so that every piece begins at a multiple of its element size.
        """
        # Few ranks have small numbers, which are sorted by their digits.
        writer = self.writer.astype(np.uint16) if world_size <= 1 << 16 else self.writer
        itemsizes = self.boxes.tensors.itemsizes
        if len(np.unique(itemsizes)) > 1:
            narrowness = (16 - itemsizes).astype(np.uint8)
            by_size = np.argsort(narrowness[self.boxes.tensor], kind="stable")
            order = by_size[np.argsort(writer[by_size], kind="stable")]
        else:
            order = np.argsort(writer, kind="stable")
        ends = np.cumsum(np.bincount(self.writer, minlength=world_size))[:-1]
        return np.split(order, ends)

    def bytes_per_rank(self, world_size: int) -> IntArray:
        """Bytes of tensor data that each rank writes."""
        totals = np.zeros(world_size, dtype=np.int64)
        np.add.at(totals, self.writer, self.boxes.num_bytes)
        return totals

    def index_of_holders(self, world_size: int) -> Index:
        """An index of all boxes in which file `n` stands for the memory of rank `n`."""
        sizes = self.boxes.num_bytes
        order = np.argsort(self.writer, kind="stable")
        totals = self.bytes_per_rank(world_size)
        ends = np.cumsum(sizes[order])
        starts = np.empty_like(ends)
        starts[order] = ends - sizes[order]
        starts -= (np.cumsum(totals) - totals)[self.writer]
        files = tuple(StoredFile(str(rank), size) for rank, size in enumerate(totals.tolist()))
        return Index.of(self.boxes, self.writer, starts, files)


def plan_save(local_boxes: Sequence[LocalBoxes]) -> SavePlan:
    """Plan a save.

    Args:
        local_boxes: What each rank holds, in rank order.

    Raises:
        StateError: If ranks disagree about the dtype or global shape of a tensor.
        CoverageError: If a tensor is not covered exactly once by main replicas.
    """
    tensors, rows = merge_tensors([held.tensors for held in local_boxes])
    alike = find_alike(tensors, local_boxes, rows)
    found = None
    if alike is not None:
        # What is wrong is said of all tensors.
        with suppress(CoverageError):
            found = alike.expanded(_distinct_boxes(alike.held))
    if found is None:
        found = _distinct_boxes(Held.by_all(tensors, local_boxes, rows))
    boxes, first, rank, row = found.boxes, found.first, found.rank, found.row
    if first is None:
        return SavePlan(boxes, rank, row)
    num_holders = np.diff(first)
    copied = np.flatnonzero(np.repeat(num_holders > 1, num_holders))
    box = np.repeat(np.flatnonzero(num_holders > 1), num_holders[num_holders > 1])
    copies = Copies(box, rank[copied], row[copied])
    chosen = choose_writers(boxes.num_bytes, rank, first, len(local_boxes), found.by_first)
    return SavePlan(boxes, rank[chosen], row[chosen], copies)


def _distinct_boxes(held: Held) -> Distinct:
    """The distinct boxes that ranks hold, checked.

    Raises:
        CoverageError: If a tensor is not covered exactly once by main replicas.
    """
    filled = (held.extents > 0).all(axis=1)
    dims = range(held.extents.shape[1])
    keys = [held.extents[filled, dim] for dim in reversed(dims)]
    keys += [held.offsets[filled, dim] for dim in reversed(dims)]
    by_box = np.lexsort((held.rank[filled], *keys, held.tensor[filled]))
    order = np.flatnonzero(filled)[by_box]
    rank, row, roles = held.rank[order], held.row[order], held.roles[order]
    tensor, offsets, extents = held.tensor[order], held.offsets[order], held.extents[order]

    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (
        (tensor[1:] != tensor[:-1])
        | (offsets[1:] != offsets[:-1]).any(axis=1)
        | (extents[1:] != extents[:-1]).any(axis=1)
    )
    first = np.append(np.flatnonzero(is_new), len(order))
    boxes = BoxTable(held.tensors, tensor[is_new], offsets[is_new], extents[is_new])

    def holders(number: int) -> str:
        ranks = rank[first[number] : first[number + 1]].tolist()
        shown = ", ".join(map(str, ranks[:MAX_SHOWN])) + (", ..." if len(ranks) > MAX_SHOWN else "")
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

    _check_roles(boxes, roles, first, rank)
    check_coverage(boxes, holders)
    if len(rank) == len(boxes):
        return Distinct(boxes, None, rank, row, None)
    by_first = np.maximum.reduceat(roles == Role.FIRST, first[:-1])
    return Distinct(boxes, first, rank, row, by_first)


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
            & (united.shapes[to_new] == widen(table.shapes, num_dims, 1)).all(axis=1)
        )
        if not same.all():
            row = int(np.flatnonzero(~same)[0])
            other = int(to_new[row])
            raise StateError(
                f"{table.names[row]}: ranks disagree about this tensor\n"
                f"rank {rank} says {table.dtype(row).name} {table.shape(row)}, "
                f"rank {first_seen[other][0]} says {united.dtype(other).name} "
                f"{united.shape(other)}\n"
                "The global shape and dtype must be the same on all ranks. If each rank holds a "
                "shard, describe it as a DTensor or remesh.ShardedTensor."
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


def _check_roles(boxes: BoxTable, roles: IntArray, first: IntArray, rank: IntArray) -> None:
    """Every box needs a rank that may write it, and has at most one main replica."""
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
                f", held by ranks {ranks}\nExactly one rank must hold a box with replica_id 0"
            )


def choose_writers(
    num_bytes: IntArray,
    rank: IntArray,
    first: IntArray,
    world_size: int,
    by_first: npt.NDArray[np.bool_] | None = None,
) -> IntArray:
    """For each distinct box, which of its holders (rows of `rank`) writes it.

    Args:
        num_bytes: Bytes of each box.
        rank: Rank of each holder, sorted by box and rank.
        first: First row of each box's holders, and the end.
        world_size: Number of ranks.
        by_first: Boxes that the first of their holders must write; by default none.
    """
    num_holders = np.diff(first)
    chosen: IntArray = first[:-1].copy()
    alone = num_holders == 1
    if by_first is not None:
        alone |= by_first
    loads = np.zeros(world_size, dtype=np.int64)
    np.add.at(loads, rank[chosen[alone]], num_bytes[alone])
    shared = np.flatnonzero(~alone)
    for number in shared[np.lexsort((-num_bytes[shared], num_holders[shared]))].tolist():
        ranks = rank[first[number] : first[number + 1]]
        best = int(np.argmin(loads[ranks]))
        chosen[number] = first[number] + best
        loads[ranks[best]] += num_bytes[number]
    return chosen
