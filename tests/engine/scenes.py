"""What many tests of the engine do: ranks that are threads save or load, and all of them fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import remesh
from remesh.exchange import Exchange
from remesh.storage import Buffer, MemoryStorage, Storage, StorageView
from tests.support import Raised, run_ranks, run_ranks_outcomes

StateOf = Callable[[int], Any]
"""Rank → its state."""


def share_of(name: str, whole: Any, rank: int, num_ranks: int, dim: int = 0) -> Any:
    """A rank's share, as a copy, of an array or tensor that is cut in one dim."""
    start, stop = (number * whole.shape[dim] // num_ranks for number in (rank, rank + 1))
    part = whole[(slice(None),) * dim + (slice(start, stop),)]
    mine = part.clone() if isinstance(part, torch.Tensor) else part.copy()
    offset = [start if one == dim else 0 for one in range(whole.ndim)]
    return remesh.ShardedTensor.at_offset(name, mine, tuple(whole.shape), tuple(offset))


def part_of(world_size: int, rank: int, value: float, rows: int = 2) -> dict[str, Any]:
    """Some rows of a tensor on each rank, and a plain value; a mixture of two saves is seen."""
    whole = np.full((rows * world_size, 5), value, dtype=np.float32)
    return {"w": share_of("w", whole, rank, world_size), "step": value}


def stored_value(place: Any) -> float:
    """The one value of a checkpoint of `part_of`; fails if it is a mixture or damaged."""
    checkpoint = remesh.Checkpoint(place)
    assert checkpoint.verify().ok
    value = checkpoint.values["step"]
    assert isinstance(value, float)
    assert (checkpoint.read_array("w") == value).all()
    return value


def saved(state: Any) -> MemoryStorage:
    storage: MemoryStorage = saved_by(1, lambda _rank: state)
    return storage


def saved_by(num_ranks: int, state_of: StateOf, place: Any = None, **options: Any) -> Any:
    """Where ranks have saved their states: a place that is given, or a new one in memory."""
    place = MemoryStorage() if place is None else place

    def save(exchange: Exchange) -> None:
        remesh.save(state_of(exchange.rank), place, group=exchange, **options)

    run_ranks(num_ranks, save)
    return place


def errors_of_save(num_ranks: int, state_of: StateOf, **options: Any) -> list[Exception]:
    """What each rank raises when all save; checks that nothing is written."""
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        remesh.save(state_of(exchange.rank), storage, group=exchange, **options)

    errors = errors_of(num_ranks, save)
    assert storage.list() == []
    return errors


def errors_of_load(states: Sequence[Any], place: Any, **options: Any) -> list[Exception]:
    """What each rank raises when all load into their states."""

    def load(exchange: Exchange) -> None:
        remesh.load(states[exchange.rank], place, group=exchange, **options)

    return errors_of(len(states), load)


def errors_of(num_ranks: int, act: Callable[..., object], *args: object) -> list[Exception]:
    """The exception of each rank; fails if one returns or never ends."""
    errors = []
    for outcome in run_ranks_outcomes(num_ranks, act, *args):
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.error, Exception)
        errors.append(outcome.error)
    return errors


def all_are(errors: Sequence[object], kind: type[Exception], *words: str) -> None:
    for error in errors:
        assert isinstance(error, kind), error
        for word in words:
            assert word in str(error), (word, str(error))


class HeldReads(StorageView):
    """A storage that hands out what it has read of data files only when it is let go."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.has_read = threading.Event()
        self.may_go_on = threading.Event()
        self._readers: list[threading.Thread] = []

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        num_read = super().read_into(path, start, buffer)
        if path.endswith("00000.safetensors"):
            self._readers.append(threading.current_thread())
            self.has_read.set()
            assert self.may_go_on.wait(240), "nobody lets the reading go on"
        return num_read

    def let_go(self) -> None:
        """Let the reading threads go on, and wait until they have ended."""
        self.may_go_on.set()
        for reader in self._readers:
            reader.join(120)
            assert not reader.is_alive()
