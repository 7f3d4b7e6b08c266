"""States of which every element is one value, so that a mixture of two saves is seen."""

from __future__ import annotations

from typing import Any

import numpy as np

import remesh
from remesh.storage import MemoryStorage


def part_of(world_size: int, rank: int, value: float, rows: int = 2) -> dict[str, Any]:
    """Some rows of a tensor on each rank, and a plain value."""
    part = np.full((rows, 5), value, dtype=np.float32)
    shape, offset = (rows * world_size, 5), (rows * rank, 0)
    return {"w": remesh.ShardedTensor.at_offset("w", part, shape, offset), "step": value}


def stored_value(place: Any) -> float:
    """The one value of a checkpoint; fails if it is a mixture or damaged."""
    checkpoint = remesh.Checkpoint(place)
    assert checkpoint.verify().ok
    value = checkpoint.values["step"]
    assert isinstance(value, float)
    assert (checkpoint.read_array("w") == value).all()
    return value


def saved(state: Any) -> MemoryStorage:
    """A checkpoint of one rank's state."""
    storage = MemoryStorage()
    remesh.save(state, storage)
    return storage
