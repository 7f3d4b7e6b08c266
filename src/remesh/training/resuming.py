"""A resume: the sources of a state, which is taken first, loading it, and noting what fails.

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
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.maintenance import orphans
from remesh.storage import Storage, is_local
from remesh.training import rng
from remesh.training.recording import Recorder, with_rows

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
    """A checkpoint in storage, a snapshot in the nodes' memory, or the memory of the processes."""

    info: CheckpointInfo
    load: Callable[..., RestoreReport]
    """Loads it into a state; takes the further arguments of `remesh.load`. Collective."""
    kind: Literal["stored", "snapshot", "live"]
    random: Source | None = None
    """Where random numbers are taken from if this lacks them: another source of the same step."""
    held_bytes: int = 0
    """Of a live state, what the tensors of this rank take."""
    unsaved_seconds: float = 0.0
    """Of a live state, the time since the last save that was committed began."""

    @property
    def note(self) -> ManagerNote:
        """The record of its manager, or what is known without one."""
        return self.info.note or ManagerNote(step=self.info.step, run=self.info.run)

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics; those that were not finite are NaN."""
        known = self.info.metrics.items()
        return {name: math.nan if value is None else value for name, value in known}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A source that was loaded."""

    source: Source
    seeded: tuple[str, ...]  # the random streams that were seeded anew
    report: RestoreReport  # of this rank
    passed_over: Sequence[tuple[Source, str]]  # the sources before it, and why they were not loaded


_KINDS = ("stored", "snapshot", "live")
"""Of one step, the last of these is loaded soonest."""


def in_order(
    sources: Sequence[Source], grid: tuple[tuple[str, int], ...], snapshot_every: int | None
) -> list[Source]:
    """The sources in order: the newest first; of one step what is loaded sooner.

    The memory of processes lacks the random numbers of a role whose process has died; they are
    taken from the next source of the same step. If the process died before the snapshot of this
    step was complete, there is none, and the snapshot before is taken first. If the grid of roles
    is another one now, random numbers cannot go on in any case.
    """
    snapshots = {source.info.step for source in sources if source.kind == "snapshot"}

    def age(source: Source) -> tuple[int, float]:
        note, step = source.note, source.info.step
        lacks_random = not (source.random or source).note.streams
        if source.kind == "live" and lacks_random and note.role_grid == grid and snapshot_every:
            before = step - snapshot_every
            if step % snapshot_every == 0 and before in snapshots:
                return before, _KINDS.index("snapshot") - 0.5
        return step, _KINDS.index(source.kind)

    return sorted((_with_random(one, sources) for one in sources), key=age, reverse=True)


def _with_random(source: Source, others: Sequence[Source]) -> Source:
    own = source.note
    if source.kind != "live" or own.streams:
        return source
    fitting = [
        other
        for other in others
        if other.note.streams
        and not other.info.num_failures
        and (other.note.step, other.note.role_grid) == (own.step, own.role_grid)
    ]
    random = max(fitting, key=lambda other: _KINDS.index(other.kind), default=None)
    return replace(source, random=random)


def stored_sources(
    exchange: Exchange, storage: Storage, root: str | os.PathLike[str]
) -> list[Source]:
    """The checkpoints in storage; what dead processes left is tidied up before."""

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
    infos = msgspec.msgpack.decode(data, type=list[CheckpointInfo])
    return [_stored_source(exchange, root, info) for info in reversed(infos)]


def _stored_source(
    exchange: Exchange, root: str | os.PathLike[str], info: CheckpointInfo
) -> Source:
    """A checkpoint in storage; it is not removed while it is loaded."""
    place = catalog.place_of(root, info.name)

    def load_held(state: Any, **options: Any) -> RestoreReport:
        with ExitStack() as marks:

            def hold() -> bytes:
                marks.enter_context(catalog.lease(place, now=time.time(), run=info.run))
                return b""

            run_on_one(exchange, hold)
            return load(state, place, group=exchange, **options)

    return Source(info, load_held, "stored")


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


def load_newest(
    exchange: Exchange,
    storage: Storage,
    sources: Sequence[Source],
    state: Any,
    recorder: Recorder,
    options: Mapping[str, Any],
) -> Loaded | None:
    """Load the first source that is not damaged; None if there is nothing to resume from.

    Raises:
        CorruptCheckpointError: If there are checkpoints and none of them can be loaded.
    """
    passed_over: list[tuple[Source, str]] = []
    for source in sources:
        info = source.info
        if info.num_failures >= MAX_FAILURES:
            reason = f"not tried, for it has failed {info.num_failures} times: {info.problem}"
        else:
            try:
                seeded, report = _load(exchange, source, state, recorder, options)
            except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                reason = str(error)
                if source.kind == "stored":
                    _remember(exchange, storage, info, reason)
            else:
                if info.num_failures:
                    _remember(exchange, storage, info, "")
                return Loaded(source, seeded, report, passed_over)
        _warn(exchange, info, reason)
        passed_over.append((source, reason))
    if all(source.kind == "live" for source in sources):
        return None
    lines = "\n".join(f"  {source.info.name}: {reason}" for source, reason in passed_over)
    raise CorruptCheckpointError(
        f"{storage.url}: no checkpoint there can be loaded:\n{lines}\nTry `remesh repair`, or "
        "begin anew in another directory. The state may be partly loaded; do not use it."
    )


def _warn(exchange: Exchange, info: CheckpointInfo, reason: str) -> None:
    if exchange.rank == 0:
        _LOGGER.warning("passed over %s: %s", info.path, reason)


def _remember(exchange: Exchange, storage: Storage, info: CheckpointInfo, reason: str) -> None:
    """Note that a checkpoint in storage could not be loaded; without a reason, forget that."""

    def note() -> bytes:
        with catalog.best_effort(f"noting whether {info.path} can be loaded"):
            if not reason:
                catalog.forget_failures(storage, info.name)
            # One that has just been removed needs no memory.
            elif any(one.name == info.name for one in catalog.list_checkpoints(storage)):
                catalog.note_failure(storage, info.name, reason)
        return b""

    run_on_one(exchange, note)


def _load(
    exchange: Exchange,
    source: Source,
    state: Any,
    recorder: Recorder,
    options: Mapping[str, Any],
) -> tuple[tuple[str, ...], RestoreReport]:
    """Load a source into a state and the random streams; returns the streams seeded anew.

    These are the streams that were not stored, or all of them if the roles have changed.
    """
    streams, roles = recorder.streams(), recorder.roles
    names = (source.random or source).note.streams if source.note.role_grid == roles.grid else ()
    stored = {name: stream for name, stream in streams.items() if name in names}
    rows = rng.rows_of(stored, roles, is_empty=True)
    report = source.load(with_rows(state, rows if source.random is None else {}), **options)
    if (
        source.random is not None
        and stored
        and not _load_rows(exchange, source.random, rows, options)
    ):
        stored, rows = {}, {}
    seeded = tuple(sorted(streams.keys() - stored.keys()))

    def take() -> bytes:
        # After all else, because loading may draw random numbers.
        rng.take_rows(stored, rows)
        for name in seeded:
            seed = rng.derived_seed(recorder.seed, source.note.step, name, roles.own)
            streams[name].seed(seed)
        return b""

    run_on_all(exchange, take)
    return seeded, report


def _load_rows(
    exchange: Exchange,
    source: Source,
    rows: Mapping[str, ShardedTensor],
    options: Mapping[str, Any],
) -> bool:
    """Load random numbers alone; False if that was not possible."""
    options = {**options, "missing": "error", "transform": None}
    try:
        source.load(with_rows({}, rows), **options)
    except (CorruptCheckpointError, CheckpointNotFoundError, MismatchError) as error:
        _warn(exchange, source.info, f"random numbers: {error}")
        return False
    return True
