"""What a save of a manager records beside the user's state, and how a job resumes from it.

Random numbers are tensors of the state, under `manager.rng`; the note is metadata of the commit
record. Both are taken on each rank when a save begins. A digest tells whether the state of a step
that is saved already has changed.

A resume lists the sources of a state, decides which is taken first, loads it, and notes what fails.
That is collective. Rank 0 alone looks at the directory and writes to it, and what it sees is what
all ranks go by.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from remesh import catalog
from remesh._repr import listed, short_repr
from remesh.catalog import CheckpointInfo, ManagerNote, TrackerRun
from remesh.checkpoint import RestoreReport, load
from remesh.core.integrity import hex_digest, raw_digest
from remesh.core.sharded import ShardedTensor
from remesh.core.state import Description, Joined
from remesh.core.values import encode, encode_object
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
)
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.maintenance import orphans
from remesh.run_info import run_info
from remesh.storage import Storage, is_local
from remesh.training import rng
from remesh.training.rng import Randomness
from remesh.training.trackers import run_id_of

_LOGGER = logging.getLogger("remesh")

MAX_FAILURES = 3
"""How often a checkpoint may fail to load before it is not tried any more."""
MAX_SHOWN = 8
"""Ranks that a message names."""


# Recording ----------------------------------------------------------------------------------------


class Recorder:
    """Describes the run to which saves belong. Collective when it is made."""

    def __init__(self, exchange: Exchange, randomness: Randomness) -> None:
        self.roles = rng.agree_on_roles(exchange, randomness.role)
        self.seed = randomness.seed
        self._generators, self._is_alone = randomness.generators, exchange.world_size == 1
        # All of these change when a run is resumed, but the trackers that the user gives.
        self.run = run_on_one(exchange, lambda: new_run().encode()).decode()
        self.trackers: dict[str, object] = {}
        self._parent = ""  # the checkpoint that the process resumed from
        self._saved_trackers: dict[str, TrackerRun] = {}  # by the names that trackers have

    def go_on_from(self, note: ManagerNote, parent: str) -> None:
        """Become the run that saved a checkpoint, from which the next saves descend."""
        self.run = note.run or self.run
        self._parent = parent
        self._saved_trackers = dict(note.trackers)

    def streams(self) -> dict[str, rng.Stream]:
        """Name → stream of random numbers of this process."""
        return rng.streams_of(self._generators, is_alone=self._is_alone)

    def describe(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        full: Joined,
        metadata: dict[str, object],
    ) -> bytes:
        """Fill in what is saved beside the state: random numbers, and the note; `rng.summary`."""
        streams = self.streams()
        rows = rng.rows_of(streams, self.roles)
        _refuse_taken(metadata)
        full.beside.update(with_rows(full.state, rows).beside)
        note = self.note(step, metrics, streams)
        metadata[catalog.NOTE_KEY] = msgspec.json.decode(msgspec.json.encode(note))
        return rng.summary(rows, self.roles)

    def note(
        self, step: int, metrics: Mapping[str, float] | None, streams: Mapping[str, rng.Stream]
    ) -> ManagerNote:
        """The note of a save of these streams."""
        runs = [(name, run_id_of(tracker)) for name, tracker in self.trackers.items()]
        return ManagerNote(
            step=step,
            run=self.run,
            metrics=catalog.finite(metrics or {}),
            role_grid=self.roles.grid,
            streams=tuple(streams),
            trackers=self._saved_trackers | {name: run for name, run in runs if run is not None},
            parent=self._parent,
        )


def new_run() -> str:
    """A name for a run: the launcher's if it has one, and something that no other run has."""
    return f"{run_info().run_id or 'run'}-{secrets.token_hex(4)}"


def with_rows(state: Any, rows: Mapping[str, ShardedTensor]) -> Joined:
    """The user's state and the states of random numbers, as they are stored together."""
    _refuse_taken(state)
    return Joined(state, {catalog.NOTE_KEY: {"rng": dict(rows)}} if rows else {})


def _refuse_taken(entries: Any) -> None:
    if isinstance(entries, Mapping) and catalog.NOTE_KEY in entries:
        raise StateError(f"the name {catalog.NOTE_KEY!r} is taken by the manager; use another one")


def digest_of(found: Description) -> str:
    """A text that changes with what is stored but random numbers; of large tensors with samples."""
    torch, tensors = sys.modules.get("torch"), []
    facts = [encode(value, name) for name, value in found.values.items()]
    facts += [encode_object(one.data, one.unique_name) for one in found.objects]
    for entry in found.tensors:
        if not entry.name.startswith(f"{catalog.NOTE_KEY}."):
            for part in entry.parts:
                if torch is not None and isinstance(part.data, torch.Tensor):
                    tensors.append(part.data)
                elif isinstance(part.data, np.ndarray):
                    facts.append(np.ascontiguousarray(part.data).tobytes())
    if tensors:
        from remesh.training.fingerprints import Fingerprints

        facts.append(Fingerprints(whole_bytes=1 << 14).take(tensors).digest().encode())
    names = repr([*found.paths, found.merged_lists])
    return hex_digest(b"".join([names.encode(errors="surrogatepass"), *map(raw_digest, facts)]))


# Resuming -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint from which a training run resumes."""

    info: CheckpointInfo
    """The checkpoint."""
    step: int
    """Steps done."""
    passed_over: tuple[tuple[str, str], ...]
    """Newer checkpoints that could not be used, from the newest on: name and reason."""
    seeded_anew: tuple[str, ...]
    """Random streams that do not go on where they were, with their ranks and why; they were seeded
    anew (see `remesh.training.rng`)."""
    trackers: Mapping[str, TrackerRun]
    """Name → run of an experiment tracker, as it was saved; see
    `remesh.training.trackers.resume_arguments`."""
    report: RestoreReport
    """What the load did on this rank."""
    from_memory: bool = False
    """Whether the checkpoint was a snapshot in the nodes' memory."""
    live: bool = False
    """Whether the state came from the memory of the processes that continued."""

    __repr__ = short_repr

    @property
    def same_random(self) -> bool:
        """Whether every random stream of every rank goes on exactly where it was."""
        return not self.seeded_anew


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint in storage, a snapshot in the nodes' memory, or the memory of the processes."""

    info: CheckpointInfo
    load: Callable[..., RestoreReport]
    """Loads it into a state; takes the further arguments of `remesh.load`. Collective."""
    kind: Literal["stored", "snapshot", "live"]
    random: Source | None = None
    """Where random numbers are taken from if this lacks them: another source of the same step."""
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
    seeded: tuple[str, ...]  # see `Resumed.seeded_anew`
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
    """Load a source into a state and the random streams; returns what was seeded anew.

    These are the streams that were not stored, or all of them if the roles have changed.
    """
    streams, roles, former = recorder.streams(), recorder.roles, source.note.role_grid
    names, reason = (source.random or source).note.streams, "not stored"
    if names and former != roles.grid:
        names, reason = (), f"roles were {_axes(former)}, and are {_axes(roles.grid)}"
    stored = {name: stream for name, stream in streams.items() if name in names}
    rows = rng.rows_of(stored, roles, is_empty=True)
    # A transformation is of the user's names; those of random numbers stay what they are.
    random = source.random or (source if options["transform"] is not None else None)
    report = source.load(with_rows(state, rows if random is None else {}), **options)
    if random is not None and stored and not _load_rows(exchange, random, rows, options):
        stored, rows, reason = {}, {}, "not loaded"
    seeded = tuple(sorted(streams.keys() - stored.keys()))

    def take() -> bytes:
        # After all else, because loading may draw random numbers.
        rng.take_rows(stored, rows)
        for name in seeded:
            seed = rng.derived_seed(recorder.seed, source.note.step, name, roles.own)
            streams[name].seed(seed)
        return f"{', '.join(seeded)} ({reason})".encode() if seeded else b""

    return _by_ranks(run_on_all(exchange, take)), report


def _axes(grid: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"{name}={size}" for name, size in grid)


def _by_ranks(replies: Sequence[bytes]) -> tuple[str, ...]:
    """What ranks say, each text once with those who say it."""
    ranks: dict[str, list[int]] = {}
    for rank, reply in enumerate(replies):
        if reply:
            ranks.setdefault(reply.decode(), []).append(rank)
    return tuple(
        f"on {'all ranks' if len(own) == len(replies) else _few(own)}: {text}"
        for text, own in ranks.items()
    )


def _few(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, MAX_SHOWN)}"


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
