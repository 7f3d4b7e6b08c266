"""Snapshots in the memory of the nodes, for `Manager(memory_every=...)`.

The agent of a node offers a directory in memory that outlives the training processes
(`RunInfo.snapshot_dir`). There, in a folder for each root that a job saves to, lie at most two
snapshots: the newest complete one and the one that is being written. Each is a checkpoint scattered
over the nodes (`remesh.checkpoint.scattered`) and complete when `save` returns; what is older goes
when the next one begins.

A snapshot that cannot be kept, for want of room above all, ends no training: the memory is given
back, the log says why, and the job goes on with the checkpoints that it saves anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from remesh import catalog
from remesh.catalog import CheckpointInfo
from remesh.checkpoint.agree import PlanCache
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.match import LoadOptions
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.scattered import (
    ROOT_NAME,
    Scattered,
    find_scattered,
    load_scattered,
    nodes_of,
    save_scattered,
)
from remesh.core.integrity import hex_digest
from remesh.core.state import Joined
from remesh.errors import StorageError
from remesh.events import OnEvent, emitter
from remesh.exchange import Exchange, run_each, run_on_all
from remesh.storage import LocalStorage
from remesh.training.resuming import Recorder, Source

_LOGGER = logging.getLogger("remesh")


class Memory:
    """A job's snapshots. All methods but `is_due` are collective.

    Each file lies on `num_replicas` further nodes.
    """

    def __init__(
        self,
        exchange: Exchange,
        directories: list[str],  # in memory, of each rank; equal on one node alone
        root: str,
        recorder: Recorder,
        *,
        every: int,
        num_replicas: int,
        buffers: Buffers | None,
        on_event: OnEvent,
    ) -> None:
        self._exchange = exchange
        self._nodes = nodes_of(directories)
        self._root = root
        self._recorder = recorder
        self._folder = f"{directories[exchange.rank]}/{hex_digest(root.encode())[:16]}"
        self._storage = LocalStorage(self._folder, direct_io=False)
        self.every = every
        self._num_replicas = num_replicas
        self._buffers = buffers
        self._emit = emitter(on_event, exchange.rank)
        self._cache = PlanCache()
        self._is_open = True
        self._newest = ""

    def is_due(self, step: int) -> bool:
        """True if a snapshot is to be made after a step."""
        return self._is_open and step % self.every == 0

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None) -> None:
        """Make a snapshot."""
        name = catalog.step_name(step)
        if name == self._newest:
            return
        full = Joined(state)
        metadata: dict[str, object] = {}

        def prepare() -> None:
            self._recorder.describe(step, metrics, full, metadata)
            if self._nodes.is_first(self._exchange.rank):
                self._remove_all_but(self._newest)
                self._storage.put(ROOT_NAME, self._root.encode(), overwrite=True)

        try:
            run_each(self._exchange, prepare)
            save_scattered(
                full,
                self._place(name),
                self._nodes,
                self._exchange,
                metadata=metadata,
                buffers=self._buffers,
                num_replicas=self._num_replicas,
                cache=self._cache,
                emit=self._emit,
            )
        except StorageError as error:
            self._is_open = False
            self.keep("")
            if self._exchange.rank == 0:
                _LOGGER.warning("no more snapshots in memory: %s", error)
            return
        self._newest = name

    def find(self) -> tuple[list[Source], list[tuple[str, str]]]:
        """The snapshots to resume from, and names and reasons of those that are none."""
        sources, incomplete = [], []
        for found in find_scattered(self._storage, self._nodes, self._exchange):
            if found.missing:
                reason = f"in memory, but no node that is here has {', '.join(found.missing)}"
                incomplete.append((found.name, reason))
                if self._exchange.rank == 0:
                    _LOGGER.warning("passed over %s: %s", found.name, reason)
            else:
                sources.append(self._source(found))
        return sources, incomplete

    def keep(self, name: str) -> None:
        """Remove all snapshots but one, if there is one of this name."""

        def remove() -> None:
            if self._nodes.is_first(self._exchange.rank):
                self._remove_all_but(name)

        run_each(self._exchange, remove)
        self._newest = name

    def _remove_all_but(self, name: str) -> None:
        # The record is the last file by name, so it is removed first: then there is no half one.
        for path in reversed(self._storage.list()):
            if path != ROOT_NAME and path.partition("/")[0] != name:
                self._storage.delete(path)

    def _place(self, name: str) -> LocalStorage:
        return LocalStorage(f"{self._folder}/{name}", direct_io=False)

    def _source(self, found: Scattered) -> Source:
        """A snapshot as `Manager.resume` wants it."""
        info = CheckpointInfo(name=found.name, path=f"{self._folder}/{found.name}", step=0)
        info = catalog.with_record(info, found.record)
        assert info.note is not None, "a manager made it"

        def load(state: Any, **options: Any) -> RestoreReport:
            return load_scattered(
                state,
                self._place(found.name),
                found,
                self._nodes,
                self._exchange,
                options=LoadOptions(
                    keep_missing=options["missing"] == "keep",
                    refuse_unexpected=False,
                    cast=options["cast"],
                    transform=options["transform"],
                ),
                emit=self._emit,
            )

        return Source(info, load, "snapshot")


def agree_on_directories(exchange: Exchange, own: str) -> list[str]:
    """The directories in memory of all ranks' nodes; none if a node has none. Collective."""
    directories = [reply.decode() for reply in run_on_all(exchange, own.encode)]
    if all(directories):
        return directories
    if exchange.rank == 0:
        _LOGGER.warning(
            "no snapshots in memory: rank %d has no directory that outlives it\n"
            "Start the job with `remesh run`",
            directories.index(""),
        )
    return []
