"""The classes that strategies derive from, and the registry of default strategies.

A save strategy has a backend and a version, which `metadata.json` records; a load strategy checks
whether it can read them. A default strategy is made anew for each call: calls share nothing.
An instance that an application keeps has the plan and the host memory of its earlier saves.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import defaultdict
from enum import Enum
from typing import Any

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.mapping import ShardedStateDict, StateDict
from remesh.compat.megatron.strategies.async_utils import AsyncRequest


class StrategyAction(Enum):
    """The kinds of strategies."""

    LOAD_SHARDED = "load_sharded"
    SAVE_SHARDED = "save_sharded"


default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""Strategies that applications have registered, by action and by (backend, version). Such a table
is what the interface asks for; the library itself never changes it."""

_HOME = "remesh.compat.megatron.strategies"
_BUILT_IN = {
    (StrategyAction.SAVE_SHARDED, "remesh"): ("native", "RemeshSaveShardedStrategy"),
    (StrategyAction.LOAD_SHARDED, "remesh"): ("native", "RemeshLoadShardedStrategy"),
    (StrategyAction.SAVE_SHARDED, "torch_dist"): ("torch", "TorchDistSaveShardedStrategy"),
    (StrategyAction.LOAD_SHARDED, "torch_dist"): ("torch", "TorchDistLoadShardedStrategy"),
    (StrategyAction.LOAD_SHARDED, "zarr"): ("zarr", "ZarrLoadShardedStrategy"),
}
"""The library's own strategies: module and class. All are of version 1."""


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """The strategy for an action, a backend and a version."""
    registered = default_strategies[action.value].get((backend, version))
    if registered is not None:
        return registered
    if (action, backend) not in _BUILT_IN or version != 1:
        known = sorted({name for what, name in _BUILT_IN if what is action})
        raise CheckpointingException(
            f"there is no strategy to {action.value} with backend {backend!r} version {version}\n"
            f"Known are {', '.join(known)} in version 1, and what register_default_strategy adds"
        )
    module, name = _BUILT_IN[action, backend]
    make = getattr(importlib.import_module(f"{_HOME}.{module}"), name)
    return make(backend, version) if action.value.startswith("save") else make()


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: Any
) -> None:
    """Make a strategy the default for an action, a backend and a version, in this process."""
    default_strategies[action.value][backend, version] = strategy


class LoadStrategyBase(ABC):
    """Base of load strategies."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise `CheckpointingException` if this backend cannot be read."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise `CheckpointingException` if this version cannot be read."""


class SaveStrategyBase:
    """Base of save strategies."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadShardedStrategy(LoadStrategyBase):
    """Reads sharded tensors and objects."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> StateDict:
        """The tensors and objects of a sharded state dict, loaded, in the same structure."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Any) -> ShardedStateDict:
        """The stored tensors by key, each as one shard without data."""

    def load_sharded_metadata(self, checkpoint_dir: Any) -> ShardedStateDict:
        """The same with objects, by unique key, if the strategy lists them."""
        return self.load_tensors_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Take the tensors whose keys begin with a prefix out of a checkpoint."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot remove tensors\n"
            "Copy the others: remesh.checkpoint.convert(source, target, format='remesh', "
            f"transform=lambda name: None if name.startswith({key_prefix!r}) else name)"
        )


class SaveShardedStrategy(SaveStrategyBase, ABC):
    """Writes sharded tensors and objects."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> None:
        """Write what a sharded state dict describes."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Can do the slow half of a save beside the training."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> AsyncRequest:
        """Prepare a save; the caller schedules what is returned."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
