"""A state dict is taken apart before it is saved or loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.compat.megatron.dict_utils import dict_list_map_inplace, extract_matching_values
from remesh.compat.megatron.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from remesh.compat.megatron.utils import extract_nonpersistent, extract_sharded_base
from remesh.compat.megatron.validation import (
    determine_global_metadata,
    validate_common_state_dict,
    validate_sharding_integrity,
)


def save_preprocess(
    sharded_state_dict: Any,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Split a state dict into what is sharded and what is common. Collective if it validates.

    Factories in it are replaced by what they build, in place.
    """
    apply_factories(sharded_state_dict)
    _, persistent = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(persistent)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
        compared = common
        if preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(common)
        validate_common_state_dict(compared)
    return sharded, common


def load_preprocess(sharded_state_dict: Any) -> tuple[Any, Any, Any]:
    """Take a state dict apart for loading; the state dict itself stays as it is.

    Returns a copy with factories replaced by what they build and without local objects; the local
    objects themselves, unwrapped; and the factories, with lists as dicts by position.
    """
    copied, _ = extract_matching_values(sharded_state_dict, lambda _leaf: True)
    copied = filter_out_empty_flatten_tensor(copied)
    factories, _ = extract_matching_values(
        copied, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    # What factories hold is not needed any more; without it, its memory can be freed.
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, sharded = extract_nonpersistent(copied)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), local)
    return sharded, local, factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """The state dict without tensors whose flattened range is empty."""
    kept, _ = extract_matching_values(
        sharded_state_dict,
        lambda leaf: (
            not (
                isinstance(leaf, ShardedTensor)
                and leaf.flattened_range is not None
                and leaf.data_shape == (0,)
            )
        ),
    )
    return kept
