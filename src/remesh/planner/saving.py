"""Who writes which box.

Every rank says which boxes of which tensors it holds. `plan_save` finds the distinct boxes, checks
that they cover each tensor exactly once, and gives each to one of the ranks that hold it, so that
bytes are balanced: boxes with few holders first, large before small, each to the holder with least
to write so far.

Most tensors of a job are laid out alike: on every rank the same *kinds* of boxes occur again and
again, and which tensors have a kind is the same on all ranks, or on those of a pipeline stage. So
a rank says which kinds it has, and ranks that have them for the same tensors share one table of
these (`LocalBoxes`). Tensors that all ranks hold alike are planned once (`Alike`): the plan of one
of them is that of the others, but for the numbers of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from remesh._repr import listed
from remesh.core.coverage import MAX_SHOWN, check_coverage
from remesh.core.geometry import BoolArray, IntArray
from remesh.core.index import Index, StoredFile
from remesh.core.pieces import Lists, chunks, distinct, joined, ranges
from remesh.core.state import Role
from remesh.core.tables import BoxTable, Cuts, TensorTable
from remesh.errors import CoverageError, StateError


@dataclass(frozen=True, slots=True, eq=False)
class LocalBoxes:
    """The boxes of one rank."""

    tensors: TensorTable  # the tensors that it knows
    tensor: IntArray  # row in `tensors` of each box
    kind: IntArray  # row of each box in what follows
    offsets: IntArray  # (kinds, d) offsets
    extents: IntArray  # (kinds, d) shapes
    roles: IntArray  # the role of boxes of each kind (`remesh.core.state.Role`)

    @classmethod
    def of(cls, boxes: BoxTable, roles: IntArray) -> LocalBoxes:
        """The boxes of a rank, given the role of each."""
        shapes = boxes.tensors.shapes[boxes.tensor]
        columns = (*shapes.T, *boxes.offsets.T, *boxes.extents.T, roles)
        first, of = distinct(*columns)
        # Numbered in order of appearance, which is the same on ranks that hold alike.
        order = np.argsort(first)
        number = np.argsort(order)
        first = first[order]
        return cls(
            boxes.tensors,
            boxes.tensor,
            number[of],
            boxes.offsets[first],
            boxes.extents[first],
            roles[first],
        )

    @property
    def boxes(self) -> BoxTable:
        """Its boxes."""
        kind = self.kind
        return BoxTable(self.tensors, self.tensor, self.offsets[kind], self.extents[kind])

    @property
    def role_of_boxes(self) -> IntArray:
        """The role of each box."""
        return self.roles[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Boxes of all ranks, a row for each box of each rank."""

    tensors: TensorTable
    rank: IntArray  # the rank that holds each
    row: IntArray  # number of each among the boxes that its rank holds of the tensor
    tensor: IntArray  # row in `tensors` of each
    offsets: IntArray  # (rows, d) offsets
    extents: IntArray  # (rows, d) shapes
    roles: IntArray  # the role of each


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Distinct boxes, sorted by tensor, and the ranks that hold each."""

    cuts: Cuts  # the boxes
    first: IntArray | None
    """First holder of each box, and the number of holders; None if each box has one."""
    ranks: Lists  # the ranks of the holders of the boxes of each tensor, sorted by box and rank
    row: IntArray  # `Held.row` of each holder
    by_first: BoolArray | None
    """Boxes that the first of their holders must write; None if each has one."""


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Tensors that all ranks hold alike."""

    tensors: TensorTable  # all tensors
    of: IntArray  # the class of each tensor
    held: Held
    """What ranks hold of the first tensor of each class."""
    group: IntArray  # the number of each rank's group
    keys: IntArray
    """Number of a group times that of the tensors, plus a tensor that it holds; ascending."""
    starts: IntArray  # the first row of each of these in `rows`
    rows: IntArray  # rows of boxes on the ranks of a group, by group and tensor

    def expanded(self, found: Distinct) -> Distinct:
        """The distinct boxes of all tensors, given those of the samples."""
        cuts = Cuts(
            self.tensors, found.cuts.offsets.among(self.of), found.cuts.extents.among(self.of)
        )
        first, by_first = None, None
        if found.first is not None and found.by_first is not None:
            begin, counts = found.cuts.bounds[self.of], cuts.offsets.lengths
            num_holders = joined(np.diff(found.first), begin, counts)
            first = np.concatenate(([0], np.cumsum(num_holders)))
            by_first = joined(found.by_first, begin, counts)
        ranks = found.ranks.among(self.of)
        return Distinct(cuts, first, ranks, self._rows(found, ranks), by_first)

    def _rows(self, found: Distinct, ranks: Lists) -> IntArray:
        """Rows of the boxes of all tensors on the ranks that hold them."""
        group = self.group[ranks.values] * len(self.tensors)
        begin, counts = ranks.starts, ranks.lengths
        bounds = np.concatenate(([0], np.cumsum(counts)))
        rows = np.empty(int(bounds[-1]), dtype=np.int64)
        for start, stop in chunks(counts):
            here = begin[start:stop], counts[start:stop]
            keys = joined(group, *here) + np.repeat(np.arange(start, stop), here[1])
            row = self.starts.take(np.searchsorted(self.keys, keys)) + joined(found.row, *here)
            rows[bounds[start] : bounds[stop]] = self.rows.take(row)
        return rows


def find_alike(
    tensors: TensorTable,
    local_boxes: Sequence[LocalBoxes],
    rows: Sequence[IntArray],
    *,
    merges: bool = True,
) -> Alike:
    """Find the tensors that all ranks hold alike, unless they are too few to matter.

    `rows` has for each rank the rows in `tensors` of those that it knows. Without `merges` each
    tensor is a class of its own.
    """
    members: dict[tuple[int, int, int], list[int]] = {}
    for rank, (held, to_new) in enumerate(zip(local_boxes, rows, strict=True)):
        members.setdefault((id(held.tensor), id(held.kind), id(to_new)), []).append(rank)
    groups = list(members.values())
    group_of = np.zeros(len(local_boxes), dtype=np.int64)
    columns = []  # of the boxes of a group, sorted by tensor
    for number, ranks in enumerate(groups):
        group_of[ranks] = number
        held, tensor = local_boxes[ranks[0]], rows[ranks[0]][local_boxes[ranks[0]].tensor]
        order = np.argsort(tensor, kind="stable")
        columns.append((np.full_like(order, number), tensor[order], held.kind[order], order))
    group, tensor, kind, row = map(np.concatenate, zip(*columns, strict=True))
    key = group * len(tensors) + tensor
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    keys, bounds = key[starts], np.append(starts, len(key))
    place = np.arange(len(key)) - np.repeat(starts, np.diff(bounds))
    sample = of = np.arange(len(tensors))
    if merges and 4 * len(key) <= sum(len(held.tensor) for held in local_boxes):
        lists = Lists.of(kind, bounds).number
        by_tensor = np.argsort(keys % len(tensors), kind="stable")
        bounds = np.searchsorted(keys[by_tensor] % len(tensors), np.arange(len(tensors) + 1))
        classes = np.stack([keys // len(tensors), lists], axis=1)[by_tensor]
        sample, of = distinct(Lists.of(classes, bounds).number, *tensors.shapes.T)
    among = np.full(len(tensors), -1, dtype=np.int64)
    among[sample] = np.arange(len(sample))
    parts = []
    ends = np.searchsorted(group, np.arange(len(groups) + 1))
    for ranks, (start, stop) in zip(groups, pairwise(ends.tolist()), strict=True):
        taken = start + np.flatnonzero(among[tensor[start:stop]] >= 0)
        boxes = (place[taken], among[tensor[taken]], kind[taken])
        parts.append(_held_of(ranks, local_boxes, boxes, tensors.shapes.shape[1]))
    columns_of_samples = map(np.concatenate, zip(*parts, strict=True))
    held_of_samples = Held(tensors.among(sample), *columns_of_samples)
    return Alike(tensors, of, held_of_samples, group_of, keys, starts, row)


def _held_of(
    ranks: list[int],
    local_boxes: Sequence[LocalBoxes],
    boxes: tuple[IntArray, IntArray, IntArray],
    num_dims: int,
) -> tuple[IntArray, ...]:
    """The columns of `Held` of some boxes of a group: their places, tensors and kinds."""
    place, tensor, kind = boxes
    kinds = [local_boxes[rank] for rank in ranks]
    offsets = np.stack([held.offsets for held in kinds])[:, kind]
    extents = np.stack([held.extents for held in kinds])[:, kind]
    return (
        np.repeat(ranks, len(kind)),
        np.tile(place, len(ranks)),
        np.tile(tensor, len(ranks)),
        widen(offsets.reshape(-1, offsets.shape[-1]), num_dims, 0),
        widen(extents.reshape(-1, extents.shape[-1]), num_dims, 1),
        np.stack([held.roles for held in kinds])[:, kind].reshape(-1),
    )


def widen(rows: IntArray, num_dims: int, fill: int) -> IntArray:
    """Rows padded to more dims."""
    missing = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Boxes that several ranks hold, one row for each of these ranks, sorted by box and rank."""

    box: IntArray  # row of the box in the plan
    rank: IntArray  # the rank that holds it
    row: IntArray  # its row in that rank's boxes
    apart: BoolArray  # whether ranks that no mesh joins hold its box

    def by_rank(self, world_size: int) -> list[IntArray]:
        """Rows of these that each rank holds, ascending."""
        order = np.argsort(self.rank, kind="stable")
        return np.split(order, np.searchsorted(self.rank[order], np.arange(1, world_size)))


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Which rank writes which box."""

    cuts: Cuts  # the distinct boxes to store
    writers: Lists  # ranks that write the boxes of each tensor
    row: IntArray  # row of each box in its writer's boxes
    copies: Copies  # boxes that several ranks hold

    def assignments(self, world_size: int) -> list[IntArray]:
        """Rows of this plan that each rank writes, in the order of its file.

        Wide elements come first, so that every piece begins at a multiple of its element size.
        """
        rank = self.writers.values
        # Few ranks have small numbers, which are sorted by their digits.
        small = rank.astype(np.uint16) if world_size <= 1 << 16 else rank
        order = np.argsort(small, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=world_size))))
        lengths = np.diff(self.writers.ends, prepend=0)
        slot = order - np.repeat(self.writers.ends - lengths, lengths)[order]
        # Ranks that write equally much of each list share the order of their files.
        lists = Lists.of(np.repeat(np.arange(len(lengths)), lengths)[order], bounds)
        orders = self._orders(lists)
        found = []
        for number, (start, stop) in zip(lists.number, pairwise(bounds.tolist()), strict=True):
            rows, entry = orders[number]
            found.append(rows + slot[start:stop].take(entry))
        return found

    def _orders(self, lists: Lists) -> list[tuple[IntArray, IntArray]]:
        """The orders of files to which ranks write boxes of all tensors that have certain lists."""
        by_width = np.argsort(-self.cuts.tensors.itemsizes, kind="stable")
        by_list = np.argsort(self.writers.number[by_width], kind="stable")
        rows = self.cuts.bounds[by_width]
        counts = np.bincount(self.writers.number, minlength=len(self.writers.ends))
        begin = np.cumsum(counts) - counts
        found = []
        for start, stop in pairwise([0, *lists.ends.tolist()]):
            taken = lists.values[start:stop]
            place = by_list.take(ranges(begin[taken], counts[taken]))
            order = np.argsort(place, kind="stable")
            entry = np.repeat(np.arange(len(taken)), counts[taken])
            found.append((rows.take(place[order]), entry[order]))
        return found

    def bytes_per_rank(self, world_size: int) -> IntArray:
        """Bytes of tensor data that each rank writes."""
        totals = np.zeros(world_size, dtype=np.int64)
        sizes = self.cuts.num_bytes
        kinds, of = distinct(sizes.number, self.writers.number)
        writers, num_alike = self.writers.among(kinds), np.bincount(of, minlength=len(kinds))
        num_bytes = sizes.among(kinds).rows * np.repeat(num_alike, writers.lengths)
        np.add.at(totals, writers.rows, num_bytes)
        return totals

    def index_of_holders(self, world_size: int) -> Index:
        """An index of all boxes in which file `n` stands for the memory of rank `n`."""
        sizes, writer = self.cuts.num_bytes.rows, self.writers.rows
        order = np.argsort(writer, kind="stable")
        totals = self.bytes_per_rank(world_size)
        ends = np.cumsum(sizes[order])
        starts = np.empty_like(ends)
        starts[order] = ends - sizes[order]
        starts -= (np.cumsum(totals) - totals)[writer]
        files = tuple(StoredFile(str(rank), size) for rank, size in enumerate(totals.tolist()))
        return Index.of_cuts(self.cuts, writer, starts, files)


def joined_by_meshes(meshes: Sequence[Sequence[int]]) -> IntArray:
    """A number for each rank, given its meshes by their lowest ranks; equal if meshes join them.

    Ranks of one mesh are joined, and so are those of meshes that some rank is in: FSDP2 over tensor
    parallelism keeps on one axis what the other does not cut. Ranks without a mesh count as one.
    """
    joined: dict[int, int] = {}  # meshes as trees: a mesh and the one above it, or itself

    def top(mesh: int) -> int:
        while (above := joined.setdefault(mesh, mesh)) != mesh:
            joined[mesh] = joined[above]
            mesh = above
        return mesh

    for own in set(map(tuple, meshes)):
        for mesh in own[1:]:
            joined[top(mesh)] = top(own[0])
    return np.array([top(own[0]) if own else -1 for own in meshes], dtype=np.int64)


def plan_save(
    local_boxes: Sequence[LocalBoxes], meshes: Sequence[Sequence[int]] | None = None
) -> SavePlan:
    """Plan a save, given what each rank holds, in rank order, and its meshes by lowest ranks.

    Raises:
        StateError: If ranks disagree about the dtype or global shape of a tensor.
        CoverageError: If a tensor is not covered exactly once by main replicas.
    """
    tensors, rows = merge_tensors([held.tensors for held in local_boxes])
    alike, found = find_alike(tensors, local_boxes, rows), None
    with suppress(CoverageError):
        found = alike.expanded(_distinct_boxes(alike.held))
    if found is None:  # what is wrong is said of all tensors
        alike = find_alike(tensors, local_boxes, rows, merges=False)
        found = alike.expanded(_distinct_boxes(alike.held))
    cuts, first, row = found.cuts, found.first, found.row
    if first is None:
        none = row[:0]
        return SavePlan(cuts, found.ranks, row, Copies(none, none, none, none > 0))
    rank = found.ranks.rows
    num_holders = np.diff(first)
    copied = np.flatnonzero(np.repeat(num_holders > 1, num_holders))
    box = np.repeat(np.flatnonzero(num_holders > 1), num_holders[num_holders > 1])
    rank_of_copy = rank[copied]
    of_mesh = joined_by_meshes(meshes or [()] * len(local_boxes))[rank_of_copy]
    differs = (box[1:] == box[:-1]) & (of_mesh[1:] != of_mesh[:-1])
    copies = Copies(box, rank_of_copy, row[copied], np.isin(box, box[1:][differs]))
    num_bytes = cuts.num_bytes.rows
    chosen = choose_writers(num_bytes, rank, first, len(local_boxes), found.by_first)
    return SavePlan(cuts, Lists.of(rank[chosen], cuts.bounds), row[chosen], copies)


def _distinct_boxes(held: Held) -> Distinct:
    """The distinct boxes that ranks hold, checked."""
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
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, MAX_SHOWN)}"

    _check_roles(boxes, roles, first, rank)
    check_coverage(boxes, holders)
    cuts = Cuts.of(boxes)
    ranks = Lists.apart(rank, first[cuts.bounds])
    if len(rank) == len(boxes):
        return Distinct(cuts, None, ranks, row, None)
    by_first = np.maximum.reduceat(roles == Role.FIRST, first[:-1])
    return Distinct(cuts, first, ranks, row, by_first)


def merge_tensors(tables: Sequence[TensorTable]) -> tuple[TensorTable, list[IntArray]]:
    """Unite the tensors that ranks know, in order of first appearance.

    The second result has for each table the new row of each of its rows.

    Raises:
        StateError: If ranks disagree about the dtype or global shape of a tensor.
    """
    num_dims = max(table.shapes.shape[1] for table in tables)
    rows: dict[str, int] = {}
    known: dict[tuple[str, ...], IntArray] = {}
    renumber, columns = [], []
    for rank, table in enumerate(tables):
        to_new = known.get(table.names)
        if to_new is None:
            before = len(rows)
            numbers = [rows.setdefault(name, len(rows)) for name in table.names]
            to_new = known[table.names] = np.array(numbers, dtype=np.int64)
            new = np.flatnonzero(to_new >= before)
            shapes = widen(table.shapes[new], num_dims, 1)
            columns.append((table.dtypes[new], table.ndims[new], shapes, np.full(len(new), rank)))
        renumber.append(to_new)
    *of_tensors, first_rank = map(np.concatenate, zip(*columns, strict=True))
    united = TensorTable(tuple(rows), *of_tensors)
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
                f"rank {first_rank[other]} says {united.dtype(other).name} "
                f"{united.shape(other)}\n"
                "The global shape and dtype must be the same on all ranks. If each rank holds a "
                "shard, describe it as a DTensor or remesh.ShardedTensor."
            )
    return united, renumber


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

    `rank` is sorted by box and rank; `first` has the first row of each box's holders, and the end.
    Boxes of `by_first` are written by the first of their holders.
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
