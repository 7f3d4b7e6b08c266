"""Shards given to the ranks of a group that do the work for them, and passed on to the others.

The ranks exchange which shards they hold, and each computes the same distribution greedily: shards
that few ranks hold first, large ones before small ones, each to the rank that has least to do.
Shards whose main replica is in another group come last, so that a load is spread as the save was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.resharding import reshard
from remesh.compat.megatron.core import as_checkpointing_exception
from remesh.compat.megatron.dict_utils import nested_values
from remesh.compat.megatron.mapping import ShardedTensor, is_main_replica
from remesh.compat.megatron.utils import ShardId, _sharded_tensor_shard_id
from remesh.compat.megatron.validation import determine_global_metadata
from remesh.core.sharded import ShardedTensor as EngineTensor

Shard = TypeVar("Shard")


class ShardDistribution(NamedTuple):
    """The rank of a group that does the work for each shard."""

    main_rank_for_shard: dict[ShardId, int]  # shard → rank in the group
    shards_in_this_group: set[ShardId]  # the shards that the group has work with
    shard_to_metadata: dict[ShardId, ShardedTensor]  # shard → its description, without data
    all_ranks_for_shard: dict[ShardId, list[int]]  # shard → the ranks of the group that hold it


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[Shard, Sequence[int]],
    shard_to_size: Mapping[Shard, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[Shard] = (),
) -> dict[Shard, int]:
    """Give each shard to one of the ranks that hold it, whatever the order of the arguments' items.

    The shards of `cross_parallelization_group_loads` come last.
    """
    last = set(cross_parallelization_group_loads)

    def order(shard: Any) -> tuple[bool, int, int, Any]:
        return shard in last, len(shard_to_ranks[shard]), -shard_to_size[shard], shard

    loads = [0] * num_ranks
    chosen: dict[Shard, int] = {}
    for shard in sorted(shard_to_ranks, key=order):
        rank = min(shard_to_ranks[shard], key=lambda rank: (loads[rank], rank))
        chosen[shard] = rank
        loads[rank] += shard_to_size[shard]
    return chosen


def determine_main_replica_uniform_distribution(
    sharded_state_dict: Any, parallelization_group: Any = None, ignore_groups: bool = False
) -> ShardDistribution | None:
    """Decide which rank of a group does the work for each shard. Collective in the group.

    Objects do not count. None for a group of one rank, which does everything. `ignore_groups`
    includes shards whose main replica is in another group, as a load must.
    """
    if exchange_of(parallelization_group).world_size == 1:
        return None
    mine = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
    with as_checkpointing_exception():
        _, of_all = determine_global_metadata({"": mine}, parallelization_group)
    holders: dict[ShardId, dict[int, None]] = {}
    described: dict[ShardId, ShardedTensor] = {}
    mains: set[ShardId] = set()
    for rank, tensors in enumerate(of_all):
        for one in tensors:
            assert isinstance(one, ShardedTensor)
            shard = _sharded_tensor_shard_id(one)
            described.setdefault(shard, one)
            holders.setdefault(shard, {})[rank] = None
            if is_main_replica(one.replica_id):
                mains.add(shard)
    shards = set(holders) if ignore_groups else mains
    ranks = {shard: list(holders[shard]) for shard in holders if shard in shards}
    sizes = {
        shard: math.prod(described[shard].data_shape) * described[shard].dtype.itemsize
        for shard in ranks
    }
    chosen = distribute_shards_to_ranks(ranks, sizes, len(of_all), shards - mains)
    return ShardDistribution(chosen, shards, described, ranks)


def _get_empty_tensor_for_exchange(shard: ShardedTensor) -> torch.Tensor:
    """The tensor that a shard of another rank is received into."""
    shard.init_data("cpu")
    assert shard.data is not None
    return shard.data.detach()


def exchange_by_distribution(
    loaded_tensors: Mapping[ShardId, torch.Tensor],
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Any = None,
    exchange_algo: str = "broadcast",
) -> dict[ShardId, torch.Tensor]:
    """Pass tensors on to the ranks of a group that lack them. Collective in the group.

    Data of `unloaded_shards` is filled in place, and made where there is none. All algorithms mean
    the same here: only what a rank needs travels to it. Returns what this rank had and received.
    """
    del exchange_algo
    rank = exchange_of(parallelization_group).rank
    have = dict(loaded_tensors)
    source: dict[str, EngineTensor] = {}
    target: dict[str, EngineTensor] = {}
    for shard, main_rank in shard_distribution.main_rank_for_shard.items():
        name = repr(shard)
        if main_rank == rank and shard in have:
            source[name] = EngineTensor.whole(name, have[shard].detach())
        elif main_rank != rank and shard in unloaded_shards:
            have[shard] = _get_empty_tensor_for_exchange(unloaded_shards[shard])
            target[name] = EngineTensor.whole(name, have[shard])
    with as_checkpointing_exception():
        reshard(source, target, group=parallelization_group)
    return have
