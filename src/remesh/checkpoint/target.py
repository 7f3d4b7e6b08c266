"""One rank's state as the target of a load: compared, planned, filled, put back.

Nothing in the state is touched before `fill_zeros` and the reading of `filling`.

Memory that is the target of two stored tensors, tied weights above all, can be filled only if both
have the same values there. Names alone cannot tell that for tensors that are stored apart, so they
are read first, into memory of their own, and compared (`checkpoint.comparing`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remesh import values
from remesh.checkpoint.buffers import own_buffers
from remesh.checkpoint.comparing import Comparisons, Filled, Wanted, compare_shared
from remesh.checkpoint.local import (
    casting_memory_of,
    collector_rests,
    describe_local,
    memory_of,
    with_all_names,
)
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.stored import StoredState
from remesh.dtypes import BY_NAME
from remesh.errors import MismatchError
from remesh.geometry import Box
from remesh.index import StoredTensor
from remesh.memory import Memory
from remesh.pipeline import Destination
from remesh.sharded import ArrayLike
from remesh.state import TENSOR_RECORD, Description, TensorEntry

MAX_LISTED = 10
"""How many names of a kind an error message lists; the exception carries all."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the caller of a load allows.

    Attributes:
        keep_missing: Leave what is not stored as it is.
        refuse_unexpected: Refuse a checkpoint with names that no rank asks for.
        cast: Convert dtypes.
    """

    keep_missing: bool
    refuse_unexpected: bool
    cast: bool


@dataclass(slots=True)
class Target:
    """This rank's state as the target of a load; its methods are the steps."""

    stored: StoredState
    url: str
    options: LoadOptions
    description: Description = field(default_factory=Description, init=False)
    findings: Findings = field(default_factory=Findings, init=False)
    others: list[str] = field(default_factory=list, init=False)
    filling: Wanted = field(init=False)
    filled: list[Filled] = field(default_factory=list, init=False)
    comparisons: Comparisons = field(init=False)
    zeros: list[tuple[Memory, tuple[int, ...]]] = field(default_factory=list, init=False)
    reads: list[int] = field(default_factory=list, init=False)
    reads_shared: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.filling = Wanted(self.stored.index)
        self.comparisons = Comparisons(self.stored.index)

    def prepare(self, state: Any) -> bytes:
        """Compare the state with what is stored, and plan the reads.

        Returns:
            One bit for each stored name, set if this rank asks for it.

        Raises:
            MismatchError: If they do not fit.
        """
        with collector_rests():
            self.description = describe_local(state, self.stored)
            if self.stored.rank is not None:
                self.description.tensors = own_buffers(
                    self.description.tensors, self.stored.index, self.stored.rank
                )
            self._match_values()
            fills = self._match_tensors()
            self._refuse_mismatch()
            for entry, stored in fills:
                self._want(entry, stored)
            self._plan()
        return self._asked_bits(self._asked_names())

    def _refuse_mismatch(self) -> None:
        found = self.findings
        # What is stored of a tensor that is something else need not be told one by one.
        other = tuple(f"{name}." for name in self.others)
        found.missing = [name for name in found.missing if not name.startswith(other)]
        found.conflicts = [told for told in found.conflicts if not told.startswith(other)]
        if found.conflicts or (found.missing and not self.options.keep_missing):
            raise mismatch_error(self.stored, found, self.url)

    def _match_values(self) -> None:
        """Find values and objects that are missing or stored as something else."""
        stored, found, description = self.stored, self.findings, self.description
        for name in description.values:
            if name in description.fixed:
                self._match_fixed(name, description.values[name])
            elif self.has_value(name):
                self._match_known(name, self.stored_value(name))
            elif name in stored.index:
                found.conflicts.append(f"{name}: a tensor is stored where a plain value is wanted")
            elif name not in description.optional:
                found.missing.append(name)
        for name, items in description.merged_lists.items():
            known = self.merged_list(name)
            found.new_parameters |= not set(items).issubset(known or ())
            if known is None:
                found.missing.append(name)
            else:
                absent = sorted(set(items).difference(known))
                found.missing.extend(f"{name} ({item})" for item in absent)
        for element in description.objects:
            name = element.unique_name
            if name in stored.document.objects:
                self._match_known(name, self.object(name))
            else:
                found.missing.append(name)

    def _match_fixed(self, name: str, wanted: object) -> None:
        """Compare the record of a tensor that is made of others with the stored one."""
        tensor = name.removesuffix(f".{TENSOR_RECORD}")
        if not self.has_value(name):
            if self.stored_tensor(tensor):
                self._refuse(tensor, f"a plain tensor is stored, a {_kind_of(wanted)} is wanted")
            else:
                self.findings.missing.append(name)
            return
        known = self.stored_value(name)
        if values.encode(known) == values.encode(wanted):
            self.findings.restored.append(name)
        else:
            self._refuse(tensor, _difference(known, wanted))

    def _refuse(self, tensor: str, why: str) -> None:
        self.others.append(tensor)
        self.findings.conflicts.append(f"{tensor}: {why}")

    def _match_known(self, name: str, value: object) -> None:
        """File a stored value under what it is: one that this program can have, or not."""
        unknown = next(values.unresolved(value), None)
        if unknown is None:
            self.findings.restored.append(name)
        elif unknown.kind == "pickle":
            self.findings.conflicts.append(f"{name}: {unknown.payload}")
        else:
            self.findings.conflicts.append(
                f"{name}: the stored value is a {unknown.type_name}, which this program does not "
                "know; import the module that defines it before loading"
            )

    def _match_tensors(self) -> list[tuple[TensorEntry, StoredTensor]]:
        """Find for each tensor the stored one that fills it."""
        fills = []
        for entry, names in with_all_names(self.description.tensors):
            stored = self._match_tensor(entry, names)
            if stored is not None:
                fills.append((entry, stored))
        return fills

    def _match_tensor(self, entry: TensorEntry, names: list[str]) -> StoredTensor | None:
        """What is stored and fills a tensor of one or, tied, several names, if anything does."""
        sources = [name for name in names if name in self.stored.index]
        if not sources:
            self._report_absent(entry.name)
            return None
        self.findings.derived.update({name: sources[0] for name in names if name not in sources})
        stored = self.stored.index[sources[0]]
        conflict = self._conflict(entry, stored)
        if conflict is None:
            self._compare_tied(entry, sources)
            return stored
        self.findings.conflicts.append(conflict)
        return None

    def _report_absent(self, name: str) -> None:
        record = f"{name}.{TENSOR_RECORD}"
        if self.has_value(record):
            kind = _kind_of(self.stored_value(record))
            self._refuse(name, f"a {kind} is stored, a plain tensor is wanted")
        elif self.stored.has_value(name):
            self.findings.conflicts.append(
                f"{name}: a plain value is stored where a tensor is wanted"
            )
        elif name not in self.description.optional:
            self.findings.missing.append(name)

    def _conflict(self, entry: TensorEntry, stored: StoredTensor) -> str | None:
        """Why a stored tensor does not fit an entry, or None; files it under what it is."""
        found, name = self.findings, entry.name
        if stored.shape != entry.global_shape:
            change = f"{stored.shape} → {entry.global_shape}"
            if not entry.allow_shape_mismatch or len(stored.shape) != len(entry.global_shape):
                return f"{name}: shape {stored.shape} is stored, {entry.global_shape} is wanted"
            found.resized[name] = change
        if stored.dtype != entry.dtype:
            if not self.options.cast:
                return (
                    f"{name}: dtype {stored.dtype} is stored, {entry.dtype} is wanted "
                    "(cast=True converts)"
                )
            if BY_NAME[stored.dtype].is_opaque or BY_NAME[entry.dtype].is_opaque:
                return (
                    f"{name}: dtype {stored.dtype} is stored, {entry.dtype} is wanted, "
                    "and torch does not convert between them"
                )
            found.cast[name] = f"{stored.dtype} → {entry.dtype}"
        if name not in found.cast and name not in found.resized and name not in found.derived:
            found.restored.append(name)
        return None

    def _compare_tied(self, entry: TensorEntry, sources: list[str]) -> None:
        """Compare stored tensors that are to fill one tied tensor, if they are stored apart."""
        index = self.stored.index
        first, *others = {index.row(name): name for name in reversed(sources)}.values()
        shape = index[first].shape
        for other in others:
            if (index[other].shape, index[other].dtype) != (shape, index[first].dtype):
                self.findings.conflicts.append(untied(other, first, "shape or dtype"))
                continue
            for part in entry.parts:
                box = part.box.intersect(Box.whole(shape))
                if box is not None:
                    self.comparisons.add_equal(untied(other, first, "values"), (first, other), box)

    def _want(self, entry: TensorEntry, stored: StoredTensor) -> None:
        """Want this rank's part of a tensor from a stored one."""
        index = self.stored.index
        for part in entry.parts:
            if 0 in part.box.shape:
                continue
            memory = self._memory(entry, part.data, stored.dtype)
            box: Box | None = part.box
            is_exact = stored.shape == entry.global_shape
            if not is_exact:
                box = part.box.intersect(Box.whole(stored.shape))
                if box != part.box:
                    self.zeros.append((memory, part.box.shape))
            if box is not None:
                self.filling.add(stored.name, box, Destination(part.box.offset, memory))
            is_copied = is_exact and stored.dtype == entry.dtype
            source = stored.name if is_copied else None
            self._note(entry.name, part.box, memory, ("stored", index.row(stored.name)), source)

    def _note(
        self, name: str, box: Box, memory: Memory, content: object, source: str | None
    ) -> None:
        """Remember what memory is filled with what."""
        layout = memory.layout
        if layout is not None:
            self.filled.append(Filled(name, box, layout, content, source))

    def _plan(self) -> None:
        """Plan the reads of what is wanted, and of what has to be compared."""
        compare_shared(self.filled, self.comparisons, self.findings.conflicts)
        self._refuse_mismatch()
        self.filling.make_plan()
        self.comparisons.wanted.make_plan()

    def _memory(self, entry: TensorEntry, data: ArrayLike, stored_dtype: str) -> Memory:
        if stored_dtype == entry.dtype:
            return memory_of(data, entry.name, writable=True)
        return casting_memory_of(data, stored_dtype, entry.name)

    def _asked_names(self) -> set[str]:
        """Stored names that this rank asks for."""
        description = self.description
        asked = {entry.name for entry in description.tensors}
        asked.update(description.values, description.merged_lists)
        asked.update(element.unique_name for element in description.objects)
        return asked

    def _asked_bits(self, asked: set[str]) -> bytes:
        """A bit for each stored name: is it, or a name that it is tied to, asked for?"""
        index = self.stored.index
        rows = {index.row(name) for name in asked if name in index}
        bits = [
            name in asked or (name in index and index.row(name) in rows)
            for name in self.stored.names()
        ]
        return np.packbits(np.array(bits, dtype=np.bool_)).tobytes()

    def refuse_unequal(self) -> None:
        """Look at what has been read for comparing.

        Raises:
            MismatchError: If tensors that share memory are stored with different values.
        """
        found = Findings(conflicts=self.comparisons.differences())
        if found.conflicts:
            raise mismatch_error(self.stored, found, self.url)

    def fill_zeros(self) -> None:
        """Fill with zeros what a stored tensor of another shape does not fill."""
        for memory, shape in self.zeros:
            zero = np.zeros((), memory.carrier)
            memory.copy_in(Box.whole(shape), np.broadcast_to(zero, shape))

    def rebuild(self) -> Any:
        """Put everything that is not filled in place where it belongs."""
        return self.description.rebuild(self)

    def value(self, name: str) -> object:
        """A loaded value, or what the state had if the checkpoint lacks it."""
        return self.stored_value(name) if self.has_value(name) else self.description.values[name]

    def has_value(self, name: str) -> bool:
        """Whether the checkpoint has a plain value for a name."""
        return self.stored.has_value(name)

    def stored_tensor(self, name: str) -> bool:
        """Whether the checkpoint has a tensor for a name."""
        return self.stored.tensor(name) is not None

    def merged_list(self, name: str) -> list[str] | None:
        """The list of names that the checkpoint has for a name."""
        return self.stored.merged_list(name)

    def stored_value(self, name: str) -> object:
        """The plain value that the checkpoint has for a name."""
        return self.stored.value(name)

    def object(self, unique_name: str) -> object:
        """A loaded element of a sharded object, or what the state had."""
        element = self.stored.document.objects.get(unique_name)
        if element is not None:
            return values.decode(bytes(element.value))
        return next(e.data for e in self.description.objects if e.unique_name == unique_name)

    def report(self, unexpected: list[str]) -> RestoreReport:
        """What was done; the caller knows how long it took."""
        found = self.findings
        return RestoreReport(
            tuple(found.restored),
            found.cast,
            found.resized,
            found.derived,
            tuple(found.missing),
            tuple(found.kept),
            tuple(unexpected),
            self.filling.num_bytes,
            sum(self.reads),
            len(self.reads),
            0.0,
            dropped=tuple(self.description.dropped),
            reads_shared=self.reads_shared,
        )


def _kind_of(record: object) -> str:
    """What the record of a tensor that is made of others says of it."""
    kind = record.get("class") if isinstance(record, Mapping) else None
    return f"{kind or 'tensor'} made of other tensors"


def _difference(stored: object, wanted: object) -> str:
    """In what two records of tensors that are made of others differ."""
    if not isinstance(stored, Mapping) or not isinstance(wanted, Mapping):
        return "what is stored of how it is made of other tensors cannot be read"
    # As they are encoded: 1 is not True.
    known, own = (
        {key: values.encode(item) for key, item in record.items()} for record in (stored, wanted)
    )
    keys = [key for key in {**wanted, **stored} if known.get(key) != own.get(key)]
    if "class" in keys:
        keys = ["class"]
    told = [f"{key} {stored.get(key)} is stored, {wanted.get(key)} is wanted" for key in keys]
    return "; ".join(told)


def untied(name: str, other: str, what: str) -> str:
    """What to say of stored tensors that differ and cannot both fill one tied tensor."""
    return (
        f"{name} and {other} are tied in the state, but the checkpoint has different {what} for "
        "them; untie them, or load one of the two"
    )


def mismatch_error(stored: StoredState, found: Findings, url: str) -> MismatchError:
    """The error that says how state and checkpoint differ."""
    lines = [f"the state does not fit the checkpoint {url} (nothing was changed)"]
    if found.missing:
        names = list(stored.names())
        lines.append(f"{len(found.missing)} names are not stored:")
        for name in found.missing[:MAX_LISTED]:
            near = difflib.get_close_matches(name, names, n=1)
            lines.append(f"  {name}" + (f" (stored is {near[0]})" if near else ""))
        if len(found.missing) > MAX_LISTED:
            lines.append(f"  ... and {len(found.missing) - MAX_LISTED} more")
        lines.append('missing="keep" leaves them as they are.')
        if found.new_parameters:
            lines.append(
                "Parameters that are new to an optimizer then begin without its state. If the "
                "checkpoint has them under other names, rename those with transform= instead."
            )
    if found.conflicts:
        lines.append(f"{len(found.conflicts)} names differ:")
        lines += [f"  {conflict}" for conflict in found.conflicts[:MAX_LISTED]]
        if len(found.conflicts) > MAX_LISTED:
            lines.append(f"  ... and {len(found.conflicts) - MAX_LISTED} more")
    return MismatchError(
        "\n".join(lines), missing=tuple(found.missing), conflicts=tuple(found.conflicts)
    )
