"""Sharding of optimizer state, taken from the sharding of the parameters it belongs to.

An optimizer's `state_dict()` numbers its parameters. A model's sharded state dict that was made of
`state_dict(keep_vars=True)` holds the parameters themselves, so object identity tells which number
belongs to which sharded parameter, and the state of a parameter is sharded as the parameter is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import nested_values
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from remesh.compat.megatron.utils import extract_sharded_tensors_and_factories

logger = logging.getLogger(__name__)

ShardedParam = ShardedTensor | ShardedTensorFactory

KEEP_VARS_HINT = (
    "make the model's sharded state dict of state_dict(keep_vars=True), so that it holds the "
    "parameters themselves; where a parameter is stored in another form, use a ShardedTensorFactory"
)
"""What to do where a parameter of the optimizer is not found in the model's state dict."""


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """`id()` of each parameter → its number in the optimizer, the first if it has several."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: Any, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedParam]:
    """Number of each parameter in the optimizer → the sharded parameter.

    Tensors and factories of the model's state dict must hold the parameters themselves
    (`state_dict(keep_vars=True)`).
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found = {
        numbers[id(param.data)]: param
        for param in nested_values(sharded)
        if id(param.data) in numbers
    }
    if not found:
        logger.warning(
            "no tensor of the model's sharded state dict is a parameter of the optimizer; %s",
            KEEP_VARS_HINT,
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedParam:
    """The sharding of a tensor that an optimizer keeps for a parameter."""
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != tuple(model_param.local_shape):
        raise CheckpointingException(
            f"{key}: the optimizer's tensor has shape {tuple(optim_param.shape)}, the parameter "
            f"{tuple(model_param.local_shape)}\nName state that is not shaped like its parameter "
            "in exclude_keys"
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Make an optimizer's state dict a sharded one, in place.

    Each tensor becomes a sharded one with the key `optimizer.state.<name>.<key of the parameter>`;
    the parameter numbers in the groups become local objects, for they depend on the layout.
    """
    sharded: dict[int, dict[str, ShardedParam]] = {}
    for number, state in optim_state_dict["state"].items():
        if number not in id_to_sharded_param_map:
            raise ValueError(
                f"parameter {number} of the optimizer is in no sharded state dict; {KEEP_VARS_HINT}"
            )
        sharded[number] = {
            name: make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], tensor, prefix=f"optimizer.state.{name}"
            )
            for name, tensor in state.items()
            if name not in exclude_keys
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = sharded
