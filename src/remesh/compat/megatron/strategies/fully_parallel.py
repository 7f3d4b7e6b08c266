"""Ranks that hold the same shards share the work of saving and loading them.

Saving: each shard is given to one of the ranks of a group that hold it, so that bytes are balanced;
see `exchange_utils`. The holder that writes gets `replica_id` 0, the others 1, and the wrapped
strategy does the rest. No data moves.

Loading: each shard that several ranks need is read by one of them and passed on. A strategy that
loads through the engine reads and passes on block by block, in bounded memory; any other one is
handed the shards that this rank is to read, and `exchange_by_distribution` passes them on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from remesh.compat.megatron.mapping import ShardedTensor
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from remesh.compat.megatron.strategies.native import EngineLoadShardedStrategy
from remesh.compat.megatron.utils import ShardId, _sharded_tensor_shard_id


class _Wrapper:
    """A strategy, the group that shares its work, and who does what of it."""

    def _wrap(self, strategy: Any, group: Any, do_cache_distribution: bool) -> None:
        self.base_strategy = strategy
        self.can_handle_sharded_objects = strategy.can_handle_sharded_objects
        self.parallelization_group = group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None

    def _distribution(
        self, sharded_state_dict: Any, *, ignore_groups: bool = False
    ) -> ShardDistribution | None:
        found = self.cached_distribution
        if found is None:
            found = determine_main_replica_uniform_distribution(
                sharded_state_dict, self.parallelization_group, ignore_groups
            )
        if self.do_cache_distribution:
            self.cached_distribution = found
        return found


class FullyParallelSaveStrategyWrapper(_Wrapper, AsyncSaveShardedStrategy):
    """Spreads a save over the ranks that hold the same shards; the format stays the same.

    The strategy must write the shards whose `replica_id` is 0. With `do_cache_distribution` later
    saves do the same without talking; only for state dicts that keep their structure. Other options
    of newer Megatron change nothing.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        **_ignored: Any,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self._wrap(strategy, parallelization_group, do_cache_distribution)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(f"{self.base_strategy} cannot save beside the training")
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.apply_saving_parallelization(sharded_state_dict)
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: Any) -> None:
        """Set `replica_id` to 0 where this rank is to write, and to 1 elsewhere, in place."""
        rank = exchange_of(self.parallelization_group).rank
        distribution = self._distribution(sharded_state_dict)
        if distribution is None:
            return
        # Several equal shards on one rank are one to write.
        written: set[ShardId] = set()
        for leaf in nested_values(sharded_state_dict):
            if isinstance(leaf, ShardedTensor):
                shard = _sharded_tensor_shard_id(leaf)
                is_mine = distribution.main_rank_for_shard.get(shard) == rank
                leaf.replica_id = 0 if is_mine and shard not in written else 1
                written.add(shard)


class FullyParallelLoadStrategyWrapper(_Wrapper, LoadShardedStrategy):
    """Spreads a load over the ranks that need the same shards.

    All exchange algorithms mean the same here: only what a rank needs travels to it. Other options
    of newer Megatron change nothing.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        **_ignored: Any,
    ) -> None:
        self._wrap(strategy, parallelization_group, do_cache_distribution)
        self.exchange_algo = exchange_algo

    @property
    def cached_global_metadata(self) -> Any:
        """That of the wrapped strategy; None if it keeps none."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        group, base = self.parallelization_group, self.base_strategy
        # A derived strategy with a `load` of its own is treated like any other strategy.
        if isinstance(base, EngineLoadShardedStrategy) and (
            type(base).load is EngineLoadShardedStrategy.load
        ):
            return base.load_together(
                sharded_state_dict, checkpoint_dir, group=group, share_reads=True
            )
        distribution = self._distribution(sharded_state_dict, ignore_groups=True)
        if distribution is None:
            return base.load(sharded_state_dict, checkpoint_dir)
        return self._load_and_pass_on(sharded_state_dict, checkpoint_dir, distribution)

    def _load_and_pass_on(
        self, sharded_state_dict: Any, checkpoint_dir: Any, distribution: ShardDistribution
    ) -> Any:
        """Load what this rank is to read with the wrapped strategy, and share it."""
        rank = exchange_of(self.parallelization_group).rank
        readers = distribution.main_rank_for_shard
        leaves = {
            str(number): leaf for number, leaf in enumerate(nested_values(sharded_state_dict))
        }
        shards = {
            number: _sharded_tensor_shard_id(leaf)
            for number, leaf in leaves.items()
            if isinstance(leaf, ShardedTensor)
        }
        lacking = {number for number, shard in shards.items() if readers[shard] != rank}
        loaded = self.base_strategy.load(
            {
                number: replace(leaf, replica_id=0) if number in shards else leaf
                for number, leaf in leaves.items()
                if number not in lacking
            },
            checkpoint_dir,
        )
        tensors = exchange_by_distribution(
            {shard: loaded[number] for number, shard in shards.items() if number not in lacking},
            {shards[number]: leaves[number] for number in lacking},
            distribution,
            self.parallelization_group,
            self.exchange_algo,
        )
        numbers = iter(leaves)

        def result(leaf: Any) -> Any:
            number = next(numbers)
            if number not in shards:
                return loaded[number]
            leaf.init_data("cpu")
            found = tensors[shards[number]]
            if found.data_ptr() != leaf.data.data_ptr():
                leaf.data.detach().copy_(found)
            return leaf.data.detach()

        return dict_list_map_outplace(result, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)
