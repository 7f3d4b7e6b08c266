"""The shards of all ranks, checked, and those of one rank as the engine knows them.

Every rank tells for each of its weights where it lies (`ShardInfo`), and gets to know that of all
ranks. From this follow the checks of Flex Checkpoint.

A `ShardedWeight` says nothing of copies on other ranks, so the engine does not count
them, and compares samples of them. A shard that is not declared is found that way. A weight that is
all of its tensor is handed over as the bare tensor, for tied tensors to be recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch

from remesh.compat.flex_checkpoint.weights import ShardedWeight, merge_shard_info_list
from remesh.core.coverage import faulty_tensors
from remesh.core.geometry import Box, boxes_of_flat_range, uncovered
from remesh.core.sharded import ShardedTensor, dtype_name
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CoverageError, MismatchError, StateError
from remesh.exchange import Exchange, run_on_all


class ShardInfo(NamedTuple):
    """Where one weight lies."""

    global_offset: tuple[int, ...]  # see `ShardedWeight`
    local_shape: tuple[int, ...]  # see `ShardedWeight`
    dtype: str  # name of the element type
    global_shape: tuple[int, ...]  # see `ShardedWeight`
    is_flattened: bool  # see `ShardedWeight`
    flattened_range: tuple[int, int] | None = None
    """First and one past the last element of the range, or None."""


ShardInfos = Mapping[str, Sequence[ShardInfo]]
"""Where all weights of each tensor lie, on all ranks."""


# ---------------------------------------------------------------------------------------------
# Telling
# ---------------------------------------------------------------------------------------------


def gather_shard_infos(
    exchange: Exchange, weights: Mapping[str, ShardedWeight]
) -> dict[str, list[ShardInfo]]:
    """Where the weights of all ranks lie, by name and in rank order. Collective."""

    def tell() -> bytes:
        return msgspec.msgpack.encode({key: _checked_info(key, weights[key]) for key in weights})

    replies = run_on_all(exchange, tell)
    infos = [msgspec.msgpack.decode(reply, type=dict[str, ShardInfo]) for reply in replies]
    return merge_shard_info_list({key: [info] for key, info in own.items()} for own in infos)


def _checked_info(key: str, weight: object) -> ShardInfo:
    if not isinstance(weight, ShardedWeight):
        raise StateError(f"{key}: expected a ShardedWeight, got {type(weight).__qualname__}")
    if weight.key != key:
        raise StateError(
            f"{key}: the weight under this key calls itself {weight.key!r}; give it one name"
        )
    return ShardInfo(
        tuple(weight.global_offset),
        tuple(weight.local_shape),
        dtype_name(weight.local_tensor, weight.key),
        tuple(weight.global_shape),
        weight.is_flattened,
        weight.flat_bounds(),
    )


# ---------------------------------------------------------------------------------------------
# Checking
# ---------------------------------------------------------------------------------------------


def check_src_state_dict_validity(state_dict_shard_info: ShardInfos) -> None:
    """Check the source of a reshard: its shards together are whole tensors."""
    boxes: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, infos in _as_infos(state_dict_shard_info).items():
        _check_dtypes(key, infos)
        shape = shapes[key] = infos[0].global_shape
        for info in infos:
            _check_form(key, info)
            if info.global_shape != shape:
                raise StateError(
                    f"{key}: shards disagree about the global shape, {shape} and "
                    f"{info.global_shape}"
                )
        boxes[key] = {box for info in infos for box in _boxes_of(info) if box.size}
        outside = [box for box in boxes[key] if not Box.whole(shape).contains(box)]
        if outside:
            raise CoverageError(f"{key}: a shard holds {outside[0]} of shape {shape}")
    _check_cover(shapes, boxes)


def _check_cover(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, set[Box]]) -> None:
    """Check that boxes leave no hole in any tensor.

    Whether they overlap is not asked here; the engine refuses that by itself.
    """
    # The element type plays no part in this.
    tensors = TensorTable.of([(key, "uint8", shape) for key, shape in shapes.items()])
    rows = [(row, box) for row, key in enumerate(shapes) for box in boxes[key]]
    for row in faulty_tensors(BoxTable.of(tensors, rows)):
        key = tensors.names[row]
        holes = uncovered(Box.whole(shapes[key]), sorted(boxes[key]))
        if holes:
            listed = ", ".join(map(str, holes[:4]))
            raise CoverageError(f"{key}: no shard holds {listed} of shape {shapes[key]}")


def check_dst_state_dict_validity(state_dict_shard_info: ShardInfos) -> None:
    """Check the target of a reshard: its shards lie inside their tensors."""
    for key, infos in _as_infos(state_dict_shard_info).items():
        _check_dtypes(key, infos)
        for info in infos:
            _check_form(key, info)
            bounds = zip(info.global_offset, info.local_shape, info.global_shape, strict=True)
            for axis, (offset, extent, limit) in enumerate(bounds):
                if not 0 <= offset < limit:
                    raise StateError(
                        f"{key}: offset {offset} in axis {axis} is not in [0, {limit})"
                    )
                if extent <= 0:
                    raise StateError(f"{key}: extent {extent} in axis {axis} is not positive")
                if offset + extent > limit:
                    raise StateError(
                        f"{key}: offset {offset} and extent {extent} in axis {axis} exceed the "
                        f"global shape {info.global_shape}"
                    )


def check_src_dst_state_dict_validity(
    src_state_dict_shard_info: ShardInfos, dst_state_dict_shard_info: ShardInfos
) -> None:
    """Check that a source has what a target wants."""
    sources = _as_infos(src_state_dict_shard_info)
    targets = _as_infos(dst_state_dict_shard_info)
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        raise MismatchError(
            f"the source lacks {len(missing)} tensors of the target: {', '.join(missing[:10])}",
            missing=tuple(missing),
        )
    conflicts = [
        f"{key}: the source has shape {sources[key][0].global_shape}, the target wants "
        f"{infos[0].global_shape}"
        for key, infos in targets.items()
        if infos[0].global_shape != sources[key][0].global_shape
    ]
    if conflicts:
        raise MismatchError("\n".join(conflicts[:10]), conflicts=tuple(conflicts))


def _as_infos(infos: ShardInfos) -> dict[str, list[ShardInfo]]:
    """Plain tuples of five are infos too, as programs for Flex Checkpoint make them."""
    return {key: [ShardInfo(*info) for info in of_key] for key, of_key in infos.items()}


def _check_dtypes(key: str, infos: Sequence[ShardInfo]) -> None:
    dtypes = sorted({info.dtype for info in infos})
    if len(dtypes) > 1:
        raise StateError(f"{key}: shards differ in dtype: {', '.join(dtypes)}")


def _check_form(key: str, info: ShardInfo) -> None:
    if not len(info.global_offset) == len(info.local_shape) == len(info.global_shape):
        raise StateError(
            f"{key}: offset {info.global_offset}, local shape {info.local_shape} and global shape "
            f"{info.global_shape} differ in their number of axes"
        )
    if info.is_flattened and info.flattened_range is None:
        raise StateError(f"{key}: a flattened shard without its range cannot be resharded")


def _boxes_of(info: ShardInfo) -> list[Box]:
    """The boxes of the global tensor that a shard holds."""
    if info.flattened_range is None:
        return [Box(info.global_offset, info.local_shape)]
    flat = boxes_of_flat_range(info.local_shape, *info.flattened_range)
    return [box.shift(info.global_offset) for box in flat]


# ---------------------------------------------------------------------------------------------
# Handing over to the engine
# ---------------------------------------------------------------------------------------------


def engine_state(
    weights: Mapping[str, ShardedWeight], names: Mapping[str, str] | None = None
) -> dict[str, ShardedTensor | torch.Tensor]:
    """This rank's weights as a state; `names` has those that the checkpoint calls differently."""
    renamed = names or {}
    state = {}
    for key, weight in weights.items():
        name = renamed.get(key, key)
        state[name] = _as_engine_knows_it(weight, _checked_info(key, weight), name)
    return state


def _as_engine_knows_it(
    weight: ShardedWeight, info: ShardInfo, name: str
) -> ShardedTensor | torch.Tensor:
    tensor = weight.local_tensor
    if not info.is_flattened and info.local_shape == info.global_shape == tuple(tensor.shape):
        return tensor
    _check_form(weight.key, info)
    return replace(weight.to_remesh(), name=name)
