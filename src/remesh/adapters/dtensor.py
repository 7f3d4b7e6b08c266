"""The boxes of a DTensor that a rank holds.

A DTensor has one placement for each axis of its mesh. What they mean for a rank is worked out
here from integers alone (`local_segments`), so that any mesh can be tested without processes, and
without communication.

Take one dim of the tensor. To begin with a rank holds all of it: one segment. Every mesh axis that
shards the dim cuts what is left as `torch.chunk` does: all parts have the size of the first, which
is rounded up, and the last ones may be short or empty. What remains are the segments of the rank,
in the order in which its local tensor holds them; the boxes are the products of the segments of
all dims.

The order in which the axes cut matters as soon as a dim does not divide evenly. Plain sharding
cuts from the first mesh axis to the last. A *strided* shard says how many shards there were
already when its turn came (`split_factor`): FSDP2 over tensor parallelism cuts the shard that
tensor parallelism left, although its mesh axis comes first. So a strided shard takes its turn
right after those axes to its right whose sizes multiply to its split factor. If there are none,
the split factor is not about other axes: the dim consists of `split_factor` blocks that have been
packed into one tensor (a fused gate and up projection), and the axis cuts each of them. The rank
then holds one segment of every block. FSDP2 over such an axis counts its shards, too; a call of
`distribute_tensor` with the same placements, which are private to torch, would cut blocks twice.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from remesh.adapters.memory import alias_key, check_strided
from remesh.adapters.tensor_subclass import unwrapped
from remesh.core.geometry import Box
from remesh.core.sharded import Part
from remesh.core.state import TENSOR_RECORD, Path, Role, Walk, name_of
from remesh.errors import StateError

Segment = tuple[int, int]
"""First index and length of a run of indices of one dim."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """The ranks along a mesh axis share a dim, of which there are `split_factor` shards already."""

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        """As layouts are stored."""
        if self.split_factor == 1:
            return f"Sharded(dim={self.dim})"
        return f"StridedSharded(dim={self.dim}, split_factor={self.split_factor})"


AxisPlacement = Sharded | None
"""What a mesh axis does with a tensor; None if all of its ranks hold the same."""


def boxes_of_segments(segments: Sequence[Sequence[Segment]]) -> list[tuple[Box, tuple[int, ...]]]:
    """The boxes that the segments of all dims make, each with its offset in the local tensor."""
    boxes = []
    for of_box in itertools.product(*map(_with_local_offsets, segments)):
        box = Box(tuple(start for start, _, _ in of_box), tuple(n for _, n, _ in of_box))
        boxes.append((box, tuple(local for _, _, local in of_box)))
    return boxes


# A model has many tensors of few shapes and placements, each with optimizer states of the same.
@functools.lru_cache(maxsize=4096)
def local_segments(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[AxisPlacement, ...],
) -> Sequence[Sequence[Segment]]:
    """The segments of each dim that a rank holds, in the order of its local tensor.

    `coordinate` is the rank's place on each mesh axis. A dim of which the rank holds nothing has no
    segments.
    """
    result = []
    for dim, extent in enumerate(global_shape):
        segments = [(0, extent)] if extent else []
        for axis, num_blocks in _turns(dim, mesh_shape, placements):
            cut = [
                piece
                for block in range(num_blocks)
                for piece in _chunk(
                    _chunk(segments, num_blocks, block), mesh_shape[axis], coordinate[axis]
                )
            ]
            segments = _merge(cut)
        result.append(segments)
    return result


def _turns(
    dim: int, mesh_shape: Sequence[int], placements: Sequence[AxisPlacement]
) -> list[tuple[int, int]]:
    """The mesh axes that shard a dim, in the order in which they do."""
    turns: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement is None or placement.dim != dim:
            continue
        split_factor = placement.split_factor
        position, num_shards = 0, 1
        while num_shards < split_factor and position < len(turns):
            num_shards *= mesh_shape[turns[position][0]]
            position += 1
        if num_shards == split_factor:
            turns.insert(position, (axis, 1))
        else:
            turns.insert(0, (axis, split_factor))
    return turns


def _chunk(segments: Sequence[Segment], num_chunks: int, index: int) -> list[Segment]:
    """The chunk `index` of `torch.chunk` of the concatenated segments; empty past the last."""
    total = sum(n for _, n in segments)
    size = -(-total // num_chunks)
    first, last = index * size, (index + 1) * size
    result, done = [], 0
    for start, n in segments:
        low, high = max(first - done, 0), min(last - done, n)
        if low < high:
            result.append((start + low, high - low))
        done += n
    return result


def _merge(segments: Sequence[Segment]) -> list[Segment]:
    """The same indices with neighbours joined."""
    merged: list[Segment] = []
    for start, n in segments:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((start, n))
    return merged


def _with_local_offsets(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Start, length and place in the local tensor of each segment."""
    ends = itertools.accumulate(n for _, n in segments)
    return [(start, n, end - n) for (start, n), end in zip(segments, ends, strict=True)]


# ---------------------------------------------------------------------------------------------
# torch
# ---------------------------------------------------------------------------------------------


def add_dtensor(walk: Walk, path: Path, tensor: DTensor, local: torch.Tensor) -> None:
    """Record a DTensor leaf: this rank's boxes of it, as views of its local tensor."""
    where = name_of(path)
    check_strided(local, where)
    parts = parts_of_dtensor(tensor, local, where)
    if not parts and walk.stored is not None and walk.stored.has_value(f"{where}.{TENSOR_RECORD}"):
        # An empty shard of what is quantised on the ranks that hold elements of it.
        return
    walk.add_tensor(path, tuple(tensor.shape), parts, local, Role.EQUAL, dtensor_key(tensor, local))


def note_mesh(walk: Walk, tensor: DTensor) -> None:
    """Record that this rank is in the mesh of a DTensor, if it is."""
    mesh, known = tensor.device_mesh, walk.description.meshes
    if id(mesh) not in known and mesh.get_coordinate() is not None:
        known[id(mesh)] = int(mesh.mesh.min())


def dtensor_key(tensor: DTensor, local: torch.Tensor) -> object:
    """The alias key of a DTensor by its memory on this rank."""
    key = alias_key(local)
    return None if key is None else ("DTensor", key, tuple(tensor.shape), str(tensor.placements))


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, detached and without a float8 wrapper; the same memory."""
    with torch.no_grad():
        return unwrapped(tensor.to_local().detach())


def parts_of_dtensor(tensor: DTensor, local: torch.Tensor, where: str) -> tuple[Part, ...]:
    """This rank's boxes of a DTensor; none on a rank outside its mesh."""
    return tuple(
        Part(box, local[Box(offset, box.shape).slices])
        for box, offset in boxes_of_dtensor(tensor, tuple(local.shape), where)
    )


def boxes_of_dtensor(
    tensor: DTensor, local_shape: tuple[int, ...], where: str
) -> list[tuple[Box, tuple[int, ...]]]:
    """This rank's boxes of a DTensor, each with its offset in the local tensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(tensor.shape)
    placements = tuple(_axis_placement(tensor, one, where) for one in tensor.placements)
    segments = local_segments(shape, tuple(mesh.shape), tuple(coordinate), placements)
    expected = tuple(sum(n for _, n in of_dim) for of_dim in segments)
    if expected != local_shape and math.prod(expected) + math.prod(local_shape) > 0:
        raise StateError(
            f"{where}: a DTensor of shape {shape} with placements {tensor.placements} has a "
            "part of a wrong shape\n"
            f"On a mesh of shape {tuple(mesh.shape)}\n"
            f"It should hold a local tensor of shape {expected} at mesh coordinate "
            f"{tuple(coordinate)}, but holds one of shape {local_shape}. Was it made by "
            "DTensor.from_local with uneven shards? Redistribute it to Shard or Replicate "
            "placements before saving or loading."
        )
    return boxes_of_segments(segments)


def shard_of_dtensor(tensor: DTensor, where: str) -> tuple[int, int, list[object]] | None:
    """This rank's shard of a DTensor on whose mesh it is, among shards of one shape.

    Its number, how many there are, and what each mesh axis that shards does, with its size; None if
    the shapes of shards differ.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placements = [_axis_placement(tensor, placement, where) for placement in tensor.placements]
    for dim, extent in enumerate(tensor.shape):
        turns = _turns(dim, mesh.shape, placements)
        if extent % math.prod(mesh.shape[axis] * num_blocks for axis, num_blocks in turns):
            return None
    number, count, layout = 0, 1, list[object]()
    for axis, placement in enumerate(placements):
        if placement is not None:
            number = number * mesh.shape[axis] + coordinate[axis]
            count *= mesh.shape[axis]
            layout.append([str(placement), mesh.shape[axis]])
    return number, count, layout


def _axis_placement(tensor: DTensor, placement: Placement, where: str) -> AxisPlacement:
    if isinstance(placement, _StridedShard):
        return Sharded(placement.dim % tensor.ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Sharded(placement.dim % tensor.ndim)
    if isinstance(placement, Replicate):
        return None
    pending = "sums that are still pending" if placement.is_partial() else "an unknown placement"
    raise StateError(
        f"{where}: a DTensor with {pending}\nIt has placements {tensor.placements}; call "
        "redistribute(placements=[...]) with Shard or Replicate placements on it first"
    )
