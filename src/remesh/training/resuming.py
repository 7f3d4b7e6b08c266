"""The parts of a resume: what can be loaded, loading it, and remembering what could not be.

Everything here is collective. Rank 0 alone looks at the directory and writes to it, and what it
sees is what all ranks go by.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from remesh import catalog
from remesh._repr import short_repr
from remesh.catalog import CheckpointInfo, ManagerNote, TrackerRun
from remesh.checkpoint import RestoreReport, load
from remesh.core.sharded import ShardedTensor
from remesh.core.state import Joined
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
)
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.maintenance import orphans
from remesh.storage import Storage, is_local
from remesh.training import rng

_LOGGER = logging.getLogger("remesh")

MAX_FAILURES = 3
"""How often a checkpoint may fail to load before it is not tried any more."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint from which a training run resumes."""

    info: CheckpointInfo
    """The checkpoint."""
    step: int
    """Steps done."""
    passed_over: tuple[tuple[str, str], ...]
    """Newer checkpoints that could not be used, from the newest on: name and reason."""
    same_random: bool
    """Whether every random stream goes on exactly where it was; otherwise some were seeded anew
    (see `remesh.training.rng`)."""
    trackers: Mapping[str, TrackerRun]
    """Name → run of an experiment tracker, as it was saved; see
    `remesh.training.trackers.resume_arguments`."""
    report: RestoreReport
    """What the load did on this rank."""
    from_memory: bool = False
    """Whether the checkpoint was a snapshot in the nodes' memory."""
    live: bool = False
    """Whether the state came from the memory of the processes that continued."""
    held_bytes: int = 0
    """If it did, the memory that the old tensors of this rank took until the new ones were filled:
    what the resume needed besides the state, with a few buffers."""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint or snapshot to resume from."""

    info: CheckpointInfo
    """The checkpoint."""
    load: Callable[..., Any]
    """Loads it into a state; takes the further arguments of `remesh.load`. Collective."""
    kind: Literal["stored", "snapshot", "live"] = "stored"
    """Where it is: in storage, a snapshot in the nodes' memory, or in the memory of the processes
    themselves."""
    parent: str = ""
    """Of a live state, what the next saves name as their parent."""
    random: Source | None = None
    """Where random numbers are taken from if this lacks them: another source of the same step."""
    held_bytes: int = 0
    """Of a live state, what the tensors of this rank take."""
    unsaved_seconds: float = 0.0
    """Of a live state, the time since the last save that was committed began."""


def in_order(
    sources: Sequence[Source], grid: tuple[tuple[str, int], ...], snapshot_every: int | None
) -> list[Source]:
    """The sources in order: the newest first; of one step what is loaded sooner.

    The memory of processes lacks the random numbers of a role whose process has died; they are
    taken from the next source of the same step. If the process died before the snapshot of this
    step was complete, there is none, and the snapshot before is taken first. If the grid of roles
    is another one now, random numbers cannot go on in any case.
    """
    kinds = ("stored", "snapshot", "live")
    ordered = sorted(sources, key=lambda one: (one.info.step, kinds.index(one.kind)), reverse=True)
    ordered = [_with_random(source, ordered) for source in ordered]
    for source in ordered:
        note = source.info.note
        lacks_random = source.kind == "live" and source.random is None
        if not lacks_random or note is None or note.streams or note.role_grid != grid:
            continue
        if snapshot_every is None or note.step % snapshot_every:
            continue
        for other in ordered:
            if other.kind == "snapshot" and other.info.step == note.step - snapshot_every:
                ordered.remove(source)
                ordered.insert(ordered.index(other) + 1, source)
                return ordered
    return ordered


def _with_random(source: Source, others: Sequence[Source]) -> Source:
    own = source.info.note
    if source.kind != "live" or own is None or own.streams:
        return source
    for other in others:
        note = other.info.note
        if note is None or not note.streams or other.info.num_failures:
            continue
        if (note.step, note.role_grid) == (own.step, own.role_grid):
            return replace(source, random=other)
    return source


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was loaded: the streams that were seeded anew, and this rank's report."""

    seeded: tuple[str, ...]
    report: RestoreReport


def candidates(exchange: Exchange, storage: Storage) -> list[CheckpointInfo]:
    """The checkpoints, newest first; what dead processes left is tidied up before."""

    def list_them() -> bytes:
        with catalog.best_effort(f"removing what dead processes left in {storage.url}"):
            catalog.finish_removals(storage)
            _remove_orphans(storage)
        infos = catalog.list_checkpoints(storage)
        for info in infos:
            if info.in_use_until:
                with catalog.best_effort(f"removing old marks of {info.path}"):
                    catalog.release(storage, info)
        return msgspec.msgpack.encode(infos)

    data = run_on_one(exchange, list_them)
    return msgspec.msgpack.decode(data, type=list[CheckpointInfo])[::-1]


def stored_source(exchange: Exchange, root: str | os.PathLike[str], info: CheckpointInfo) -> Source:
    """A checkpoint in storage; it is not removed while it is loaded."""
    place = catalog.place_of(root, info.name)

    def load_held(state: Any, **options: Any) -> RestoreReport:
        with ExitStack() as marks:

            def hold() -> bytes:
                marks.enter_context(catalog.lease(place, now=time.time(), run=info.run))
                return b""

            run_on_one(exchange, hold)
            return load(state, place, group=exchange, **options)

    return Source(info, load_held)


def _remove_orphans(storage: Storage) -> None:
    """Remove what saves left that died long ago, where that can be seen."""
    if not is_local(storage):
        return
    age = orphans.DEFAULT_AGE
    try:
        found = orphans.find_orphans(storage, now=time.time(), older_than=age)
    except CheckpointNotFoundError:
        return  # there is no directory yet
    for leftover in found:
        if not leftover.kept:
            orphans.remove_orphan(leftover, storage, now=time.time(), older_than=age)


def note_failure(exchange: Exchange, storage: Storage, info: CheckpointInfo, reason: str) -> None:
    """Remember that a checkpoint could not be loaded."""

    def note() -> bytes:
        # One that has just been removed needs no memory.
        if any(one.name == info.name for one in catalog.list_checkpoints(storage)):
            with catalog.best_effort(f"noting that {info.path} cannot be loaded"):
                catalog.note_failure(storage, info.name, reason)
        return b""

    run_on_one(exchange, note)


def metrics_of(info: CheckpointInfo) -> dict[str, float]:
    """The metrics of a checkpoint; those that were not finite are NaN."""
    return {name: math.nan if value is None else value for name, value in info.metrics.items()}


def first_that_loads(
    exchange: Exchange,
    storage: Storage,
    sources: Sequence[Source],
    load: Callable[[Source, ManagerNote], Restored],
) -> tuple[tuple[Source, ManagerNote, Restored] | None, list[tuple[CheckpointInfo, str]]]:
    """Load the first source that is not damaged; None if there is none.

    Besides: what was passed over, and why.
    """
    not_used: list[tuple[CheckpointInfo, str]] = []
    for source in sources:
        info = source.info
        if info.num_failures >= MAX_FAILURES:
            reason = f"not tried, for it has failed {info.num_failures} times: {info.problem}"
            not_used.append(passed_over(exchange, info, reason))
            continue
        note = info.note or ManagerNote(step=info.step, run=info.run)
        try:
            return (source, note, load(source, note)), not_used
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            if source.kind == "stored":
                note_failure(exchange, storage, info, str(error))
            not_used.append(passed_over(exchange, info, str(error)))
    return None, not_used


def passed_over(
    exchange: Exchange, info: CheckpointInfo, reason: str
) -> tuple[CheckpointInfo, str]:
    """A checkpoint that is not resumed from, and why not, which rank 0 says in its log."""
    if exchange.rank == 0:
        _LOGGER.warning("passed over %s: %s", info.path, reason)
    return info, reason


def forget_failures(exchange: Exchange, storage: Storage, info: CheckpointInfo) -> None:
    """Forget them, since it was loaded after all."""

    def forget() -> bytes:
        if info.num_failures:
            with catalog.best_effort(f"removing the note that {info.path} could not be loaded"):
                catalog.forget_failures(storage, info.name)
        return b""

    run_on_one(exchange, forget)


def restore(
    exchange: Exchange,
    source: Source,
    note: ManagerNote,
    state: Any,
    *,
    streams: Mapping[str, rng.Stream],
    roles: rng.Roles,
    seed: int,
    options: Mapping[str, Any],
) -> Restored:
    """Load a checkpoint into a state and the random streams.

    Streams are set, or seeded anew if the roles have changed or they were not stored.
    """
    is_same_grid = note.role_grid == roles.grid
    random = source.random
    names = note.streams if random is None or random.info.note is None else random.info.note.streams
    stored = {name: s for name, s in streams.items() if is_same_grid and name in names}
    rows = rng.rows_of(stored, roles, is_empty=True)
    report = source.load(with_rows(state, rows if random is None else {}), **options)
    if random is not None and stored:
        stored = stored if _load_rows(exchange, random, rows, options) else {}

    def take() -> bytes:
        # After all else, because loading may draw random numbers.
        rng.take_rows(stored, rows)
        for name in streams.keys() - stored.keys():
            streams[name].seed(rng.derived_seed(seed, note.step, name, roles.own))
        return b""

    run_on_all(exchange, take)
    return Restored(tuple(sorted(streams.keys() - stored.keys())), report)


def _load_rows(
    exchange: Exchange,
    source: Source,
    rows: Mapping[str, ShardedTensor],
    options: Mapping[str, Any],
) -> bool:
    """Load random numbers alone; whether that was possible."""
    options = {**options, "missing": "error", "transform": None}
    try:
        source.load(with_rows({}, rows), **options)
    except (CorruptCheckpointError, CheckpointNotFoundError, MismatchError) as error:
        passed_over(exchange, source.info, f"random numbers: {error}")
        return False
    return True


def with_rows(state: Any, rows: Mapping[str, ShardedTensor]) -> Joined:
    """The user's state and the states of random numbers, as they are stored together."""
    if isinstance(state, Mapping) and catalog.NOTE_KEY in state:
        raise StateError(f"the name {catalog.NOTE_KEY!r} is taken by the manager; use another one")
    return Joined(state, {catalog.NOTE_KEY: {"rng": dict(rows)}} if rows else {})


def nothing_loads(
    url: str, passed_over: Sequence[tuple[CheckpointInfo, str]]
) -> CorruptCheckpointError:
    """The error of a resume that found checkpoints and could load none; name them and why."""
    lines = "\n".join(f"  {info.name}: {reason}" for info, reason in passed_over)
    return CorruptCheckpointError(
        f"{url}: no checkpoint there can be loaded:\n{lines}\nTry `remesh repair`, or begin anew "
        "in another directory. The state may be partly loaded; do not use it."
    )
