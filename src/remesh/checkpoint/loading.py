"""One load, from top to bottom.

1. Rank 0 reads the small files (record, index, values) once and broadcasts them.
2. Every rank describes its target state, compares it with what is stored, and plans its own reads
   from the index alone. All ranks learn whether any of them found a mismatch; until then nothing in
   any state has been touched.
3. Every rank reads its runs straight into the memory of its tensors.
4. Values are put back, and objects with a state dict get theirs.

A failure in steps 3 or 4 raises on every rank and leaves the state partly loaded; the message says
so. Digests are checked before bytes reach a tensor, so no tensor ever holds damaged data.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from remesh import values
from remesh.checkpoint.local import (
    casting_memory_of,
    describe_local,
    exchange_of,
    memory_of,
    split_aliases,
)
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.stored import StoredState, read_box
from remesh.dtypes import BY_NAME
from remesh.errors import MismatchError
from remesh.events import OnEvent, emitter, ignore
from remesh.exchange import Alone, Exchange, run_on_all, run_on_one
from remesh.formats import native
from remesh.geometry import Box
from remesh.index import BoxTable
from remesh.memory import Memory
from remesh.pipeline import Want, read_runs, read_together
from remesh.planner import LoadPlan, ReadLimits, plan_load
from remesh.state import ArrayLike, Description, TensorEntry
from remesh.storage import Storage, open_storage

MAX_LISTED = 10
"""How many names of a kind an error message lists; the exception carries all."""


def load(
    state: Any,
    path: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    share_reads: bool = False,
    group: Any = None,
    on_report: Callable[[RestoreReport], None] | None = None,
    on_event: OnEvent = ignore,
) -> Any:
    """Load a checkpoint into a state of any layout. Collective, like `save`.

    Tensors are filled in place. Plain values are replaced in their dicts and lists; modules,
    optimizers and other objects get what is theirs.

    Args:
        state: The target, built like the state that was saved. Only what it names is read.
        path: Directory of a committed checkpoint.
        missing: What to do about names that the state has and the checkpoint lacks.
        unexpected: What to do about names that the checkpoint has and no rank's state.
        cast: Convert tensors whose stored dtype differs from the target's; otherwise that is an
            error.
        share_reads: Let one rank read what several need and pass it on, so that storage serves
            every byte once. Pays where storage is slower than the network between ranks: many
            replicas, object stores, shared file systems. On a local disk it does not.
        group: See `save`.
        on_report: Is given this rank's `RestoreReport`.
        on_event: Told of the moments in `remesh.events.LOAD_POINTS`.

    Returns:
        The state: the same object, unless it is itself a tuple or a plain value.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        MismatchError: If state and checkpoint do not fit. Nothing was changed.
        StateError: If the state cannot be a target (a tensor on the meta device, say). Nothing
            was changed.
        CorruptCheckpointError: If stored bytes are missing or damaged.
        FormatVersionError: If the checkpoint was written by a newer remesh.
        StorageError: If the storage fails.
        ExchangeError: If a rank died.
    """
    started = time.monotonic()
    exchange = exchange_of(group)
    storage = open_storage(path)
    emit = emitter(on_event, exchange.rank)
    stored = open_shared(exchange, storage)
    emit("load.opened")
    target = _Target(stored, storage, _Options(missing == "keep", cast))
    replies = run_on_all(exchange, lambda: target.prepare(state))
    extra = _unexpected_names(stored, replies)
    if extra and unexpected == "error":
        raise MismatchError(
            f"{storage.url} holds {len(extra)} names that no rank asks for: {_listed(extra)}",
            unexpected=tuple(extra),
        )
    emit("load.planned")

    def read() -> bytes:
        target.read(lambda size: emit("load.run_read", size), exchange if share_reads else Alone())
        emit("load.read")
        return b""

    result = state

    def put_back() -> bytes:
        nonlocal result
        result = target.rebuild()
        return b""

    try:
        run_on_all(exchange, read)
        run_on_all(exchange, put_back)
    except Exception as error:
        error.add_note("The state is partly loaded; load again before using it.")
        raise
    if on_report is not None:
        on_report(target.report(extra, time.monotonic() - started))
    emit("load.done")
    return result


def open_shared(exchange: Exchange, storage: Storage) -> StoredState:
    """Open a checkpoint on every rank; only rank 0 reads.

    Raises:
        CheckpointError: If there is none or its small files are damaged.
    """

    def read() -> bytes:
        files = native.read_small_files(storage)
        record = native.encode_record(files.record)
        return msgspec.msgpack.encode((record, files.index_bytes, files.values_bytes))

    record, index_bytes, values_bytes = msgspec.msgpack.decode(
        run_on_one(exchange, read), type=tuple[bytes, bytes, bytes]
    )
    files = native.NativeFiles(native.decode_record(record, storage.url), index_bytes, values_bytes)
    return StoredState.decode(files, storage.url)


@dataclass(frozen=True, slots=True)
class _Options:
    keep_missing: bool
    cast: bool


@dataclass(slots=True)
class _Target:
    """This rank's state as the target of a load; its methods are the steps."""

    stored: StoredState
    storage: Storage
    options: _Options
    description: Description = field(default_factory=Description, init=False)
    findings: Findings = field(default_factory=Findings, init=False)
    wants: list[Want] = field(default_factory=list, init=False)
    zeros: list[tuple[Memory, tuple[int, ...]]] = field(default_factory=list, init=False)
    plan: LoadPlan | None = field(default=None, init=False)
    bytes_needed: int = field(default=0, init=False)
    limits: ReadLimits = field(default_factory=ReadLimits, init=False)
    reads: list[int] = field(default_factory=list, init=False)

    def prepare(self, state: Any) -> bytes:
        """Compare the state with what is stored, and plan the reads.

        Returns:
            One bit for each stored name, set if this rank asks for it.

        Raises:
            MismatchError: If they do not fit.
        """
        self.description = describe_local(state, self.stored)
        self._match_values()
        fills = self._match_tensors()
        found = self.findings
        if found.conflicts or (found.missing and not self.options.keep_missing):
            raise _mismatch(self.stored, found, self.storage.url)
        self._plan(fills)
        return self._asked_bits()

    def _match_values(self) -> None:
        """Find values and objects that are missing or stored as something else."""
        stored, found, description = self.stored, self.findings, self.description
        for name in description.values:
            if stored.has_value(name):
                found.restored.append(name)
            elif name in stored.index:
                found.conflicts.append(f"{name}: a tensor is stored where a plain value is wanted")
            elif name not in description.optional:
                found.missing.append(name)
        for name, items in description.merged_lists.items():
            known = stored.merged_list(name)
            if known is None:
                found.missing.append(name)
            else:
                absent = sorted(set(items).difference(known))
                found.missing.extend(f"{name} ({item})" for item in absent)
        for element in description.objects:
            here = element.unique_name in stored.document.objects
            (found.restored if here else found.missing).append(element.unique_name)

    def _match_tensors(self) -> list[tuple[TensorEntry, str]]:
        """Find for each tensor the stored name that fills it."""
        entries, aliases = split_aliases(self.description.tensors)
        also_known_as: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            also_known_as.setdefault(name, []).append(alias)
        fills = []
        for entry in entries:
            names = [entry.name, *also_known_as.get(entry.name, ())]
            sources = [name for name in names if name in self.stored.index]
            if not sources:
                self._report_absent(entry.name)
                continue
            self.findings.derived.update(
                {name: sources[0] for name in names if name not in sources}
            )
            conflict = self._conflict(entry, sources[0]) or self._untied(entry, sources)
            if conflict:
                self.findings.conflicts.append(conflict)
            else:
                fills.append((entry, sources[0]))
        return fills

    def _report_absent(self, name: str) -> None:
        if self.stored.has_value(name):
            self.findings.conflicts.append(
                f"{name}: a plain value is stored where a tensor is wanted"
            )
        elif name not in self.description.optional:
            self.findings.missing.append(name)

    def _conflict(self, entry: TensorEntry, source: str) -> str | None:
        """Why a stored tensor does not fit an entry, or None; files it under what it is."""
        stored = self.stored.index[source]
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

    def _plan(self, fills: list[tuple[TensorEntry, str]]) -> None:
        """Plan the reads of what fills this rank's tensors."""
        index = self.stored.index
        boxes: list[tuple[int, Box]] = []
        for entry, source in fills:
            stored = index[source]
            whole = Box.whole(stored.shape)
            for part in entry.parts:
                memory = self._memory(entry, part.data, stored.dtype)
                box = part.box.intersect(whole)
                if box != part.box:
                    self.zeros.append((memory, part.box.shape))
                if box is not None:
                    boxes.append((index.row(source), box))
                    self.wants.append(Want(part.box.offset, memory))
                    self.bytes_needed += box.size * BY_NAME[stored.dtype].itemsize
        wanted = BoxTable.of(index.boxes.tensors, boxes)
        self.plan = plan_load(index, wanted, self.limits)

    def _memory(self, entry: TensorEntry, data: ArrayLike, stored_dtype: str) -> Memory:
        if stored_dtype == entry.dtype:
            return memory_of(data, entry.name, writable=True)
        return casting_memory_of(data, stored_dtype, entry.name)

    def _asked_bits(self) -> bytes:
        """A bit for each stored name: does this rank ask for it, by this or a tied name?"""
        description, index = self.description, self.stored.index
        asked = {entry.name for entry in description.tensors}
        asked.update(description.values, description.merged_lists)
        asked.update(element.unique_name for element in description.objects)
        rows = {index.row(name) for name in asked if name in index}
        bits = [
            name in asked or (name in index and index.row(name) in rows)
            for name in self.stored.names()
        ]
        return np.packbits(np.array(bits, dtype=np.bool_)).tobytes()

    def read(self, on_run: Callable[[int], None], exchange: Exchange) -> None:
        """Fill this rank's tensors, together with the ranks of an exchange."""
        assert self.plan is not None
        for memory, shape in self.zeros:
            zero = np.zeros((), memory.carrier)
            memory.copy_in(Box.whole(shape), np.broadcast_to(zero, shape))

        def count(size: int) -> None:
            self.reads.append(size)
            on_run(size)

        read = (self.storage, self.stored.index, self.plan, self.wants)
        if exchange.world_size == 1:
            read_runs(*read, count)
        else:
            read_together(exchange, *read, limits=self.limits, on_run=count)

    def rebuild(self) -> Any:
        """Put everything that is not filled in place where it belongs."""
        return self.description.rebuild(self)

    def value(self, name: str) -> object:
        """A loaded value, or what the state had if the checkpoint lacks it."""
        if self.stored.has_value(name):
            return self.stored.value(name)
        return self.description.values[name]

    def object(self, unique_name: str) -> object:
        """A loaded element of a sharded object, or what the state had."""
        element = self.stored.document.objects.get(unique_name)
        if element is not None:
            return values.decode(bytes(element.value))
        return next(e.data for e in self.description.objects if e.unique_name == unique_name)

    def report(self, unexpected: list[str], seconds: float) -> RestoreReport:
        """What was done."""
        found = self.findings
        return RestoreReport(
            tuple(found.restored),
            found.cast,
            found.resized,
            found.derived,
            tuple(found.missing),
            tuple(unexpected),
            self.bytes_needed,
            sum(self.reads),
            len(self.reads),
            seconds,
        )


def _unexpected_names(stored: StoredState, replies: list[bytes]) -> list[str]:
    """Stored names that no rank asks for."""
    names = list(stored.names())
    asked = np.zeros(len(names), dtype=np.bool_)
    for reply in replies:
        bits = np.unpackbits(np.frombuffer(reply, dtype=np.uint8), count=len(names))
        asked |= bits.astype(np.bool_)
    return [name for name, wanted in zip(names, asked.tolist(), strict=True) if not wanted]


def _mismatch(stored: StoredState, found: Findings, url: str) -> MismatchError:
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


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f", ... and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return ", ".join(shown[:MAX_LISTED]) + more
