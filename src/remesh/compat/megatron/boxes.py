"""What all ranks hold as the planner takes it, special forms of the engine, and what is stored.

The classes of `mapping` themselves say which boxes they are and what they are to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from remesh.checkpoint.stored import StoredState
from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.mapping import ShardedObject, ShardedTensor, is_main_replica
from remesh.core.geometry import Box
from remesh.core.sharded import Part
from remesh.core.sharded import ShardedObject as EngineObject
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.core.state import Role
from remesh.core.tables import BoxTable, TensorTable
from remesh.formats.torch_dcp import COMMON_NAME
from remesh.planner import LocalBoxes

COMMON_KEY = "common_state"
"""Name of the object that holds the common state in a native checkpoint."""


def is_grid_of_ranges(tensor: ShardedTensor) -> bool:
    """True if a shard is a flattened range of a part of a regular grid."""
    return tensor.flattened_range is not None and tensor.axis_fragmentations is not None


def engine_range(tensor: ShardedTensor) -> EngineTensor:
    """A flattened range as Megatron stores it: the number of its part, and its place in that part.

    The stored tensor has the shape of the grid and, as one more dim, the size of a part.
    """
    assert tensor.data is not None
    assert tensor.flattened_range is not None
    assert tensor.axis_fragmentations is not None
    grid, size = tuple(tensor.axis_fragmentations), math.prod(tensor.local_shape)
    start, stop, _ = tensor.flattened_range.indices(size)
    box = Box((*tensor.local_chunk_offset_in_global(), start), (1,) * len(grid) + (stop - start,))
    part = Part(box, tensor.data.detach().view(box.shape))
    return EngineTensor(tensor.key, (*grid, size), (part,), tensor.replica_id)


def engine_object(item: ShardedObject) -> EngineObject:
    """A sharded object as the engine's."""
    return EngineObject(
        item.key,
        item.data,
        tuple(item.global_shape),
        tuple(item.global_offset),
        item.replica_id,
    )


def local_boxes_of(tensors: Sequence[ShardedTensor]) -> LocalBoxes:
    """What a rank holds, for the planner; data is not looked at."""
    rows: dict[str, int] = {}
    table: list[tuple[str, str, Sequence[int]]] = []
    boxes: list[tuple[int, Box]] = []
    roles: list[int] = []
    for tensor in tensors:
        row = rows.setdefault(tensor.key, len(rows))
        what = (tensor.key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.global_shape))
        if row == len(table):
            table.append(what)
        elif table[row] != what:
            raise CheckpointingException(
                f"{tensor.key}: one rank describes it as {table[row][1:]} and as {what[1:]}\nDtype "
                "and global shape of a key must be the same everywhere"
            )
        role = Role.MAIN if is_main_replica(tensor.replica_id) else Role.REPLICA
        for box in tensor.boxes():
            if not Box.whole(what[2]).contains(box):
                raise CheckpointingException(f"{tensor.key}: {box} leaves the global tensor {what}")
            boxes.append((row, box))
            roles.append(int(role))
    return LocalBoxes.of(BoxTable.of(TensorTable.of(table), boxes), np.array(roles, dtype=np.int64))


def tensors_metadata(stored: StoredState) -> dict[str, ShardedTensor]:
    """The stored tensors by key, each as one shard that is all of it, without data.

    Tensors in the common state are left out. The engine finds them at a place in a nested state, or
    in `common.pt`, where sharded ones never are.
    """
    found = {}
    for name in stored.index:
        tensor = stored.index[name]
        files = {piece.path for piece in stored.index.pieces(name)}
        if stored.document.path_of(name) != (name,) or COMMON_NAME in files:
            continue
        shape = tuple(tensor.shape)
        dtype = getattr(torch, tensor.dtype)
        ones, zeros = (1,) * len(shape), (0,) * len(shape)
        found[name] = ShardedTensor(name, None, dtype, shape, shape, zeros, ones)
    return found


def objects_metadata(stored: StoredState) -> dict[str, ShardedObject]:
    """The stored objects by unique key, without data."""
    return {
        unique: ShardedObject(element.name, None, tuple(element.shape), tuple(element.offset))
        for unique, element in stored.document.objects.items()
        if element.name != COMMON_KEY
    }
