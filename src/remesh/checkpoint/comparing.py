"""Targets of a load that share memory, and comparing what fills tied ones.

Two tensors of a state may be one memory: tied weights, and views of all kinds. A load fills one
after the other, so where they share an element, the last one would win. They may be filled

* if they share nothing but the span: rows of one matrix, its columns, every second element;
* if both are filled with the same elements of the same stored tensor, each at the same place;
* if they are one view, tied weights above all, and what is stored for its names is equal. That is
  known only by reading all of it, which is done into memory of its own before anything in the
  state is touched.

All else is an error that names the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.checkpoint.resizing import MeanRows
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.core.memory import CarrierArray, HostMemory, Memory
from remesh.core.strided import Layout, shared_pairs
from remesh.core.tables import BoxTable
from remesh.pipeline import Destination
from remesh.planner import LoadPlan, ReadLimits, plan_load


@dataclass(frozen=True, slots=True, eq=False)
class RankReads:
    """The reads of one rank, and where they go."""

    index: Index  # what is stored
    plan: LoadPlan  # how it is read
    destinations: Sequence[Destination]  # where each wanted box of the plan goes
    num_bytes: int  # bytes of all wanted boxes, in stored dtypes


@dataclass(slots=True)
class Wanted:
    """Boxes of stored tensors, with where they go, while they are collected."""

    index: Index  # what is stored
    limits: ReadLimits
    boxes: list[tuple[int, Box]] = field(default_factory=list, init=False)
    """Row of the stored tensor, and box, of each."""
    destinations: list[Destination] = field(default_factory=list, init=False)  # where each goes

    def add(self, source: str, box: Box, destination: Destination) -> None:
        """Want a box of a stored tensor."""
        self.boxes.append((self.index.row(source), box))
        self.destinations.append(destination)

    def array(self, source: str, box: Box) -> CarrierArray:
        """Want a box of a stored tensor in an array of its own; returns the array, still empty."""
        array = np.empty(box.shape, BY_NAME[self.index[source].dtype].carrier)
        self.add(source, box, Destination(box.offset, HostMemory(array)))
        return array

    def planned(self) -> RankReads:
        """Plan the reads of what is wanted; CoverageError if no piece holds a part of it."""
        table = BoxTable.of(self.index.tensors, self.boxes)
        plan = plan_load(self.index, table, self.limits)
        return RankReads(self.index, plan, self.destinations, int(table.num_bytes.sum()))


Check = tuple[str, Callable[[], bool]]
"""What to say if two stored values differ, and whether they are equal, once both are read."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A part of a target."""

    name: str  # its tensor in the state
    box: Box  # the part
    layout: Layout  # its memory
    content: object
    """Equal for parts that are filled with elements of one tensor, stored or made, each part with
    the elements in its box."""


@dataclass(slots=True)
class Draft:
    """The reads of a load, while they are collected."""

    filling: Wanted  # what is read into the state
    comparing: Wanted  # what is read to be compared
    filled: list[Filled] = field(default_factory=list, init=False)
    """The parts of the state that are filled."""
    zeros: list[tuple[Memory, tuple[int, ...]]] = field(default_factory=list, init=False)
    """Memory, with its shape, that is filled with zeros before."""
    means: list[MeanRows] = field(default_factory=list, init=False)
    """New rows that are filled with a mean of what is read."""
    checks: list[Check] = field(default_factory=list, init=False)  # what has to be equal then

    def fill(self, name: str, box: Box, memory: Memory, content: object) -> None:
        """Note that memory is filled; see `Filled`."""
        layout = memory.layout
        if layout is not None:
            self.filled.append(Filled(name, box, layout, content))

    def compare(self, problem: str, first: CarrierArray, other: CarrierArray) -> None:
        """Compare two arrays of one shape, once they are read."""
        self.checks.append((problem, lambda: first.tobytes() == other.tobytes()))


def refuse_shared(filled: Sequence[Filled], conflicts: list[str]) -> None:
    """Find parts that share memory and would be filled one over the other, and say so."""
    for one, other in shared_pairs([part.layout for part in filled]):
        first, second = filled[one], filled[other]
        if not _same_elements(first, second):
            names = first.name if first.name == second.name else f"{first.name} and {second.name}"
            conflicts.append(
                f"{names}: different views that share memory; clone() one of them, or leave it out"
            )


def _same_elements(first: Filled, second: Filled) -> bool:
    """True if two parts keep each element of their tensor at the same address."""
    one, other = first.layout, second.layout
    if first.content != second.content or one.itemsize != other.itemsize:
        return False
    strides, corner = [], []
    distance = other.address - one.address
    for dim, (start, extent) in enumerate(zip(first.box.offset, one.shape, strict=True)):
        far, length = second.box.offset[dim], other.shape[dim]
        # The stride of a dim with one element means nothing.
        stride = one.strides[dim] if extent > 1 else other.strides[dim]
        if extent > 1 and length > 1 and one.strides[dim] != other.strides[dim]:
            return False
        strides.append(stride if max(extent, length) > 1 or start == far else 0)
        corner.append(max(start + extent, far + length) - min(start, far))
        distance -= stride * (far - start)
    both = Layout(one.device, one.address, tuple(corner), tuple(strides), one.itemsize)
    return distance == 0 and not both.overlaps_itself()


def source_in_target(
    sources: Sequence[tuple[str, Layout]], filled: Sequence[Filled]
) -> tuple[str, str] | None:
    """The names of a source and of a target that share memory; None if there are none."""
    layouts = [layout for _, layout in sources] + [part.layout for part in filled]
    limit = len(sources)
    for one, other in shared_pairs(layouts, lambda one, other: (one < limit) == (other < limit)):
        return sources[one][0], filled[other - limit].name
    return None
