"""Ranks that hold the same shards share the work of saving and loading them.

Saving: the ranks of a group tell each other which shards they hold, and each shard is given to one
of its holders, so that bytes are balanced; the engine's planner decides. The holder that writes
gets `replica_id` 0, the others 1, and the wrapped strategy does the rest. No data moves.

Loading: each shard that several ranks need is read by one of them and passed on. A strategy that
loads through the engine reads and passes on block by block, in bounded memory; any other one is
handed the shards that this rank is to read, and `remesh.reshard` passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.boxes import num_elements
from remesh.compat.megatron.core import CheckpointingException, as_checkpointing_exception
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.mapping import ShardedBase, ShardedTensor, is_main_replica
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy
from remesh.compat.megatron.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from remesh.exchange import Exchange, run_on_all
from remesh.planner import choose_writers
from remesh.resharding import reshard
from remesh.sharded import ShardedTensor as EngineTensor

ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""Key, offset and flattened range of a shard: equal on all ranks that hold it."""

EXCHANGE_ALGORITHMS = frozenset({"broadcast", "gather_rounds", "gather_object"})


class ShardDistribution(NamedTuple):
    """Which rank of a group does the work for each shard.

    Attributes:
        main_rank_for_shard: Shard → rank in the group.
        num_bytes: Bytes that each rank of the group has to do.
    """

    main_rank_for_shard: dict[ShardId, int]
    num_bytes: tuple[int, ...]


def shard_id(tensor: ShardedTensor) -> ShardId:
    """What names a shard."""
    flat = tensor.flattened_range
    span = None if flat is None else (flat.start or 0, flat.stop)
    return tensor.key, tuple(tensor.global_offset), span


def distribute_shards(
    exchange: Exchange, tensors: Sequence[ShardedTensor], *, only_with_main: bool
) -> ShardDistribution:
    """Give each shard to one of the ranks that hold it, so that bytes are balanced. Collective.

    Args:
        exchange: The ranks.
        tensors: What this rank holds.
        only_with_main: Leave out shards of which no rank of the group is the main replica.
    """
    mine = [
        (shard_id(one), num_elements(one) * one.dtype.itemsize, is_main_replica(one.replica_id))
        for one in tensors
    ]
    encoded = msgspec.msgpack.encode(mine)
    replies = run_on_all(exchange, lambda: encoded)
    sizes: dict[ShardId, int] = {}
    holders: dict[ShardId, list[int]] = {}
    mains: set[ShardId] = set()
    for rank, reply in enumerate(replies):
        for one, size, is_main in msgspec.msgpack.decode(
            reply, type=list[tuple[ShardId, int, bool]]
        ):
            sizes[one] = size
            ranks = holders.setdefault(one, [])
            if rank not in ranks:
                ranks.append(rank)
            if is_main:
                mains.add(one)
    shards = [one for one in holders if one in mains or not only_with_main]
    num_bytes = np.array([sizes[one] for one in shards], dtype=np.int64)
    ranks_of_shards = np.array([r for one in shards for r in holders[one]], dtype=np.int64)
    first = np.cumsum([0, *(len(holders[one]) for one in shards)])
    chosen = ranks_of_shards[choose_writers(num_bytes, ranks_of_shards, first, exchange.world_size)]
    loads = np.bincount(chosen, weights=num_bytes, minlength=exchange.world_size)
    return ShardDistribution(
        dict(zip(shards, chosen.tolist(), strict=True)), tuple(int(load) for load in loads)
    )


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Spreads a save over the ranks that hold the same shards; the format stays the same.

    Args:
        strategy: What saves. It must write the shards whose `replica_id` is 0.
        parallelization_group: The ranks that share work, a process group; by default all. The
            data-parallel group is usual.
        do_cache_distribution: Decide once, and do the same in later saves without talking; only for
            state dicts that keep their structure.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """See `AsyncSaveShardedStrategy`.

        Raises:
            CheckpointingException: If the wrapped strategy cannot.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(f"{self.base_strategy} cannot save beside the training")
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """See `SaveShardedStrategy`."""
        self.apply_saving_parallelization(sharded_state_dict)
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: Any) -> None:
        """Set `replica_id` to 0 where this rank is to write, and to 1 elsewhere, in place.

        Raises:
            CheckpointingException: On every rank, if the result would not cover everything once.
        """
        exchange = exchange_of(self.parallelization_group)
        tensors = [x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedTensor)]
        distribution = self.cached_distribution
        is_first = distribution is None
        if distribution is None:
            with as_checkpointing_exception():
                distribution = distribute_shards(exchange, tensors, only_with_main=True)
        # Several equal shards on one rank are one to write.
        written: set[ShardId] = set()
        for tensor in tensors:
            one = shard_id(tensor)
            is_mine = distribution.main_rank_for_shard.get(one) == exchange.rank
            tensor.replica_id = 0 if is_mine and one not in written else 1
            written.add(one)
        if is_first:
            validate_sharding_integrity(determine_global_metadata(sharded_state_dict)[1])
        if self.do_cache_distribution:
            self.cached_distribution = distribution


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Spreads a load over the ranks that need the same shards.

    Args:
        strategy: What loads.
        parallelization_group: The ranks that share work, a process group; by default all.
        do_cache_distribution: Decide once, and do the same in later loads without talking.
        exchange_algo: `broadcast`, `gather_rounds` or `gather_object`. All mean the same here: only
            what a rank needs travels to it.

    Raises:
        CheckpointingException: If `exchange_algo` is none of these.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo not in EXCHANGE_ALGORITHMS:
            raise CheckpointingException(
                f"exchange_algo={exchange_algo!r} is none of {sorted(EXCHANGE_ALGORITHMS)}"
            )
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_distribution: ShardDistribution | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_version_compatibility(loaded_version)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """See `LoadShardedStrategy`. Collective."""
        group = self.parallelization_group
        if isinstance(self.base_strategy, EngineLoadShardedStrategy):
            return self.base_strategy.load_together(sharded_state_dict, checkpoint_dir, group)
        partners = exchange_of(group)
        if partners.world_size == 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        return self._load_and_pass_on(sharded_state_dict, checkpoint_dir, partners)

    def _load_and_pass_on(
        self, sharded_state_dict: Any, checkpoint_dir: Any, partners: Exchange
    ) -> Any:
        """Load what this rank is to read with the wrapped strategy, and share it."""
        leaves: list[ShardedBase] = list(nested_values(sharded_state_dict))
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        distribution = self.cached_distribution
        if distribution is None:
            with as_checkpointing_exception():
                distribution = distribute_shards(partners, tensors, only_with_main=False)
        if self.do_cache_distribution:
            self.cached_distribution = distribution
        main_rank = distribution.main_rank_for_shard
        mine: dict[str, ShardedBase] = {
            str(number): leaf if not isinstance(leaf, ShardedTensor) else replace(leaf)
            for number, leaf in enumerate(leaves)
            if not isinstance(leaf, ShardedTensor) or main_rank[shard_id(leaf)] == partners.rank
        }
        loaded = self.base_strategy.load(mine, checkpoint_dir)
        source: dict[str, Any] = {}
        target: list[EngineTensor] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, ShardedTensor):
                leaf.init_data("cpu")
                assert leaf.data is not None
                name = repr(shard_id(leaf))
                if main_rank[shard_id(leaf)] == partners.rank:
                    leaf.data.detach().copy_(loaded[str(number)])
                    source.setdefault(name, EngineTensor.whole(name, leaf.data.detach().clone()))
                else:
                    target.append(EngineTensor.whole(name, leaf.data.detach()))
        with as_checkpointing_exception():
            reshard(source, {"": target} if target else {}, group=partners)
        numbers = iter(range(len(leaves)))

        def result(leaf: ShardedBase) -> Any:
            number = next(numbers)
            return leaf.data if isinstance(leaf, ShardedTensor) else loaded[str(number)]

        return dict_list_map_outplace(result, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """As the wrapped strategy."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """As the wrapped strategy."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """As the wrapped strategy."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)
