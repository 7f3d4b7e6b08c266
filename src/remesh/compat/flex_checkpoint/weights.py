"""`ShardedWeight` and the functions that make, describe and copy them.

A `ShardedWeight` is one box of a named global tensor, as the engine's `ShardedTensor` is, but it
says less: nothing of other ranks that hold the same box. So it becomes a `ShardedTensor` only when
all ranks have told what they hold (`remesh.compat.flex_checkpoint.shards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from remesh.checkpoint.local import exchange_of
from remesh.core.geometry import Box
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.core.sharded import parts_at
from remesh.errors import MismatchError, StateError

V = TypeVar("V")


# Neither frozen nor slotted: programs written for Flex Checkpoint rename weights by assigning to
# `key` (pipeline stages) and hang attributes of their own on them (expert numbers).
@dataclass(eq=False, repr=False)
class ShardedWeight:
    """One rank's box of a named global tensor."""

    key: str  # name of the global tensor, the same on every rank that holds a part of it
    local_tensor: torch.Tensor
    """The elements: a tensor of shape `local_shape`, or, if flattened, one dim with the elements of
    `flattened_range`."""
    local_shape: tuple[int, ...]  # shape of the box
    global_shape: tuple[int, ...]  # shape of the global tensor
    global_offset: tuple[int, ...]  # offset of the box in the global tensor, in elements
    is_flattened: bool = False
    """Whether the rank holds only a range of the flattened box, as optimizers do that cut flattened
    tensors (sharding V2)."""
    flattened_range: slice | None = None  # that range, in elements of the flattened box

    def __str__(self) -> str:
        tensor = f"{type(self.local_tensor).__name__}(shape={list(self.local_tensor.shape)})"
        names = ("local_shape", "global_shape", "global_offset", "flattened_range")
        rest = [f"{name}={getattr(self, name)}" for name in names]
        lines = (f"key={self.key}", f"local_tensor={tensor}", *rest)
        return "ShardedWeight(\n  " + ",\n  ".join(lines) + "\n)"

    __repr__ = __str__

    def flat_bounds(self) -> tuple[int, int] | None:
        """First and one past the last element of the range; None if it is not flattened."""
        if not self.is_flattened:
            return None
        size = Box.whole(tuple(self.local_shape)).size
        if self.flattened_range is None:
            raise StateError(f"{self.key}: a flattened weight needs its flattened_range")
        start, stop, step = self.flattened_range.indices(size)
        if step != 1 or tuple(self.local_tensor.shape) != (max(stop - start, 0),):
            raise StateError(
                f"{self.key}: the range {self.flattened_range} of a box of {size} elements "
                f"does not fit a tensor of shape {tuple(self.local_tensor.shape)}"
            )
        return start, max(start, stop)

    def to_remesh(self) -> EngineTensor:
        """The engine's description of the memory, whose copies are compared and not counted."""
        offset, shape = tuple(self.global_offset), tuple(self.local_shape)
        whole = tuple(self.global_shape)
        if not len(offset) == len(shape) == len(whole) or min(offset, default=0) < 0:
            raise StateError(
                f"{self.key}: offset {offset}, local shape {shape} and global shape {whole} do not "
                "fit together"
            )
        parts = parts_at(offset, shape, self.local_tensor, self.flat_bounds())
        return EngineTensor(self.key, whole, parts, replica_id=None)


ShardedTensor = ShardedWeight
"""The older name of `ShardedWeight`."""


@dataclass(frozen=True, slots=True)
class ShardedWeightDesc:
    """A `ShardedWeight` without its elements."""

    key: str  # see `ShardedWeight`
    local_shape: tuple[int, ...]  # see `ShardedWeight`
    global_shape: tuple[int, ...]  # see `ShardedWeight`
    global_offset: tuple[int, ...]  # see `ShardedWeight`


def shard_weight(key: str, weight: torch.Tensor, axis: int, group: Any = None) -> ShardedWeight:
    """Describe this rank's shard of a tensor that a group of ranks cuts evenly along an axis.

    `group` is a torch process group or an `Exchange`; by default torch's default group.
    """
    if not 0 <= axis < weight.ndim:
        raise ValueError(
            f"{key}: there is no axis {axis} in a tensor of shape {tuple(weight.shape)}"
        )
    exchange = exchange_of(group)
    local_shape = tuple(weight.shape)
    global_shape, offset = list(local_shape), [0] * weight.ndim
    global_shape[axis] *= exchange.world_size
    offset[axis] = exchange.rank * local_shape[axis]
    return ShardedWeight(key, weight, local_shape, tuple(global_shape), tuple(offset))


def make_tp_sharded_weight_for_checkpoint(
    key: str, tensor: torch.Tensor, tensor_parallel_axis: int, group: Any = None
) -> ShardedWeight:
    """Describe this rank's shard of a tensor-parallel parameter."""
    return shard_weight(key, tensor, tensor_parallel_axis, group)


def make_replicated_sharded_weight(key: str, tensor: torch.Tensor) -> ShardedWeight:
    """Describe a tensor that is the same on every rank that has it."""
    shape = tuple(tensor.shape)
    return ShardedWeight(key, tensor, shape, shape, (0,) * len(shape))


make_tp_sharded_tensor_for_checkpoint = make_tp_sharded_weight_for_checkpoint
"""The older name of `make_tp_sharded_weight_for_checkpoint`."""

make_replicated_sharded_tensor = make_replicated_sharded_weight
"""The older name of `make_replicated_sharded_weight`."""


def build_sharded_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    shard_rules: Mapping[str, int] | None = None,
    prefix: str = "",
    *,
    group: Any = None,
) -> dict[str, ShardedWeight]:
    """Describe the tensors of one layer's state dict.

    Tensors without a rule are described as replicated. Whether they really are is checked when
    they are saved or resharded: ranks that hold different elements under one name are an error.
    Rules for tensors that the layer does not have (a bias, say) are no error.
    """
    rules = shard_rules or {}
    weights = {}
    for name, tensor in state_dict.items():
        key = f"{prefix}{name}"
        if name in rules:
            weights[key] = make_tp_sharded_weight_for_checkpoint(key, tensor, rules[name], group)
        else:
            weights[key] = make_replicated_sharded_weight(key, tensor)
    return weights


def is_sharded_state_dict(o: object) -> bool:
    """True for a dict of `ShardedWeight`s; an empty one is not, a mixed one is an error."""
    if not isinstance(o, dict):
        return False
    others = [key for key, value in o.items() if not isinstance(value, ShardedWeight)]
    if others and len(others) < len(o):
        raise TypeError(
            "a state dict holds either ShardedWeights only or none; not one of them are "
            f"{', '.join(map(repr, others[:10]))}"
        )
    return bool(o) and not others


def build_shard_desc(val: ShardedWeight) -> ShardedWeightDesc:
    """A weight without its elements."""
    return ShardedWeightDesc(
        val.key, tuple(val.local_shape), tuple(val.global_shape), tuple(val.global_offset)
    )


def merge_shard_info_list(
    list_of_dicts: Iterable[Mapping[str, Iterable[V]]],
) -> dict[str, list[V]]:
    """Lists by name, each the lists of that name of several dicts, one after the other."""
    merged: dict[str, list[V]] = {}
    for infos in list_of_dicts:
        for key, values in infos.items():
            merged.setdefault(key, []).extend(values)
    return merged


def assign_sharded_slice(
    src_desc: ShardedWeightDesc,
    src_shard: ShardedWeight,
    dst_desc: ShardedWeightDesc,
    dst_shard: ShardedWeight,
) -> None:
    """Copy from one shard into another what two descriptions say.

    The descriptions name a region each, in the coordinates of the tensors that the shards are of;
    the two regions correspond to each other. What the source shard holds of the source region
    goes to where the target shard holds the target region.
    """
    source, target = _part_of(src_desc, src_shard), _part_of(dst_desc, dst_shard)
    where = f"{src_shard.key} -> {dst_shard.key}"
    if source.shape != target.shape:
        raise StateError(
            f"{where}: the source shard holds {list(source.shape)} elements of its region, the "
            f"target shard {list(target.shape)} of its own"
        )
    if source.dtype != target.dtype:
        raise MismatchError(f"{where}: {source.dtype} does not fit into {target.dtype}")
    with torch.no_grad():
        target.copy_(source)


def _part_of(desc: ShardedWeightDesc, shard: ShardedWeight) -> torch.Tensor:
    """The view of a shard that lies in a region."""
    if shard.is_flattened:
        raise StateError(
            f"{shard.key}: a flattened shard has no slices; use reshard_sharded_state_dict"
        )
    held = Box(tuple(shard.global_offset), tuple(shard.local_shape))
    common = held.intersect(Box(tuple(desc.global_offset), tuple(desc.local_shape)))
    if common is None:
        raise StateError(
            f"{shard.key}: the shard at {held.offset} of shape {held.shape} holds nothing of the "
            f"region at {desc.global_offset} of shape {desc.local_shape}"
        )
    return shard.local_tensor[common.relative_to(held).slices]
