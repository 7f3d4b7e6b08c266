"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Reading goes through the engine, which finds the bytes of each tensor in the files as they are, so a
rank reads what it needs of a chunk and not the chunk. Flattened ranges of older Megatron are read,
though newer Megatron refuses them.
"""

from __future__ import annotations

from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy


class TorchDistLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `torch_dist`."""

    backend = "torch_dist"
    format = "torch_dcp"
