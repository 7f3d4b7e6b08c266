"""Indices, flat ranges, overlaps and checks, as programs for Flex Checkpoint call them.

remesh itself uses none of these: saving, loading and resharding check what they are given.

A flat range of a tensor in row-major order is rarely a rectangle; it is a few boxes. The elements
of a range lie next to each other in any box that holds all of them, because what
row-major order of the box puts between two of them would lie between them in the tensor too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from remesh.core.geometry import Box, boxes_of_flat_range, uncovered
from remesh.errors import CoverageError, MismatchError, StateError

Overlap = tuple[bool, list[int] | None, list[int] | None, list[int] | None, list[int] | None]


def ravel_index(indices: Sequence[int], shape: Sequence[int]) -> int:
    """The flat number of an element in row-major order; ValueError if there is none."""
    return int(np.ravel_multi_index(tuple(indices), tuple(shape)))


def unravel_index(idx: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index in each axis of the element with a flat number; ValueError if there is none."""
    return tuple(int(index) for index in np.unravel_index(idx, tuple(shape)))


def minimal_nd_slice(
    shape: Sequence[int], flat_start: int, flat_end: int
) -> tuple[list[tuple[int, int]], tuple[int, ...], tuple[int, ...]]:
    """The smallest slice that holds a flat range, and the indices of its first and last element."""
    if flat_start >= flat_end:
        raise ValueError(f"the flat range [{flat_start}, {flat_end}) is empty")
    first, last = unravel_index(flat_start, shape), unravel_index(flat_end - 1, shape)
    boxes = boxes_of_flat_range(tuple(shape), flat_start, flat_end)
    slices = [
        (min(box.offset[axis] for box in boxes), max(box.end[axis] for box in boxes))
        for axis in range(len(shape))
    ]
    return slices, first, last


def flat_range_in_min_slice(
    shape: Sequence[int],
    min_slices: Sequence[tuple[int, int]],
    flat_start: int,
    flat_end: int,
) -> tuple[int, int]:
    """Where a flat range of a tensor lies in the flattened content of a slice of the tensor.

    Any slice that holds the whole range will do, not the smallest alone.
    """
    box = Box.from_slices(*min_slices)

    def place(flat: int) -> int:
        inside = [i - o for i, o in zip(unravel_index(flat, shape), box.offset, strict=True)]
        return ravel_index(inside, box.shape)

    start, end = place(flat_start), place(flat_end - 1) + 1
    if end - start != flat_end - flat_start:
        raise ValueError(f"the slice {box} does not hold all of [{flat_start}, {flat_end})")
    return start, end


def get_overlap_region(
    desc_offset: Sequence[int],
    desc_shape: Sequence[int],
    shard_offset: Sequence[int],
    shard_shape: Sequence[int],
) -> Overlap:
    """True if two boxes of a tensor overlap, and where.

    Then come offset and shape of what they have in common, and where that begins in the first and
    in the second box; these are None if they do not overlap.
    """
    desc = Box(tuple(desc_offset), tuple(desc_shape))
    shard = Box(tuple(shard_offset), tuple(shard_shape))
    common = desc.intersect(shard)
    if common is None:
        return False, None, None, None, None
    return (
        True,
        list(common.offset),
        list(common.shape),
        list(common.relative_to(desc).offset),
        list(common.relative_to(shard).offset),
    )


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


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


def check_src_state_dict_validity(state_dict_shard_info: ShardInfos) -> None:
    """Check the source of a reshard: its shards together are whole tensors."""
    for key, infos in _sound(state_dict_shard_info).items():
        shape = infos[0].global_shape
        whole, boxes = Box.whole(shape), set[Box]()
        for info in infos:
            if info.global_shape != shape:
                raise StateError(
                    f"{key}: shards disagree about the global shape, {shape} and "
                    f"{info.global_shape}"
                )
            boxes.update(_boxes_of(info))
        outside = [box for box in boxes if not whole.contains(box)]
        if outside:
            raise CoverageError(f"{key}: a shard holds {outside[0]} of shape {shape}")
        holes = uncovered(whole, sorted(boxes))
        if holes:
            raise CoverageError(
                f"{key}: no shard holds {', '.join(map(str, holes[:4]))} of shape {shape}"
            )


def check_dst_state_dict_validity(state_dict_shard_info: ShardInfos) -> None:
    """Check the target of a reshard: its shards lie inside their tensors."""
    for key, infos in _sound(state_dict_shard_info).items():
        for info in infos:
            bounds = zip(info.global_offset, info.local_shape, info.global_shape, strict=True)
            if not all(0 <= begin < begin + extent <= limit for begin, extent, limit in bounds):
                raise StateError(
                    f"{key}: a shard of shape {info.local_shape} at {info.global_offset} is empty "
                    f"or leaves the global shape {info.global_shape}"
                )


def check_src_dst_state_dict_validity(
    src_state_dict_shard_info: ShardInfos, dst_state_dict_shard_info: ShardInfos
) -> None:
    """Check that a source has what a target wants."""
    sources, targets = _sound(src_state_dict_shard_info), _sound(dst_state_dict_shard_info)
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        raise MismatchError(
            f"the source lacks {len(missing)} tensors of the target: {', '.join(missing[:10])}",
            missing=tuple(missing),
        )
    shapes = [(key, sources[key][0].global_shape, targets[key][0].global_shape) for key in targets]
    conflicts = [
        f"{key}: the source has shape {stored}, the target wants {wanted}"
        for key, stored, wanted in shapes
        if stored != wanted
    ]
    if conflicts:
        raise MismatchError("\n".join(conflicts[:10]), conflicts=tuple(conflicts))


def _sound(infos: ShardInfos) -> dict[str, list[ShardInfo]]:
    """The infos, once those of each tensor have one dtype and a sound form.

    Plain tuples of five are infos too, as programs for Flex Checkpoint make them.
    """
    found = {key: [ShardInfo(*info) for info in of_key] for key, of_key in infos.items()}
    for key, of_key in found.items():
        dtypes = sorted({info.dtype for info in of_key})
        if len(dtypes) > 1:
            raise StateError(f"{key}: shards differ in dtype: {', '.join(dtypes)}")
        for info in of_key:
            if not len(info.global_offset) == len(info.local_shape) == len(info.global_shape):
                raise StateError(
                    f"{key}: offset {info.global_offset}, local shape {info.local_shape} and "
                    f"global shape {info.global_shape} differ in their number of axes"
                )
            if info.is_flattened and info.flattened_range is None:
                raise StateError(f"{key}: a flattened shard without its range cannot be resharded")
    return found


def _boxes_of(info: ShardInfo) -> list[Box]:
    """The boxes of the global tensor that a shard holds."""
    if info.flattened_range is None:
        return [Box(info.global_offset, info.local_shape)]
    flat = boxes_of_flat_range(info.local_shape, *info.flattened_range)
    return [box.shift(info.global_offset) for box in flat]
