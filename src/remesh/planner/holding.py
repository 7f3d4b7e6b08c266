"""What each rank holds, and which tensors all ranks hold alike.

Most tensors of a job are laid out alike: on every rank the same *kinds* of boxes occur again and
again, and which tensors have a kind is the same on all ranks, or on those of a pipeline stage. So
a rank says which kinds it has, and ranks that have them for the same tensors share one table of
these (`LocalBoxes`). Tensors that all ranks hold alike are planned once (`Alike`): the plan of one
of them is that of the others, but for the numbers of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remesh.core.geometry import BoolArray, IntArray
from remesh.core.pieces import Lists, chunks, distinct, joined
from remesh.core.tables import BoxTable, Cuts, TensorTable


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
    row: IntArray  # what tells a box from others of its rank: its row there, or what `Alike` says
    tensor: IntArray  # row in `tensors` of each
    offsets: IntArray  # (rows, d) offsets
    extents: IntArray  # (rows, d) shapes
    roles: IntArray  # the role of each

    @classmethod
    def by_all(
        cls, tensors: TensorTable, local_boxes: Sequence[LocalBoxes], rows: Sequence[IntArray]
    ) -> Held:
        """All that ranks hold, and for each the rows in `tensors` of those that it knows."""
        d = tensors.shapes.shape[1]
        counts = [len(held.tensor) for held in local_boxes]
        both = list(zip(local_boxes, rows, strict=True))
        return cls(
            tensors,
            np.repeat(np.arange(len(local_boxes)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            np.concatenate([to_new[held.tensor] for held, to_new in both]),
            np.concatenate([widen(held.offsets, d, 0)[held.kind] for held in local_boxes]),
            np.concatenate([widen(held.extents, d, 1)[held.kind] for held in local_boxes]),
            np.concatenate([held.role_of_boxes for held in local_boxes]),
        )


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
class _Group:
    """Ranks that hold the same kinds of boxes of the same tensors; boxes are sorted by tensor."""

    ranks: list[int]
    order: IntArray  # row of each box on these ranks
    tensor: IntArray  # row of its tensor among all
    kind: IntArray
    place: IntArray  # its number among the boxes of its tensor


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Tensors that all ranks hold alike."""

    tensors: TensorTable  # all tensors
    of: IntArray  # the class of each tensor
    held: Held
    """What ranks hold of a sample of each class; `row` is the number of a box in its tensor."""
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
    tensors: TensorTable, local_boxes: Sequence[LocalBoxes], rows: Sequence[IntArray]
) -> Alike | None:
    """Find the tensors that all ranks hold alike; None if there are too few to matter.

    Arguments are those of `Held.by_all`.
    """
    members: dict[tuple[int, int, int], list[int]] = {}
    for rank, (held, to_new) in enumerate(zip(local_boxes, rows, strict=True)):
        members.setdefault((id(held.tensor), id(held.kind), id(to_new)), []).append(rank)
    num_looked_at = sum(len(local_boxes[ranks[0]].tensor) for ranks in members.values())
    if 4 * num_looked_at > sum(len(held.tensor) for held in local_boxes):
        return None
    groups = [_group_of(ranks, local_boxes[ranks[0]], rows[ranks[0]]) for ranks in members.values()]
    tensor, keys, starts, classes = [], [], [], []
    num_before = 0
    for number, group in enumerate(groups):
        bounds = np.append(np.flatnonzero(group.place == 0), len(group.tensor))
        here = group.tensor[bounds[:-1]]
        tensor.append(here)
        keys.append(number * len(tensors) + here)
        starts.append(num_before + bounds[:-1])
        lists = Lists.of(group.kind, bounds).number
        classes.append(np.stack([np.full(len(here), number), lists], axis=1))
        num_before += len(group.tensor)
    all_tensors = np.concatenate(tensor)
    order = np.argsort(all_tensors, kind="stable")
    bounds = np.searchsorted(all_tensors[order], np.arange(len(tensors) + 1))
    sample, of = distinct(
        Lists.of(np.concatenate(classes)[order], bounds).number, *tensors.shapes.T
    )
    group_of = np.zeros(len(local_boxes), dtype=np.int64)
    for number, group in enumerate(groups):
        group_of[group.ranks] = number
    return Alike(
        tensors,
        of,
        _held_of(tensors, sample, groups, local_boxes),
        group_of,
        np.concatenate(keys),
        np.concatenate(starts),
        np.concatenate([group.order for group in groups]),
    )


def _group_of(ranks: list[int], held: LocalBoxes, rows: IntArray) -> _Group:
    tensor = rows[held.tensor]
    order = np.argsort(tensor, kind="stable")
    tensor = tensor[order]
    place = np.arange(len(tensor)) - np.searchsorted(tensor, tensor)
    return _Group(ranks, order, tensor, held.kind[order], place)


def _held_of(
    tensors: TensorTable,
    sample: IntArray,
    groups: Sequence[_Group],
    local_boxes: Sequence[LocalBoxes],
) -> Held:
    """The boxes of the samples that ranks hold."""
    number = np.full(len(tensors), -1, dtype=np.int64)
    number[sample] = np.arange(len(sample))
    num_dims = tensors.shapes.shape[1]
    parts: list[tuple[IntArray, ...]] = []
    for group in groups:
        taken = np.flatnonzero(number[group.tensor] >= 0)
        kind, num_ranks = group.kind[taken], len(group.ranks)
        kinds = [local_boxes[rank] for rank in group.ranks]
        offsets = np.stack([held.offsets for held in kinds])[:, kind]
        extents = np.stack([held.extents for held in kinds])[:, kind]
        parts.append(
            (
                np.repeat(group.ranks, len(taken)),
                np.tile(group.place[taken], num_ranks),
                np.tile(number[group.tensor[taken]], num_ranks),
                widen(offsets.reshape(-1, offsets.shape[-1]), num_dims, 0),
                widen(extents.reshape(-1, extents.shape[-1]), num_dims, 1),
                np.stack([held.roles for held in kinds])[:, kind].reshape(-1),
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Held(tensors.among(sample), *columns)


def widen(rows: IntArray, num_dims: int, fill: int) -> IntArray:
    """Rows padded to more dims."""
    missing = num_dims - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows
