"""What a load does on one rank: a description of its state, matched with what is stored.

`match` is pure: it compares the two, refuses what does not fit, and gives a plan. Nothing in the
state is touched for it. `checkpoint.loading` executes the plan: it reads, and puts values back.

A tensor that a transformation makes is wanted as the regions of stored tensors that it is made of.
They go through a memory that brings them into their new shape (`remesh.pipeline.source`), so only
needed bytes are read, in stored dtypes, and no whole tensor is ever made.

Of a tensor that may have another size than what is stored, as a `ShardedTensor` declares it, the
box is filled that both have in common. What the target has beyond it becomes zeros; what is stored
beyond it is not read. Optimizer state follows its parameter: where that may be resized, so may its
state.

Two tensors of a state may be one memory: tied weights, and views of all kinds. A load fills one
after the other, so where they share an element, the last one would win. They may be filled

* if they share nothing but the span: rows of one matrix, its columns, every second element;
* if both are filled with the same elements of the same stored tensor, each at the same place;
* if they are one view, tied weights above all, and what is stored for its names is equal. Names
  alone cannot tell that for tensors that are stored apart, so they are read first, into memory of
  their own, and compared.

All else is an error that names the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from remesh.checkpoint import mismatch
from remesh.checkpoint.buffers import name_on_rank
from remesh.checkpoint.local import casting_memory_of, memory_of, with_all_names
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.transformed import TransformedState
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredTensor
from remesh.core.memory import CarrierArray, HostMemory, Memory
from remesh.core.state import TENSOR_RECORD, Description, TensorEntry
from remesh.core.strided import Layout, shared_pairs
from remesh.core.tables import BoxTable
from remesh.errors import StateError
from remesh.pipeline import Destination
from remesh.pipeline.source import check_conversion, region_destination
from remesh.planner import LoadPlan, ReadLimits, plan_load
from remesh.transform import Region, Resolved, Transform

Names = StoredState | TransformedState
"""What is stored, by the names that a state has for it."""

Check = tuple[str, Callable[[], bool]]
"""What to say if two stored values differ, and whether they are equal, once both are read."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of the caller of a load."""

    keep_missing: bool  # leave what is not stored as it is
    refuse_unexpected: bool  # refuse a checkpoint with names that no rank asks for
    cast: bool  # convert dtypes
    transform: Transform | None  # what stored tensors become; None if they stay what they are


@dataclass(frozen=True, eq=False)
class RankReads:
    """Boxes of stored tensors that one rank reads, and where each goes."""

    index: Index  # what is stored
    limits: ReadLimits  # how it is read
    boxes: list[tuple[int, Box]] = field(default_factory=list)  # row of each in the index, and box
    destinations: list[Destination] = field(default_factory=list)  # where each goes

    def add(self, source: str, box: Box, destination: Destination) -> None:
        self.boxes.append((self.index.row(source), box))
        self.destinations.append(destination)

    def array(self, source: str, box: Box) -> CarrierArray:
        """Read a box into an array of its own; returns the array, still empty."""
        array = np.empty(box.shape, BY_NAME[self.index[source].dtype].carrier)
        self.add(source, box, Destination(box.offset, HostMemory(array)))
        return array

    def add_regions(self, regions: Iterable[Region], target: Destination) -> None:
        """Read regions of stored tensors into the memory of a box that is made of them."""
        for region in regions:
            check_conversion(self.index[region.source].dtype, region.dtypes)
            to = region_destination(self.index, region, target)
            self.add(region.source, region.source_box, to)

    @cached_property
    def table(self) -> BoxTable:
        """The boxes, once all are there."""
        return BoxTable.of(self.index.tensors, self.boxes)

    @cached_property
    def plan(self) -> LoadPlan:
        """How they are read; CoverageError if no piece holds a part of them."""
        return plan_load(self.index, self.table, self.limits)


@dataclass(frozen=True, slots=True, eq=False)
class RankLoadPlan:
    """The part of one rank in a load."""

    description: Description  # the state
    stored: StoredState  # what is stored
    names: Names  # the same by the names of the state
    filling: RankReads  # what is read into the tensors of the state
    before: Sequence[Callable[[], None]]  # what is done before, such as to fill new elements
    comparing: RankReads  # what is read to be compared, before anything in the state is touched
    checks: Sequence[Check]  # what has to be equal then
    report: RestoreReport  # what is done, but for what depends on other ranks and on the reading

    def value(self, name: str) -> object:
        """A loaded value, or what the state had if the checkpoint lacks it."""
        has = self.names.has_value(name)
        return self.names.value(name) if has else self.description.values[name]

    def object(self, unique_name: str) -> object:
        """A loaded element of a sharded object, or what the state had."""
        if unique_name in self.stored.document.objects:
            return self.stored.object(unique_name)
        return next(e.data for e in self.description.objects if e.unique_name == unique_name)

    def asked_bits(self) -> bytes:
        """A bit for each stored name: does this rank ask for it, or a name that it is tied to?"""
        description, stored = self.description, self.stored
        asked = {entry.name for entry in description.tensors}
        asked.update(description.values, description.merged_lists)
        asked.update(element.unique_name for element in description.objects)
        if isinstance(self.names, TransformedState):
            asked = self.names.read_for(asked)
        asked.update(stored.holders(asked))
        index = stored.index
        rows = {index.row(name) for name in asked if name in index}
        bits = [name in asked or (name in index and index.row(name) in rows) for name in stored]
        return np.packbits(np.array(bits, dtype=np.bool_)).tobytes()


def match(
    description: Description,
    names: Names,
    options: LoadOptions,
    reserved: Sequence[tuple[str, Layout]] = (),
) -> RankLoadPlan:
    """Compare a state, described with `names`, with what is stored, and plan the reads.

    Memory in `reserved`, given by names and layouts, must not be filled.
    """
    return _Matching(description, names, options).run(reserved)


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """A part of a target."""

    name: str  # its tensor in the state
    box: Box  # the part
    layout: Layout  # its memory
    content: object
    """Equal for parts that are filled with elements of one tensor, stored or made, each part with
    the elements in its box."""


class _Matching:
    """One call of `match`, whose arguments it has."""

    def __init__(self, description: Description, names: Names, options: LoadOptions) -> None:
        self.description = description
        self.names = names
        self.made = names if isinstance(names, TransformedState) else None
        self.options = options
        self.stored = names.stored if isinstance(names, TransformedState) else names
        self.index = self.stored.index
        self.found = Findings()
        self.entries = with_all_names(description.tensors)
        declared = {one for entry, own in self.entries if entry.may_resize for one in own}
        follow = {one for entry, own in self.entries if entry.follows in declared for one in own}
        self.resizable = declared | follow  # tensors of another size, and state that follows
        self.filling, self.comparing = (RankReads(self.index, self.stored.limits) for _ in "12")
        self.filled: list[_Filled] = []
        self.before: list[Callable[[], None]] = []
        self.checks: list[Check] = []

    def run(self, reserved: Sequence[tuple[str, Layout]]) -> RankLoadPlan:
        found = self.found
        self.match_values()
        plain: list[tuple[TensorEntry, StoredTensor]] = []
        made: list[tuple[TensorEntry, str]] = []
        for entry, own in self.entries:
            sources = [name for name in own if name in self.index]
            if self.made and not self.made.resolved.untouched.issuperset(own):
                target = self.match_made(self.made.resolved, entry, own)
                made += [] if target is None else [(entry, target)]
            elif sources:
                found.derived.update({name: sources[0] for name in own if name not in sources})
                tensor = self.index[sources[0]]
                if self.fits(entry, tensor):
                    plain.append((entry, tensor))
                    self.compare_tied(entry, sources)
            else:
                self.file_absent(entry.name)
        self.refuse_state_left(plain)
        mismatch.refuse(self.stored, found, keep_missing=self.options.keep_missing)
        for entry, tensor in plain:
            self.want(entry, tensor)
        if self.made:
            for entry, target in made:
                self.want_made(self.made.resolved, entry, target)
        self.refuse_shared()
        mismatch.refuse(self.stored, found, keep_missing=self.options.keep_missing)
        if reserved:
            self.refuse_reserved(reserved)
        _ = self.filling.plan, self.comparing.plan
        return RankLoadPlan(
            self.description,
            self.stored,
            self.names,
            self.filling,
            self.before,
            self.comparing,
            self.checks,
            found.report(tuple(self.description.dropped), int(self.filling.table.num_bytes.sum())),
        )

    # -- values -----------------------------------------------------------------------------

    def match_values(self) -> None:
        """Find values and objects that are missing or stored as something else."""
        description, names, found = self.description, self.names, self.found
        for name, value in description.values.items():
            if name in description.fixed:
                self.match_fixed(name, value)
            elif names.has_value(name):
                self.match_known(name, names.value(name))
            elif name in self.index:
                found.conflicts.append(f"{name}: a tensor is stored where a plain value is wanted")
            elif self.made and name in self.made.resolved.kept:
                found.kept.append(name)
            elif name not in description.optional:
                found.missing.append(name)
        for name, items in description.merged_lists.items():
            known = names.merged_list(name)
            found.new_parameters |= not set(items).issubset(known or ())
            absent = sorted(set(items).difference(known or ()))
            found.missing += [name] if known is None else [f"{name} ({item})" for item in absent]
        for element in description.objects:
            name = element.unique_name
            if name in self.stored.document.objects:
                self.match_known(name, self.stored.object(name))
            else:
                found.missing.append(name)

    def match_fixed(self, name: str, wanted: object) -> None:
        """Compare the record of a tensor that is made of others with the stored one."""
        tensor = name.removesuffix(f".{TENSOR_RECORD}")
        if self.names.has_value(name):
            known = self.names.value(name)
            if values.encode_read(known, name) == values.encode_read(wanted, name):
                self.found.restored.append(name)
            else:
                self.found.is_another(tensor, mismatch.difference(known, wanted))
        elif self.names.tensor(tensor) is not None:
            kind = mismatch.kind_of(wanted)
            self.found.is_another(tensor, f"a plain tensor is stored, a {kind} is wanted")
        else:
            self.found.missing.append(name)

    def match_known(self, name: str, value: object) -> None:
        """File a stored value under what it is: one that this program can have, or not."""
        unknown = next(values.unresolved(value), None)
        if unknown is None:
            self.found.restored.append(name)
        elif unknown.kind == "pickle":
            self.found.conflicts.append(f"{name}: {unknown.payload}")
        else:
            self.found.conflicts.append(
                f"{name}: the stored value is a {unknown.type_name}, which this program does not "
                "know; import the module that defines it before loading"
            )

    # -- tensors ----------------------------------------------------------------------------

    def fits(self, entry: TensorEntry, stored: StoredTensor) -> bool:
        """True if a stored tensor can fill an entry; what becomes of it, or why not, is filed."""
        name, found = entry.name, self.found
        differ = f"{name}: dtype {stored.dtype} is stored, {entry.dtype} is wanted"
        is_opaque = BY_NAME[stored.dtype].is_opaque or BY_NAME[entry.dtype].is_opaque
        shapes = stored.shape, entry.global_shape
        may_differ = name in self.resizable and len(shapes[0]) == len(shapes[1])
        if shapes[0] != shapes[1] and not may_differ:
            text = f"{name}: shape {stored.shape} is stored, {entry.global_shape} is wanted"
            found.conflicts.append(text)
            found.other_sizes |= len(shapes[0]) == len(shapes[1])
        elif stored.dtype != entry.dtype and not self.options.cast:
            found.conflicts.append(f"{differ} (cast=True converts)")
        elif stored.dtype != entry.dtype and is_opaque:
            found.conflicts.append(f"{differ}, and torch does not convert between them")
        else:
            if shapes[0] != shapes[1]:
                found.resized[name] = f"{stored.shape} → {entry.global_shape}"
            if stored.dtype != entry.dtype:
                found.cast[name] = f"{stored.dtype} → {entry.dtype}"
            if name not in found.cast and name not in found.resized and name not in found.derived:
                found.restored.append(name)
            return True
        return False

    def refuse_state_left(self, filled: Sequence[tuple[TensorEntry, StoredTensor]]) -> None:
        """File optimizer state that keeps the size that its parameter had before it was resized."""
        resized = self.found.resized
        sizes = {
            e.name: (stored.shape, e.global_shape) for e, stored in filled if e.name in resized
        }
        for entry, stored in filled:
            if entry.follows not in sizes or stored.shape != entry.global_shape:
                continue
            if has_size_of(stored.shape, *sizes[entry.follows]):
                self.found.conflicts.append(
                    f"{entry.name}: state of shape {stored.shape} does not follow its parameter, "
                    f"which is resized ({resized[entry.follows]}); load without the optimizer"
                )

    def file_absent(self, name: str) -> None:
        """File a tensor that is not stored under what is stored in its place, if anything is."""
        record = f"{name}.{TENSOR_RECORD}"
        if self.names.has_value(record):
            kind = mismatch.kind_of(self.names.value(record))
            self.found.is_another(name, f"a {kind} is stored, a plain tensor is wanted")
        elif self.stored.has_value(name):
            what = "a plain value is stored where a tensor is wanted; None in its place takes it"
            self.found.conflicts.append(f"{name}: {what}")
        elif name not in self.description.optional:
            self.found.missing.append(name)

    def compare_tied(self, entry: TensorEntry, sources: list[str]) -> None:
        """Compare stored tensors that are to fill one tied tensor, if they are stored apart."""
        index = self.index
        first, *others = {index.row(name): name for name in reversed(sources)}.values()
        shape = index[first].shape
        for other in others:
            if (index[other].shape, index[other].dtype) != (shape, index[first].dtype):
                self.found.conflicts.append(mismatch.untied(other, first, "shape or dtype"))
                continue
            for part in entry.parts:
                box = part.box.intersect(Box.whole(shape))
                if box is not None:
                    arrays = [self.comparing.array(name, box) for name in (first, other)]
                    self.compare(mismatch.untied(other, first, "values"), *arrays)

    def compare(self, problem: str, first: CarrierArray, other: CarrierArray) -> None:
        """Compare two arrays of one shape, once they are read."""
        self.checks.append((problem, lambda: first.tobytes() == other.tobytes()))

    def want(self, entry: TensorEntry, stored: StoredTensor) -> None:
        """Want this rank's part of a tensor from a stored one."""
        is_exact = stored.shape == entry.global_shape
        content = ("stored", self.index.row(stored.name))
        for part in entry.parts:
            if 0 in part.box.shape:
                continue
            memory = (
                memory_of(part.data, entry.name, writable=True)
                if stored.dtype == entry.dtype
                else casting_memory_of(part.data, stored.dtype, entry.name)
            )
            box = part.box if is_exact else part.box.intersect(Box.whole(stored.shape))
            if box != part.box:
                self.before.append(partial(fill_with_zeros, memory, part.box.shape))
            if box is not None:
                self.filling.add(stored.name, box, Destination(part.box.offset, memory))
            self.note_filled(entry.name, part.box, memory, content)

    def note_filled(self, name: str, box: Box, memory: Memory, content: object) -> None:
        if memory.layout is not None:
            self.filled.append(_Filled(name, box, memory.layout, content))

    # -- tensors that a transformation makes ------------------------------------------------

    def match_made(self, resolved: Resolved, entry: TensorEntry, own: list[str]) -> str | None:
        """The name under which a tensor is made; None if it is not, which is then filed.

        A tied tensor has several names of its `own`.
        """
        found = self.found
        if any(name in resolved.kept for name in own):
            found.kept.extend(own)
            return None
        made = [name for name in own if name in resolved.plans]
        boxes = [part.box for part in entry.parts] if len(made) > 1 else []
        problems = [f"{n}: {resolved.conflicts[n]}" for n in own if n in resolved.conflicts]
        if problems:
            found.conflicts.extend(problems)
        elif not made:
            found.missing.append(entry.name)
        elif len({tuple(self.made_of(resolved, name, box) for box in boxes) for name in made}) > 1:
            found.conflicts.append(
                f"{' and '.join(made)} are tied in the state, but made of different elements"
            )
        else:
            sources = resolved.sources_of(made[0])
            filed = found.renamed if resolved.is_whole(made[0]) else found.derived
            filed.update({name: ", ".join(sources) for name in own})
            return made[0]
        return None

    def made_of(self, resolved: Resolved, name: str, box: Box) -> tuple[Region, ...]:
        """What a box of a tensor is made of; of a tied weight under the name that has it."""
        aliases = self.index.aliases
        regions = resolved.regions(name, box)
        return tuple(
            dataclasses.replace(one, source=aliases.get(one.source, one.source)) for one in regions
        )

    def own_buffer(self, region: Region, rank: int) -> Region:
        """The same region of a rank's own buffer, if that is stored for each rank."""
        own = name_on_rank(region.source, rank)
        return dataclasses.replace(region, source=own) if own in self.index else region

    def want_made(self, resolved: Resolved, entry: TensorEntry, name: str) -> None:
        """Want this rank's part of a tensor that is made of stored ones."""
        for part in entry.parts:
            regions = resolved.regions(name, part.box)
            if entry.is_buffer and self.stored.rank is not None:
                regions = tuple(self.own_buffer(one, self.stored.rank) for one in regions)
            if regions:
                memory = memory_of(part.data, entry.name, writable=True)
                self.filling.add_regions(regions, Destination(part.box.offset, memory))
                self.note_filled(entry.name, part.box, memory, ("made", name))
            checks = resolved.checks(name, part.box)
            expected = self.array_of(regions, part.box, entry.dtype) if checks else np.empty(0)
            for region in checks:
                problem = (
                    f"{name}: {region.source} must hold the same values as "
                    f"{', '.join(resolved.sources_of(name))}, but differs in {region.source_box}"
                )
                # The dots keep it a view, also without dims.
                place: tuple[Any, ...] = (*region.target_box.relative_to(part.box).slices, ...)
                other = self.array_of((region,), region.target_box, entry.dtype)
                self.compare(problem, expected[place], other)

    def array_of(self, regions: Sequence[Region], box: Box, dtype: str) -> CarrierArray:
        """Want a box of a target as it is going to be; returns where it is then."""
        made = np.zeros(box.shape, BY_NAME[dtype].carrier)
        self.comparing.add_regions(regions, Destination(box.offset, HostMemory(made)))
        return made

    # -- shared memory ----------------------------------------------------------------------

    def refuse_shared(self) -> None:
        """File parts that share memory and would be filled one over the other."""
        for one, other in shared_pairs([part.layout for part in self.filled]):
            first, second = self.filled[one], self.filled[other]
            if not _same_elements(first, second):
                names = " and ".join(dict.fromkeys((first.name, second.name)))
                self.found.conflicts.append(
                    f"{names}: different views that share memory; clone() one of them, or leave it "
                    "out"
                )

    def refuse_reserved(self, reserved: Sequence[tuple[str, Layout]]) -> None:
        """Refuse to fill the memory of a source."""
        layouts = [layout for _, layout in reserved] + [part.layout for part in self.filled]
        limit = len(reserved)
        for one, other in shared_pairs(layouts, lambda a, b: (a < limit) == (b < limit)):
            raise StateError(
                f"{reserved[one][0]} of the source and {self.filled[other - limit].name} of the "
                "target state share memory\n"
                "The source is read while the target is filled; give the target tensors of its own."
            )


def _same_elements(first: _Filled, second: _Filled) -> bool:
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


# ---------------------------------------------------------------------------------------------
# Tensors of another size than what is stored
# ---------------------------------------------------------------------------------------------


def has_size_of(state: tuple[int, ...], stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True if optimizer state is as long as its parameter was in a dim that is resized.

    Arguments are the shape of the state, and the stored and the new shape of the parameter.
    """
    if len(state) == len(stored):
        changed = zip(state, stored, wanted, strict=True)
        return any(extent == old != new and extent > 1 for extent, old, new in changed)
    lengths = {old for old, new in zip(stored, wanted, strict=True) if old != new and old > 1}
    return not lengths.isdisjoint(state)


def fill_with_zeros(memory: Memory, shape: tuple[int, ...]) -> None:
    """Fill memory of a shape."""
    memory.copy_in(Box.whole(shape), np.broadcast_to(np.zeros((), memory.carrier), shape))
