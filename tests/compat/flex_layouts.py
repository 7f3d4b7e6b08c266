"""Weights in many layouts, for tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from remesh.compat.flex_checkpoint import ShardedWeight, make_replicated_sharded_weight

Weights = dict[str, ShardedWeight]


def numbers(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def whole(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Whole tensors under their names."""
    return {key: make_replicated_sharded_weight(key, one) for key, one in tensors.items()}


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
    return dataclasses.replace(
        weight, local_tensor=part, is_flattened=True, flattened_range=slice(start, stop)
    )


def filled(fill: Callable[[Weights], object], wanted: Weights) -> Weights:
    """What a call makes of shards of other content, once it is what is wanted."""
    target = {
        key: dataclasses.replace(one, local_tensor=torch.full_like(one.local_tensor, -1))
        for key, one in wanted.items()
    }
    fill(target)
    for key, one in wanted.items():
        assert torch.equal(target[key].local_tensor, one.local_tensor), key
    return target
