"""Adapters: what torch objects mean in terms of `remesh.state`.

`describe_leaf` is the leaf describer that `remesh.state.describe` takes: it recognises tensors,
modules, optimizers, generators and objects with a state dict, each of which has a module here.
`memory_of` gives the pipeline the memory of what was described.

Describing never communicates: every rank tells what it holds itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remesh.adapters.memory import casting_memory_of, memory_of
from remesh.adapters.module import describe_module
from remesh.adapters.optimizer import describe_optimizer
from remesh.adapters.stateful import describe_generator, describe_stateful, is_stateful
from remesh.adapters.tensor import describe_tensor
from remesh.adapters.zero import describe_zero_redundancy, is_zero_redundancy
from remesh.state import Path, Rebuild, Walk

__all__ = ["casting_memory_of", "describe_leaf", "memory_of"]


def describe_leaf(walk: Walk, path: Path, node: Any) -> Rebuild | None:
    """Describe a torch object or an object with a state dict; None if the node is neither.

    Raises:
        StateError: If the object cannot be stored or loaded; the message names its path.
    """
    if isinstance(node, torch.Tensor):
        return describe_tensor(walk, path, node)
    if isinstance(node, nn.Module):
        return describe_module(walk, path, node)
    if isinstance(node, torch.optim.Optimizer):
        if is_zero_redundancy(node):
            return describe_zero_redundancy(walk, path, node)
        return describe_optimizer(walk, path, node)
    if isinstance(node, torch.Generator):
        return describe_generator(walk, path, node)
    if is_stateful(node):
        return describe_stateful(walk, path, node)
    return None
