"""Weights in many layouts, for tests."""

from __future__ import annotations

import math

import torch

from remesh.compat.flex_checkpoint import ShardedWeight

Weights = dict[str, ShardedWeight]


def numbers(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def cut(key: str, full: torch.Tensor, axis: int, shard: int, num_shards: int) -> ShardedWeight:
    """One of some equal shards of a tensor."""
    size = full.shape[axis] // num_shards
    part = full.narrow(axis, shard * size, size).clone()
    offset = [0] * full.ndim
    offset[axis] = shard * size
    return ShardedWeight(key, part, tuple(part.shape), tuple(full.shape), tuple(offset))


def flat(weight: ShardedWeight, start: int, stop: int) -> ShardedWeight:
    """A range of a shard, flattened."""
    part = weight.local_tensor.reshape(-1)[start:stop].clone()
    return ShardedWeight(
        weight.key,
        part,
        weight.local_shape,
        weight.global_shape,
        weight.global_offset,
        is_flattened=True,
        flattened_range=slice(start, stop),
    )


def emptied(weight: ShardedWeight) -> ShardedWeight:
    """The same shard with other content."""
    return ShardedWeight(
        weight.key,
        torch.full_like(weight.local_tensor, -1),
        weight.local_shape,
        weight.global_shape,
        weight.global_offset,
        weight.is_flattened,
        weight.flattened_range,
    )
