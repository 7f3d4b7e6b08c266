"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Real Megatron and plain PyTorch load what is written here. Reading goes through the engine, which
finds the bytes of each tensor in the files as they are, so a rank reads what it needs of a chunk
and not the chunk. Flattened ranges are written as the boxes that they are, and those of older
Megatron are read, though newer Megatron refuses them.
"""

from __future__ import annotations

from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy
from remesh.compat.megatron.strategies.foreign import ForeignSaveShardedStrategy


class TorchDistSaveShardedStrategy(ForeignSaveShardedStrategy):
    """Writes backend `torch_dist`."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        super().__init__(backend, version, file_format="torch_dcp")


class TorchDistLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `torch_dist`."""

    backend = "torch_dist"
    format = "torch_dcp"
