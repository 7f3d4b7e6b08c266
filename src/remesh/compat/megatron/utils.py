"""Helpers for sharded state dicts: take out kinds of leaves, change the prefixes of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from remesh.compat.megatron.dict_utils import dict_list_map_inplace, extract_matching_values
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""Key, offset and flattened range of a shard: equal on all ranks that hold it."""


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> ShardId:
    flat = sharded_tensor.flattened_range
    span = None if flat is None else (flat.start or 0, flat.stop)
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), span


def _extract(state_dict: Any, *kinds: type) -> tuple[Any, Any]:
    return extract_matching_values(state_dict, lambda leaf: isinstance(leaf, kinds))


def extract_sharded_tensors(sharded_state_dict: Any) -> tuple[Any, Any]:
    """The `ShardedTensor`s, and everything else, each in its containers."""
    return _extract(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: Any) -> tuple[Any, Any]:
    """The `ShardedTensor`s and factories, and everything else, each in its containers."""
    return _extract(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: Any) -> tuple[Any, Any]:
    """`ShardedTensor`s, factories and local objects, and everything else, in their containers."""
    return _extract(
        sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject
    )


def extract_sharded_base(sharded_state_dict: Any) -> tuple[Any, Any]:
    """Everything sharded, and everything else, each in its containers."""
    return _extract(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: Any) -> tuple[Any, Any]:
    """The local objects, and everything else, each in its containers."""
    return _extract(sharded_state_dict, LocalNonpersistentObject)


def _rename(sharded_state_dict: Any, new_key: Callable[[str], str]) -> None:
    """Give everything sharded another key, in place."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            leaf.key = new_key(leaf.key)
        return leaf

    dict_list_map_inplace(change, sharded_state_dict)


def add_prefix_for_sharding(sharded_state_dict: Any, prefix: str) -> None:
    """Put a prefix before the key of everything sharded, in place."""
    _rename(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(sharded_state_dict: Any, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of the key of everything sharded, in place."""

    def new_key(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"key {key!r} does not begin with {old_prefix!r}")
        return new_prefix + key[len(old_prefix) :]

    _rename(sharded_state_dict, new_key)


def apply_prefix_mapping(sharded_state_dict: Any, prefix_map: Mapping[str, str]) -> None:
    """Replace the prefixes of the keys that have one of several, in place."""

    def new_key(key: str) -> str:
        old = next((old for old in prefix_map if key.startswith(old)), "")
        return prefix_map.get(old, "") + key[len(old) :]

    _rename(sharded_state_dict, new_key)
