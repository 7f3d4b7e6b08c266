"""What the processes of most scenarios train: a linear model, its rows cut among the ranks.

It needs no torch. Like every job of `train.py`, it has a batch that is a function of the step alone
and is shared out evenly, so the loss of every step is the same for every number of ranks.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from remesh.core.sharded import ShardedTensor
from remesh.exchange import Exchange
from tests.elastic.meeting import meet

BATCH = 12
"""Divides among 1, 2, 3 and 4 ranks."""
NUM_ROWS, NUM_COLUMNS = 12, 8
RATE, MOMENTUM = 0.05, 0.9

Array = npt.NDArray[np.float64]


def batch_of(step: int) -> tuple[Array, Array]:
    """The inputs and targets of a step, which no model can predict: the loss stays far from 0."""
    rng = np.random.default_rng(step)
    return rng.normal(size=(BATCH, NUM_COLUMNS)), rng.normal(size=(BATCH, NUM_ROWS))


def first_weight() -> Array:
    return np.random.default_rng(1 << 32).normal(size=(NUM_ROWS, NUM_COLUMNS))


def loss_and_gradient(weight: Array, step: int, rank: int, world_size: int) -> tuple[float, Array]:
    """Of a rank's part of a batch: the sum of its losses, and the gradient of that."""
    inputs, targets = (part[rank::world_size] for part in batch_of(step))
    errors = inputs @ weight.T - targets
    return float(np.square(errors).sum()), 2 * errors.T @ inputs


def uninterrupted(num_steps: int) -> list[float]:
    weight, moment = first_weight(), np.zeros((NUM_ROWS, NUM_COLUMNS))
    losses = []
    for step in range(num_steps):
        loss, gradient = loss_and_gradient(weight, step, 0, 1)
        losses.append(loss / BATCH)
        moment[...] = MOMENTUM * moment + gradient / BATCH
        weight -= RATE * moment
    return losses


class Job:
    """The job on this rank: its state is what is saved, its group the group of the manager."""

    def __init__(self, name: str, _way: str) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.group: Exchange = meet(name, self.rank, self.world_size)
        self._rows = slice(*(n * NUM_ROWS // self.world_size for n in (self.rank, self.rank + 1)))
        self._weight = first_weight()[self._rows].copy()
        self._moment = np.zeros_like(self._weight)
        self.state: dict[str, Any] = {"step": 0}
        for part, data in (("weight", self._weight), ("moment", self._moment)):
            self.state[part] = ShardedTensor.at_offset(
                part, data, (NUM_ROWS, NUM_COLUMNS), (self._rows.start, 0)
            )

    def train(self, step: int, *, stop: bool) -> tuple[float, bool]:
        parts = self.group.all_gather(self._weight.tobytes())
        whole = np.frombuffer(b"".join(parts)).reshape(NUM_ROWS, NUM_COLUMNS)
        loss, own = loss_and_gradient(whole, step, self.rank, self.world_size)
        said = self.group.all_gather(msgspec.msgpack.encode((loss, stop, own.tobytes())))
        told = [msgspec.msgpack.decode(one, type=tuple[float, bool, bytes]) for one in said]
        gradient = sum(np.frombuffer(one[2]).reshape(whole.shape)[self._rows] for one in told)
        self._moment[...] = MOMENTUM * self._moment + gradient / BATCH
        self._weight -= RATE * self._moment
        return sum(one[0] for one in told) / BATCH, any(one[1] for one in told)

    def close(self) -> None:
        """Leave the job."""
