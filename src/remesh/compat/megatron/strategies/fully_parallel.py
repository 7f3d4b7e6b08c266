"""Ranks that hold the same shards share the work of saving and loading them.

The engine does that by itself: of a save it balances the bytes over all ranks that hold a shard,
and in a load the ranks of a group read for each other, block by block, in bounded memory. So the
wrappers ask it of the strategy that they wrap. Strategies that are not the engine's are wrapped by
Megatron's own wrappers; where Megatron is not redirected, each rank does its work alone.
"""

from __future__ import annotations

from typing import Any

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.redirect import of_release
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from remesh.compat.megatron.strategies.native import (
    RemeshLoadShardedStrategy,
    RemeshSaveShardedStrategy,
)


def _is_engines(strategy: object) -> bool:
    """True if the engine does the work of a strategy, and not methods that a derived class has."""
    methods = [getattr(type(strategy), name, None) for name in ("save", "async_save", "load")]
    return isinstance(strategy, RemeshSaveShardedStrategy | RemeshLoadShardedStrategy) and all(
        method is None or method.__module__.startswith(f"{__package__}.") for method in methods
    )


class _Wrapper:
    """What makes a wrapper of a strategy that is not the engine's Megatron's own."""

    def __new__(cls, strategy: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Megatron's wrapper of this name for a strategy that is not the engine's."""
        own = None
        if strategy is not None and not _is_engines(strategy):
            own = of_release("strategies.fully_parallel", cls.__name__)
        return super().__new__(cls) if own is None else own(strategy, *args, **kwargs)


class FullyParallelSaveStrategyWrapper(_Wrapper, AsyncSaveShardedStrategy):
    """Spreads a save over the ranks that hold the same shards; the format stays the same.

    All ranks share, whatever the group, and the plan is kept while the layout stays: other options
    change nothing.
    """

    def __init__(
        self, strategy: SaveShardedStrategy, parallelization_group: Any = None, *_: Any, **__: Any
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy, self.parallelization_group = strategy, parallelization_group
        if isinstance(strategy, RemeshSaveShardedStrategy):
            strategy.shares_replicas = True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(f"{self.base_strategy} cannot save beside the training")
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper(_Wrapper, LoadShardedStrategy):
    """Spreads a load over the ranks of a group that need the same shards.

    All exchange algorithms mean the same here: only what a rank needs travels to it. Other options
    change nothing.
    """

    def __init__(
        self, strategy: LoadShardedStrategy, parallelization_group: Any = None, *_: Any, **__: Any
    ) -> None:
        self.base_strategy, self.parallelization_group = strategy, parallelization_group
        if isinstance(strategy, RemeshLoadShardedStrategy):
            strategy.group, strategy.share_reads = parallelization_group, True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)
