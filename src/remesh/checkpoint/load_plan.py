"""What a load does on one rank: a description of its state, matched with what is stored.

`match` is pure: it compares the two, refuses what does not fit, and gives a frozen plan. Nothing in
the state is touched for it. `checkpoint.loading` executes the plan: it reads, and puts values back.

Memory that is the target of two stored tensors, tied weights above all, can be filled only if both
have the same values there. Names alone cannot tell that for tensors that are stored apart, so they
are read first, into memory of their own, and compared (`checkpoint.comparing`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.checkpoint import mismatch
from remesh.checkpoint.comparing import (
    Check,
    Draft,
    Filled,
    RankReads,
    Wanted,
    refuse_shared,
    source_in_target,
)
from remesh.checkpoint.local import casting_memory_of, memory_of, with_all_names
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.resizing import MeanRows, fitting_patterns, has_size_of, policies_of, refusal
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.transformed import TransformedState, match_made, want_made
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredTensor
from remesh.core.memory import Memory
from remesh.core.state import TENSOR_RECORD, Description, TensorEntry
from remesh.core.strided import Layout
from remesh.errors import StateError
from remesh.pipeline import Destination
from remesh.transform import Transform

Names = StoredState | TransformedState
"""What is stored, by the names that a state has for it."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of the caller of a load."""

    keep_missing: bool  # leave what is not stored as it is
    refuse_unexpected: bool  # refuse a checkpoint with names that no rank asks for
    cast: bool  # convert dtypes
    transform: Transform | None  # what stored tensors become; None if they stay what they are
    resize: Mapping[str, str] = field(default_factory=dict)
    """What becomes of new elements of tensors that are stored in another size, by name or pattern
    (`checkpoint.resizing`)."""


@dataclass(frozen=True, slots=True, eq=False)
class RankLoadPlan:
    """The part of one rank in a load."""

    description: Description  # the state
    stored: StoredState  # what is stored
    names: Names  # the same by the names of the state
    filling: RankReads  # what is read into the tensors of the state
    zeros: Sequence[tuple[Memory, tuple[int, ...]]]
    """Memory, with its shape, that is filled with zeros before."""
    means: Sequence[MeanRows]  # new rows that are filled with a mean of what is read
    comparing: RankReads  # what is read to be compared, before anything in the state is touched
    checks: Sequence[Check]  # what has to be equal then
    asked: bytes  # one bit for each stored name, set if this rank asks for it
    fitting: Sequence[str]  # what of `LoadOptions.resize` fits a tensor of this rank
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


def match(
    description: Description,
    names: Names,
    options: LoadOptions,
    reserved: Sequence[tuple[str, Layout]] = (),
) -> RankLoadPlan:
    """Compare a state, described with `names`, with what is stored, and plan the reads.

    Memory in `reserved`, given by names and layouts, must not be filled.
    """
    stored = names.stored if isinstance(names, TransformedState) else names
    found = Findings()
    draft = Draft(*(Wanted(stored.index, stored.limits) for _ in range(2)))
    _match_values(description, names, stored, found)
    plain: list[tuple[TensorEntry, StoredTensor]] = []
    made: list[tuple[TensorEntry, str]] = []
    entries = with_all_names(description.tensors)
    policies = policies_of(entries, options.resize)
    fitting = fitting_patterns(entries, options.resize)
    found.unfitting += [pattern for pattern in options.resize if pattern not in fitting]
    for entry, own in entries:
        resized = names.resized_from(own) if isinstance(names, TransformedState) else None
        if resized is not None:
            tensor = stored.index[resized]
            if _fits(entry, tensor, policies.get(entry.name), options.cast, found):
                plain.append((entry, tensor))
        elif isinstance(names, TransformedState) and not names.is_untouched(own):
            target = match_made(names, entry, own, found)
            made += [] if target is None else [(entry, target)]
        elif sources := [name for name in own if name in stored.index]:
            found.derived.update({name: sources[0] for name in own if name not in sources})
            tensor = stored.index[sources[0]]
            if _fits(entry, tensor, policies.get(entry.name), options.cast, found):
                plain.append((entry, tensor))
                _compare_tied(entry, sources, stored.index, found, draft)
        else:
            _file_absent(entry.name, description, names, stored, found)
    _refuse_state_left(plain, found)
    mismatch.refuse(stored, found, keep_missing=options.keep_missing)
    for entry, tensor in plain:
        _want(entry, tensor, policies.get(entry.name), draft)
    for entry, target in made:
        assert isinstance(names, TransformedState)
        want_made(names, entry, target, draft)
    refuse_shared(draft.filled, found.conflicts)
    mismatch.refuse(stored, found, keep_missing=options.keep_missing)
    _refuse_reserved(reserved, draft.filled)
    filling = draft.filling.planned()
    return RankLoadPlan(
        description,
        stored,
        names,
        filling,
        draft.zeros,
        draft.means,
        draft.comparing.planned(),
        draft.checks,
        _asked_bits(description, names, stored),
        fitting,
        found.report(tuple(description.dropped), filling.num_bytes),
    )


def _match_values(
    description: Description, names: Names, stored: StoredState, found: Findings
) -> None:
    """Find values and objects that are missing or stored as something else."""
    for name, value in description.values.items():
        if name in description.fixed:
            _match_fixed(name, value, names, found)
        elif names.has_value(name):
            _match_known(name, names.value(name), found)
        elif name in stored.index:
            found.conflicts.append(f"{name}: a tensor is stored where a plain value is wanted")
        elif name not in description.optional:
            found.missing.append(name)
    for name, items in description.merged_lists.items():
        known = names.merged_list(name)
        found.new_parameters |= not set(items).issubset(known or ())
        if known is None:
            found.missing.append(name)
        else:
            absent = sorted(set(items).difference(known))
            found.missing.extend(f"{name} ({item})" for item in absent)
    for element in description.objects:
        name = element.unique_name
        if name in stored.document.objects:
            _match_known(name, stored.object(name), found)
        else:
            found.missing.append(name)


def _match_fixed(name: str, wanted: object, names: Names, found: Findings) -> None:
    """Compare the record of a tensor that is made of others with the stored one."""
    tensor = name.removesuffix(f".{TENSOR_RECORD}")
    if names.has_value(name):
        known = names.value(name)
        if values.encode_read(known, name) == values.encode_read(wanted, name):
            found.restored.append(name)
        else:
            found.is_another(tensor, mismatch.difference(known, wanted))
    elif names.tensor(tensor) is not None:
        kind = mismatch.kind_of(wanted)
        found.is_another(tensor, f"a plain tensor is stored, a {kind} is wanted")
    else:
        found.missing.append(name)


def _match_known(name: str, value: object, found: Findings) -> None:
    """File a stored value under what it is: one that this program can have, or not."""
    unknown = next(values.unresolved(value), None)
    if unknown is None:
        found.restored.append(name)
    elif unknown.kind == "pickle":
        found.conflicts.append(f"{name}: {unknown.payload}")
    else:
        found.conflicts.append(
            f"{name}: the stored value is a {unknown.type_name}, which this program does not "
            "know; import the module that defines it before loading"
        )


def _fits(
    entry: TensorEntry, stored: StoredTensor, policy: str | None, cast: bool, found: Findings
) -> bool:
    """True if a stored tensor can fill an entry; what becomes of it, or why not, is filed."""
    name = entry.name
    differ = f"{name}: dtype {stored.dtype} is stored, {entry.dtype} is wanted"
    is_opaque = BY_NAME[stored.dtype].is_opaque or BY_NAME[entry.dtype].is_opaque
    shapes = stored.shape, entry.global_shape
    is_real = stored.dtype.startswith(("float", "bfloat")) and not BY_NAME[stored.dtype].is_opaque
    refused = None if shapes[0] == shapes[1] else refusal(*shapes, policy, is_real=is_real)
    if refused is not None:
        found.conflicts.append(f"{name}: {refused}")
        if policy is None and sum(map(operator.ne, *shapes)) == 1 and len({*map(len, shapes)}) == 1:
            found.resizable.append(name)
    elif stored.dtype != entry.dtype and not cast:
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


def _refuse_state_left(filled: Sequence[tuple[TensorEntry, StoredTensor]], found: Findings) -> None:
    """File optimizer state that keeps the size that its parameter had before it was resized."""
    sizes = {
        entry.name: (stored.shape, entry.global_shape)
        for entry, stored in filled
        if entry.name in found.resized
    }
    for entry, stored in filled:
        if entry.follows not in sizes or stored.shape != entry.global_shape:
            continue
        if has_size_of(stored.shape, *sizes[entry.follows]):
            found.conflicts.append(
                f"{entry.name}: state of shape {stored.shape} does not follow its parameter, "
                f"which is resized ({found.resized[entry.follows]}); load without the optimizer"
            )


def _file_absent(
    name: str, description: Description, names: Names, stored: StoredState, found: Findings
) -> None:
    """File a tensor that is not stored under what is stored in its place, if anything is."""
    record = f"{name}.{TENSOR_RECORD}"
    if names.has_value(record):
        kind = mismatch.kind_of(names.value(record))
        found.is_another(name, f"a {kind} is stored, a plain tensor is wanted")
    elif stored.has_value(name):
        found.conflicts.append(f"{name}: a plain value is stored where a tensor is wanted")
    elif name not in description.optional:
        found.missing.append(name)


def _compare_tied(
    entry: TensorEntry,
    sources: list[str],
    index: Index,
    found: Findings,
    draft: Draft,
) -> None:
    """Compare stored tensors that are to fill one tied tensor, if they are stored apart."""
    first, *others = {index.row(name): name for name in reversed(sources)}.values()
    shape = index[first].shape
    for other in others:
        if (index[other].shape, index[other].dtype) != (shape, index[first].dtype):
            found.conflicts.append(mismatch.untied(other, first, "shape or dtype"))
            continue
        for part in entry.parts:
            box = part.box.intersect(Box.whole(shape))
            if box is not None:
                problem = mismatch.untied(other, first, "values")
                arrays = [draft.comparing.array(name, box) for name in (first, other)]
                draft.compare(problem, *arrays)


def _want(entry: TensorEntry, stored: StoredTensor, policy: str | None, draft: Draft) -> None:
    """Want this rank's part of a tensor from a stored one."""
    is_exact = stored.shape == entry.global_shape
    content = ("stored", draft.filling.index.row(stored.name))
    for part in entry.parts:
        if 0 in part.box.shape:
            continue
        memory = (
            memory_of(part.data, entry.name, writable=True)
            if stored.dtype == entry.dtype
            else casting_memory_of(part.data, stored.dtype, entry.name)
        )
        box = part.box if is_exact else part.box.intersect(Box.whole(stored.shape))
        if box != part.box and policy == "zeros":
            draft.zeros.append((memory, part.box.shape))
        elif box != part.box and policy == "mean":
            draft.means.append(_mean_rows(part.box, memory, stored, draft))
        if box is not None:
            draft.filling.add(stored.name, box, Destination(part.box.offset, memory))
        draft.fill(entry.name, part.box, memory, content)


def _mean_rows(box: Box, memory: Memory, stored: StoredTensor, draft: Draft) -> MeanRows:
    """Want what the mean of stored rows is made of, for the rows of a box that are new."""
    known = max(stored.shape[0] - box.offset[0], 0)
    new = Box((known, *[0] * (box.ndim - 1)), (box.shape[0] - known, *box.shape[1:]))
    columns = Box((0, *box.offset[1:]), (stored.shape[0], *box.shape[1:]))
    return MeanRows(memory, new, stored.dtype, draft.filling.array(stored.name, columns))


def _refuse_reserved(reserved: Sequence[tuple[str, Layout]], filled: Sequence[Filled]) -> None:
    shared = source_in_target(reserved, filled) if reserved else None
    if shared is not None:
        raise StateError(
            f"{shared[0]} of the source and {shared[1]} of the target state share memory\n"
            "The source is read while the target is filled; give the target tensors of its own."
        )


def _asked_bits(description: Description, names: Names, stored: StoredState) -> bytes:
    """A bit for each stored name: is it, or a name that it is tied to, asked for?"""
    asked = {entry.name for entry in description.tensors}
    asked.update(description.values, description.merged_lists)
    asked.update(element.unique_name for element in description.objects)
    if isinstance(names, TransformedState):
        asked.update(names.read_for(asked))
    asked.update(stored.holders(asked))
    index = stored.index
    rows = {index.row(name) for name in asked if name in index}
    bits = [name in asked or (name in index and index.row(name) in rows) for name in stored.names()]
    return np.packbits(np.array(bits, dtype=np.bool_)).tobytes()
