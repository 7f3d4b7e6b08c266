"""State dicts that several tests save and load, and what ranks need to run Megatron."""

from __future__ import annotations

import importlib
import multiprocessing
from types import ModuleType
from typing import Any

import torch

from remesh.compat.megatron import ShardedTensor
from remesh.compat.megatron.strategies.base import LoadShardedStrategy
from remesh.compat.megatron.strategies.native import RemeshLoadShardedStrategy

shard = ShardedTensor.from_rank_offsets
flat_shard = ShardedTensor.from_rank_offsets_flat


def row_shards(num_shards: int, *, values: bool) -> dict[str, Any]:
    """All shards of `arange(128)`, as one process that plays all ranks holds them."""
    whole = torch.arange(128) if values else torch.empty(128)
    return {
        str(rank): shard("weight", rows.clone(), (0, rank, num_shards))
        for rank, rows in enumerate(whole.chunk(num_shards))
    }


def flat_shards(
    whole: torch.Tensor, tensor_parallel: int, data_parallel: int, *, values: bool
) -> dict[str, Any]:
    """The shards of a distributed optimizer: columns by TP, flattened, ranges by DP.

    The keys are ranks, TP changing fastest.
    """
    shards = {}
    for tp_rank, local in enumerate(whole.chunk(tensor_parallel, dim=1)):
        flat = local.reshape(-1)
        size = -(-flat.numel() // data_parallel)
        for dp_rank in range(data_parallel):
            part = slice(dp_rank * size, min((dp_rank + 1) * size, flat.numel()))
            data = flat[part].clone()
            shards[str(dp_rank * tensor_parallel + tp_rank)] = flat_shard(
                "moment",
                data if values else torch.full_like(data, -1),
                tuple(local.shape),
                (1, tp_rank, tensor_parallel),
                flattened_range=part,
            )
    return shards


class OwnLoad(LoadShardedStrategy):
    """A strategy that is not the engine's, as an application may write one."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        self.checked: list[object] = []  # backends and versions
        self._inner = RemeshLoadShardedStrategy()

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.checked.append(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.checked.append(loaded_version)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return self._inner.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return self._inner.load_tensors_metadata(checkpoint_dir)


def may_have_children() -> None:
    """The ranks of `run_processes` are daemons, which may have no children; a trainer is none."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def megatron_on_cpu() -> ModuleType:
    """Megatron's package, with the two calls of CUDA that a save on the CPU trips over."""
    may_have_children()  # each save starts a manager process
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    return importlib.import_module("megatron.core.dist_checkpointing")
