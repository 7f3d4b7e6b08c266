"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Real Megatron and plain PyTorch load what is written here. Reading goes through the engine, which
finds the bytes of each tensor in the files as they are, so a rank reads what it needs of a chunk
and not the chunk. Flattened ranges are written as the boxes that they are, and those of older
Megatron are read, though newer Megatron refuses them.
"""

from __future__ import annotations

from typing import Any

from remesh.checkpoint.foreign import save_as
from remesh.compat.megatron.core import as_checkpointing_exception, storage_of
from remesh.compat.megatron.strategies.base import SaveShardedStrategy
from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy, state_to_save


class TorchDistSaveShardedStrategy(SaveShardedStrategy):
    """Writes backend `torch_dist`."""

    def __init__(self, backend: str = "torch_dist", version: int = 1, **_options: Any) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are written with the tensors."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save; returns when the checkpoint is durable. Collective.

        Raises:
            CheckpointingException: On every rank, if something cannot be stored.
        """
        with as_checkpointing_exception():
            state = state_to_save(sharded_state_dict)
            save_as(state, storage_of(checkpoint_dir), format="torch_dcp", overwrite=True)


class TorchDistLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `torch_dist`."""

    backend = "torch_dist"
    format = "torch_dcp"
