"""Adapters: what torch objects mean in terms of `remesh.core.state`.

`describe_leaf` is the leaf describer that `remesh.core.state.describe` takes: it recognises
tensors, modules, optimizers, generators and objects with a state dict, each of which has a module
here. `memory_of` gives the pipeline the memory of what was described.

Describing never communicates: every rank tells what it holds itself.

What torch objects do not tell, users declare: `build_sharded_state_dict` and `shard_weight` for
layers that were cut by hand, `NamedModule` and `rename_shards` for layers and experts with global
numbers, `flat_partition` for slices of flattened parameters, `DescribedOptimizer` for optimizers
over such slices or over copies of parameters.
docs/parallelism.md shows all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remesh.adapters.declared import (
    NamedModule,
    default_sharded_state_dict,
    rename_shards,
)
from remesh.adapters.flat import FlatSpan, flat_partition
from remesh.adapters.memory import casting_memory_of, memory_of
from remesh.adapters.module import describe_module
from remesh.adapters.nested import (
    describe_copy,
    describe_generator,
    describe_stateful,
    is_stateful,
)
from remesh.adapters.optimizer import DescribedOptimizer, describe_optimizer
from remesh.adapters.tensor import describe_tensor
from remesh.adapters.tensor_parallel import (
    Block,
    Split,
    build_sharded_state_dict,
    shard_weight,
)
from remesh.core.state import Path, Rebuild, Walk, is_placeholder

__all__ = [
    "Block",
    "DescribedOptimizer",
    "FlatSpan",
    "NamedModule",
    "Split",
    "build_sharded_state_dict",
    "casting_memory_of",
    "default_sharded_state_dict",
    "describe_leaf",
    "flat_partition",
    "memory_of",
    "rename_shards",
    "shard_weight",
]


def describe_leaf(walk: Walk, path: Path, node: Any) -> Rebuild | None:
    """Describe a torch object or an object with a state dict; None if the node is neither."""
    if isinstance(node, torch.Tensor):
        return describe_tensor(walk, path, node)
    if isinstance(node, nn.Module | NamedModule):
        return describe_module(walk, path, node)
    if isinstance(node, torch.optim.Optimizer | DescribedOptimizer):
        return describe_optimizer(walk, path, node)
    if isinstance(node, torch.Generator):
        return describe_generator(walk, path, node)
    if is_stateful(node):
        return describe_stateful(walk, path, node)
    if path and is_placeholder(node) and walk.holds_tensors(path):
        return describe_copy(walk, path, node)
    return None
