"""Layouts for tests: which boxes of a few tensors each rank holds, in numpy, without processes.

A layout is named like the parallelism it stands for. Its `state` gives a rank's part of the same
global state, as remesh's own descriptions; `check` compares what a rank holds with the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.adapters.dtensor import Sharded, boxes_of_segments, local_segments
from remesh.core.geometry import Box, boxes_of_flat_range
from remesh.core.sharded import Part, ShardedTensor

Array = npt.NDArray[Any]

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "embed": ((11, 6), "float32"),
    "attention": ((4, 6, 3), "float64"),
    "norm": ((10,), "float16"),
    "experts": ((3, 1, 2, 5), "int64"),
    "mask": ((7, 2), "bool"),
    "scalar": ((), "float32"),
    "empty": ((0, 3), "float32"),
}


def truth(name: str) -> Array:
    """The global tensor, every element different as far as its type allows."""
    shape, dtype = SHAPES[name]
    return (np.arange(math.prod(shape)) + 1).reshape(shape).astype(dtype)


@dataclass(frozen=True)
class Layout:
    """A world and what each of its ranks holds of a tensor: name, rank → boxes."""

    name: str
    world_size: int
    parts: Callable[[tuple[int, ...], int], list[Any]]

    def state(self, rank: int, fill: bool) -> dict[str, ShardedTensor]:
        """A rank's part of the state; zeros (or False) if not filled."""
        state = {}
        for name, (shape, dtype) in SHAPES.items():
            values = truth(name) if fill else np.zeros(shape, dtype)
            # A tensor without elements has no boxes; its description keeps its dtype.
            boxes = self.parts(shape, rank) if values.size else [Box.whole(shape)]
            parts = tuple(Part(box, np.array(values[box.slices])) for box in boxes)
            first = all(self.parts(shape, other) != boxes for other in range(rank))
            state[name] = ShardedTensor(name, shape, parts, replica_id=0 if first else 1)
        return state

    def check(self, rank: int, state: dict[str, ShardedTensor]) -> None:
        for name, tensor in state.items():
            for part in tensor.parts:
                np.testing.assert_array_equal(part.data, truth(name)[part.box.slices], name)


def on_mesh(name: str, mesh: Sequence[int], placements: Sequence[Any]) -> Layout:
    """A layout of DTensors; a dim that a tensor lacks is replicated."""

    def parts(shape: tuple[int, ...], rank: int) -> list[Any]:
        coordinate = tuple(int(n) for n in np.unravel_index(rank, mesh))
        known = tuple(p if p is None or p.dim < len(shape) else None for p in placements)
        segments = local_segments(tuple(shape), tuple(mesh), coordinate, known)
        return [box for box, _ in boxes_of_segments(segments)]

    return Layout(name, math.prod(mesh), parts)


def flat(name: str, world_size: int) -> Layout:
    """Every tensor flattened, padded to a multiple of the world, and cut (ZeRO)."""

    def parts(shape: tuple[int, ...], rank: int) -> list[Any]:
        size = math.prod(shape)
        share = -(-size // world_size)
        start, stop = min(size, rank * share), min(size, (rank + 1) * share)
        return boxes_of_flat_range(shape, start, stop)

    return Layout(name, world_size, parts)


def whole_by_rank(name: str, world_size: int) -> Layout:
    """Every tensor whole on one rank (ZeRO-1 by parameter, pipeline stages)."""
    order = {shape: number for number, (shape, _) in enumerate(SHAPES.values())}

    def parts(shape: tuple[int, ...], rank: int) -> list[Any]:
        mine = order[shape] % world_size == rank
        return boxes_of_flat_range(shape, 0, math.prod(shape)) if mine else []

    return Layout(name, world_size, parts)


LAYOUTS = [
    on_mesh("single", [1], [None]),
    on_mesh("dp2", [2], [None]),
    on_mesh("fsdp2", [2], [Sharded(0)]),
    on_mesh("fsdp3", [3], [Sharded(0)]),
    on_mesh("fsdp4", [4], [Sharded(0)]),
    on_mesh("tp2", [2], [Sharded(1)]),
    on_mesh("tp4", [4], [Sharded(1)]),
    on_mesh("hsdp2x2", [2, 2], [None, Sharded(0)]),
    on_mesh("fsdp2tp2-rows", [2, 2], [Sharded(0, 2), Sharded(0)]),
    on_mesh("fsdp2tp2-columns", [2, 2], [Sharded(0), Sharded(1)]),
    on_mesh("packed-tp2", [2], [Sharded(0, 2)]),
    on_mesh("mesh2x2x2", [2, 2, 2], [None, Sharded(0), Sharded(1)]),
    flat("zero2", 2),
    flat("zero3", 3),
    flat("zero4", 4),
    whole_by_rank("pp3", 3),
]
SOME = (0, 3, 5, 10)
"""How far behind a source those targets are in the list that the default run takes."""
ALL = range(len(LAYOUTS))


def targets_of(source: Layout, shifts: Iterable[int]) -> list[Layout]:
    """The layouts that are so far behind a source; after the last comes the first."""
    number = LAYOUTS.index(source)
    return [LAYOUTS[(number + shift) % len(LAYOUTS)] for shift in shifts]
