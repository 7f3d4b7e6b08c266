"""Flattened ranges in another layout than the stored one: there is nothing to do.

Megatron cuts what it asks for along the stored chunks before it loads, and puts the parts together
afterwards. The engine reads any boxes of a tensor, so what was asked for stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remesh.compat.megatron.mapping import ShardedTensor


@dataclass(frozen=True)
class TensorReformulationMetadata:
    """The shape of a stored tensor, and the shape that it is stored in."""

    ckpt_orig_global_shape: tuple[int, ...]
    ckpt_reform_global_shape: tuple[int, ...]


def is_nd_flattened_tensor(sh_ten: Any) -> bool:
    """Whether this is a flattened range of a shard."""
    return isinstance(sh_ten, ShardedTensor) and sh_ten.flattened_range is not None


def apply_nd_flattened_tensors_reformulation(
    sharded_state_dict: Any,
    reformulation_metadata: Mapping[str, TensorReformulationMetadata],  # noqa: ARG001
) -> tuple[Any, dict[Any, Any]]:
    """The state dict as it is, and nothing to restore."""
    return sharded_state_dict, {}


def restore_nd_flattened_tensors_formulation(
    state_dict: Any,
    formulation_restore_metadata: Mapping[Any, Any],  # noqa: ARG001
) -> Any:
    """The loaded state dict as it is."""
    return state_dict
