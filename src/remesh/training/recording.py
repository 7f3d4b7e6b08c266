"""What a save of a manager records beside the user's state: random numbers, and a note.

The random numbers are tensors of the state, under `manager.rng`; the note is metadata of the commit
record. Both are taken on each rank when a save begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from remesh import catalog
from remesh.catalog import ManagerNote, Provenance, TrackerRun
from remesh.core.state import Joined
from remesh.exchange import Exchange, run_on_one
from remesh.training import resuming, rng
from remesh.training.memory import Memory
from remesh.training.provenance import digest_of, new_run, provenance
from remesh.training.rng import Randomness
from remesh.training.trackers import runs_of

if TYPE_CHECKING:
    from remesh.training.fingerprints import Fingerprint
    from remesh.training.live import LiveMemory


class Recorder:
    """Describes the run to which saves belong.

    Args:
        exchange: The ranks, which agree on the name of a new run.
        randomness: Decides the random numbers of this process.
        roles: Of this rank.
        config: The job's configuration; its digest is recorded.

    Attributes:
        run: The run's name; changes when a run is resumed.
        parent: The checkpoint that the process resumed from.
        trackers: Name → experiment tracker.
        saved_trackers: Name → run of a tracker, of the checkpoint that the process resumed from.
    """

    def __init__(
        self, exchange: Exchange, randomness: Randomness, roles: rng.Roles, config: object
    ) -> None:
        self.run = run_on_one(exchange, lambda: new_run().encode()).decode()
        self.parent = ""
        self.trackers: dict[str, object] = {}
        self.saved_trackers: dict[str, TrackerRun] = {}
        self._randomness, self._roles = randomness, roles
        self._config_digest = "" if config is None else digest_of(config)
        self._is_alone = exchange.world_size == 1

    def streams(self) -> dict[str, rng.Stream]:
        """Name → stream of random numbers of this process."""
        return rng.streams_of(self._randomness.generators, is_alone=self._is_alone)

    def note(
        self, step: int, metrics: Mapping[str, float] | None, streams: Mapping[str, rng.Stream]
    ) -> ManagerNote:
        """The note of a save."""
        return ManagerNote(
            step=step,
            run=self.run,
            metrics=catalog.finite(metrics or {}),
            role_grid=self._roles.grid,
            streams=tuple(streams),
            trackers={**self.saved_trackers, **runs_of(self.trackers)},
            provenance=msgspec.structs.replace(self._provenance, parent=self.parent),
        )

    @cached_property
    def _provenance(self) -> Provenance:
        """Read once: notes are made at each step, and the code that runs is that of the start."""
        return provenance(self._config_digest)

    def describe(
        self,
        step: int,
        full: Joined,
        metrics: Mapping[str, float] | None,
        metadata: dict[str, object],
    ) -> bytes:
        """Fill in what is saved beside the state: random numbers, and the note; `rng.summary`."""
        streams = self.streams()
        rows = rng.rows_of(streams, self._roles)
        full.beside.update(resuming.with_rows(full.state, rows).beside)
        note = self.note(step, metrics, streams)
        metadata[catalog.NOTE_KEY] = msgspec.json.decode(msgspec.json.encode(note))
        return rng.summary(rows, self._roles)

    def keep(
        self,
        memory: Memory,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save a snapshot in memory. Collective."""
        full = Joined(state)
        what: dict[str, object] = {}

        def describe() -> bytes:
            return self.describe(step, full, metrics, what)

        memory.save(step, full, metadata=what, first=describe)

    def mark(
        self,
        live: LiveMemory,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        fingerprint: Fingerprint,
    ) -> None:
        """Note that a step is complete in the memory of this process."""
        streams = {name: stream.frozen() for name, stream in self.streams().items()}
        live.mark(
            step,
            state,
            fingerprint=fingerprint,
            note=lambda: self.note(step, metrics, streams),
            parent=self.parent,
            rows=lambda: rng.rows_of(streams, replace(self._roles, replica=0)),
            roles=self._roles,
        )
