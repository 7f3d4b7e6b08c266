"""Helpers for sharded state dicts: take out kinds of leaves, change the prefixes of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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


def _extract(sharded_state_dict: Any, *, kinds: tuple[type, ...]) -> tuple[Any, Any]:
    """The leaves of some kinds, and everything else, each in its containers."""
    return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))


_TENSORS = (ShardedTensor, ShardedTensorFactory)
extract_sharded_tensors = partial(_extract, kinds=(ShardedTensor,))
extract_sharded_tensors_and_factories = partial(_extract, kinds=_TENSORS)
extract_sharded_tensors_or_nonpersistent = partial(
    _extract, kinds=(*_TENSORS, LocalNonpersistentObject)
)
extract_sharded_base = partial(_extract, kinds=(ShardedBase,))
extract_nonpersistent = partial(_extract, kinds=(LocalNonpersistentObject,))


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
