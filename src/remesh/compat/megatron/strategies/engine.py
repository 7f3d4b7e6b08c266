"""What all backends share: a state dict of shards is a state for the engine.

Saving describes the main replicas of a rank to the engine, which plans, writes and commits. Loading
gives the engine the memory of the shards, made where a shard has none; the engine finds the stored
boxes, reads the bytes that are needed, converts dtypes and fills or cuts where another shape is
allowed. What comes back has the structure of what was asked for, with tensors and values as leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remesh.checkpoint.loading import load_into, open_shared
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import LoadOptions
from remesh.compat.megatron.boxes import (
    engine_object,
    engine_tensor,
    objects_metadata,
    tensors_metadata,
)
from remesh.compat.megatron.core import CheckpointingException, as_checkpointing_exception
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.mapping import ShardedBase, ShardedTensor, is_main_replica
from remesh.compat.megatron.objects import unpack
from remesh.compat.megatron.strategies.base import LoadShardedStrategy
from remesh.events import emitter, ignore
from remesh.exchange import Alone, Exchange
from remesh.storage import open_storage


def state_to_save(sharded_state_dict: Any) -> dict[int, Any]:
    """The main replicas of a state dict as a state for the engine."""
    leaves = [leaf for leaf in nested_values(sharded_state_dict) if _is_written(leaf)]
    return dict(enumerate(_described(leaves)))


def _is_written(leaf: ShardedBase) -> bool:
    is_empty = isinstance(leaf, ShardedTensor) and leaf.data is None
    if is_empty and is_main_replica(leaf.replica_id):
        raise CheckpointingException(f"{leaf.key}: there is no data to save")
    return is_main_replica(leaf.replica_id)


def _described(leaves: Sequence[Any]) -> list[Any]:
    return [
        engine_tensor(leaf) if isinstance(leaf, ShardedTensor) else engine_object(leaf)
        for leaf in leaves
    ]


class EngineLoadShardedStrategy(LoadShardedStrategy):
    """Loads what the engine can open. A backend names itself in `backend`."""

    backend = "remesh"

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are read with the tensors."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """See `LoadStrategyBase`."""
        if loaded_backend != self.backend:
            raise CheckpointingException(
                f"{type(self).__name__} reads backend {self.backend!r}, not {loaded_backend!r}; "
                "leave sharded_strategy out, and the right one is taken"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """See `LoadStrategyBase`."""
        if loaded_version != 1:
            raise CheckpointingException(
                f"{self.backend} version {loaded_version} is not known, only version 1"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Load; each rank reads what it needs. Collective."""
        return self.load_together(sharded_state_dict, checkpoint_dir, Alone())

    def load_together(
        self, sharded_state_dict: Any, checkpoint_dir: Any, partners: Exchange
    ) -> Any:
        """Load; ranks that need the same bytes read them once. Collective over all ranks.

        Args:
            sharded_state_dict: What this rank asks for.
            checkpoint_dir: The checkpoint.
            partners: The ranks that read for each other.

        Raises:
            CheckpointingException: On every rank, if something is not stored or does not fit.
        """
        leaves = list(nested_values(sharded_state_dict))
        for leaf in leaves:
            if isinstance(leaf, ShardedTensor):
                leaf.init_data("cpu")
        exchange, storage = exchange_of(None), open_storage(checkpoint_dir)
        with as_checkpointing_exception():
            loaded = load_into(
                dict(enumerate(_described(leaves))),
                open_shared(exchange, storage),
                storage,
                exchange,
                LoadOptions(keep_missing=False, refuse_unexpected=False, cast=True),
                transform=None,
                read=lambda target: target.read(lambda _size: None, partners),
                emit=emitter(ignore, exchange.rank),
                on_report=lambda _report: None,
            )
        numbers = iter(range(len(leaves)))

        def result(leaf: ShardedBase) -> Any:
            number = next(numbers)
            if isinstance(leaf, ShardedTensor):
                return None if leaf.data is None else leaf.data.detach()
            return unpack(loaded[number].data)

        return dict_list_map_outplace(result, sharded_state_dict)

    def stored_state(self, checkpoint_dir: Any) -> StoredState:
        """The index and values of a checkpoint, read by this process alone."""
        with as_checkpointing_exception():
            return open_shared(Alone(), open_storage(checkpoint_dir))

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """See `LoadShardedStrategy`."""
        return dict(tensors_metadata(self.stored_state(checkpoint_dir)))

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """See `LoadShardedStrategy`."""
        stored = self.stored_state(checkpoint_dir)
        return {**objects_metadata(stored), **tensors_metadata(stored)}
