"""One rank's state as the target of a load: compared, planned, filled, put back.

Nothing in the state is touched before `read`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remesh import values
from remesh.checkpoint.local import (
    casting_memory_of,
    collector_rests,
    describe_local,
    memory_of,
    with_all_names,
)
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.stored import StoredState, read_box
from remesh.errors import MismatchError
from remesh.exchange import Exchange
from remesh.geometry import Box
from remesh.index import BoxTable, StoredTensor
from remesh.memory import Memory
from remesh.pipeline import Dealer, Patience, Want, read_together, read_watched
from remesh.planner import LoadPlan, ReadLimits, plan_load
from remesh.sharded import ArrayLike
from remesh.state import Description, TensorEntry
from remesh.storage import Storage

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
    storage: Storage
    options: LoadOptions
    description: Description = field(default_factory=Description, init=False)
    findings: Findings = field(default_factory=Findings, init=False)
    boxes: list[tuple[int, Box]] = field(default_factory=list, init=False)
    wants: list[Want] = field(default_factory=list, init=False)
    zeros: list[tuple[Memory, tuple[int, ...]]] = field(default_factory=list, init=False)
    plan: LoadPlan | None = field(default=None, init=False)
    bytes_needed: int = field(default=0, init=False)
    limits: ReadLimits = field(default_factory=ReadLimits, init=False)
    reads: list[int] = field(default_factory=list, init=False)
    reads_shared: bool = field(default=False, init=False)

    def prepare(self, state: Any) -> bytes:
        """Compare the state with what is stored, and plan the reads.

        Returns:
            One bit for each stored name, set if this rank asks for it.

        Raises:
            MismatchError: If they do not fit.
        """
        with collector_rests():
            self.description = describe_local(state, self.stored)
            self._match_values()
            fills = self._match_tensors()
            self._refuse_mismatch()
            for entry, stored in fills:
                self._want(entry, stored)
        self._plan()
        return self._asked_bits(self._asked_names())

    def _refuse_mismatch(self) -> None:
        found = self.findings
        if found.conflicts or (found.missing and not self.options.keep_missing):
            raise mismatch_error(self.stored, found, self.storage.url)

    def _match_values(self) -> None:
        """Find values and objects that are missing or stored as something else."""
        stored, found, description = self.stored, self.findings, self.description
        for name in description.values:
            if self.has_value(name):
                self._match_known(name, self.stored_value(name))
            elif name in stored.index:
                found.conflicts.append(f"{name}: a tensor is stored where a plain value is wanted")
            elif name not in description.optional:
                found.missing.append(name)
        for name, items in description.merged_lists.items():
            known = self.merged_list(name)
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
        conflict = self._conflict(entry, stored) or self._untied(entry, sources)
        if conflict is None:
            return stored
        self.findings.conflicts.append(conflict)
        return None

    def _report_absent(self, name: str) -> None:
        if self.stored.has_value(name):
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
            found.cast[name] = f"{stored.dtype} → {entry.dtype}"
        if name not in found.cast and name not in found.resized and name not in found.derived:
            found.restored.append(name)
        return None

    def _untied(self, entry: TensorEntry, sources: list[str]) -> str | None:
        """Why stored tensors that differ cannot fill one tied tensor, or None.

        This reads the rank's part of each, which is rare enough to be done simply.
        """
        if len(sources) == 1:
            return None
        index = self.stored.index
        distinct = list({index.row(name): name for name in reversed(sources)}.values())
        if len(distinct) == 1:
            return None
        for part in entry.parts:
            whole = Box.whole(index[distinct[0]].shape)
            box = part.box.intersect(whole)
            if box is None:
                continue
            first, *others = (read_box(self.storage, index, name, box) for name in distinct)
            for name, other in zip(distinct[1:], others, strict=True):
                if first.tobytes() != other.tobytes():
                    return (
                        f"{distinct[0]} and {name} are tied in the state, but the checkpoint has "
                        "different values for them; untie them, or load one of the two"
                    )
        return None

    def _want(self, entry: TensorEntry, stored: StoredTensor) -> None:
        """Want this rank's part of a tensor from a stored one."""
        for part in entry.parts:
            if 0 in part.box.shape:
                continue
            memory = self._memory(entry, part.data, stored.dtype)
            box: Box | None = part.box
            if stored.shape != entry.global_shape:
                box = part.box.intersect(Box.whole(stored.shape))
                if box != part.box:
                    self.zeros.append((memory, part.box.shape))
            if box is not None:
                self._want_box(stored.name, box, Want(part.box.offset, memory))

    def _want_box(self, source: str, box: Box, want: Want) -> None:
        """Want a box of a stored tensor."""
        self.boxes.append((self.stored.index.row(source), box))
        self.wants.append(want)

    def _plan(self) -> None:
        """Plan the reads of what is wanted."""
        index = self.stored.index
        wanted = BoxTable.of(index.boxes.tensors, self.boxes)
        self.bytes_needed = int(wanted.num_bytes.sum())
        self.plan = plan_load(index, wanted, self.limits)

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

    def read(
        self,
        on_run: Callable[[int], None],
        exchange: Exchange,
        dealer: Dealer | None,
        patience: Patience,
    ) -> None:
        """Fill this rank's tensors, while the others fill theirs. Collective.

        Args:
            on_run: Called after each run that this rank reads, with its size in bytes.
            exchange: The ranks that load.
            dealer: Deals what they need; None if every rank reads for itself.
            patience: How long that may take.
        """
        assert self.plan is not None
        self.fill_zeros()

        def count(size: int) -> None:
            self.reads.append(size)
            on_run(size)

        read = (self.storage, self.stored.index, self.plan, self.wants)
        if dealer is None:
            read_watched(exchange, *read, on_run=count, patience=patience)
        else:
            self.reads_shared = read_together(
                exchange,
                *read,
                limits=self.limits,
                on_run=count,
                dealer=dealer,
                patience=patience,
            )

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
            self.bytes_needed,
            sum(self.reads),
            len(self.reads),
            0.0,
            reads_shared=self.reads_shared,
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
    if found.conflicts:
        lines.append(f"{len(found.conflicts)} names differ:")
        lines += [f"  {conflict}" for conflict in found.conflicts[:MAX_LISTED]]
        if len(found.conflicts) > MAX_LISTED:
            lines.append(f"  ... and {len(found.conflicts) - MAX_LISTED} more")
    return MismatchError(
        "\n".join(lines), missing=tuple(found.missing), conflicts=tuple(found.conflicts)
    )
