"""Tensor leaves: plain tensors, DTensors, and tensors that are made of others.

A DTensor whose local tensor is made of others stores each of these as the shards of a tensor:

* Inner tensors that have the shape of the local tensor, all of them, are placed like the DTensor.
* Codes and scales of block-quantised optimizer state follow each other in row-major order. If each
  rank holds a run of whole blocks, as with `Shard(0)`, they are runs of two longer tensors.
* All others belong to their shard, and fit no other layout. They are stored side by side, as one
  tensor with a first dim for the shards; the record of the tensor then has the layout, which must
  be the same when it is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from remesh.adapters.dtensor import (
    add_dtensor,
    boxes_of_dtensor,
    dtensor_key,
    local_tensor,
    note_mesh,
    parts_of_dtensor,
    shard_of_dtensor,
)
from remesh.adapters.memory import alias_key, check_strided
from remesh.adapters.tensor_subclass import (
    forget_scale,
    inner_tensors,
    is_block_state,
    is_made_of_tensors,
    record_of,
    unwrapped,
)
from remesh.core.geometry import Box, flat_span
from remesh.core.sharded import Part, parts_at
from remesh.core.state import (
    TENSOR_RECORD,
    Loaded,
    Path,
    Rebuild,
    Role,
    Walk,
    name_of,
)
from remesh.errors import UnsupportedValueError


def describe_tensor(
    walk: Walk, path: Path, tensor: torch.Tensor, role: Role = Role.ASSUMED
) -> Rebuild:
    """Describe a tensor that is filled in place.

    `role` is of a plain tensor; the copies of a DTensor are declared equal by its placements.
    """
    elements = unwrapped(tensor)
    if isinstance(elements, DTensor):
        local = local_tensor(elements)
        note_mesh(walk, elements)
        if is_made_of_tensors(local):
            _add_shards(walk, path, elements, local)
        else:
            add_dtensor(walk, path, elements, local)
    elif is_made_of_tensors(elements):
        walk.add_fixed(
            (*path, TENSOR_RECORD), record_of(elements, tuple(elements.shape), name_of(path))
        )
        for name, inner in inner_tensors(elements, name_of(path)).items():
            describe_tensor(walk, (*path, name), inner, role)
    else:
        check_strided(elements, name_of(path))
        walk.add_array(path, elements.detach(), role, alias_key=alias_key(elements))

    def rebuild(_loaded: Loaded) -> torch.Tensor:
        forget_scale(tensor)
        return tensor

    return rebuild


def amend(walk: Walk, first: int, **changes: Any) -> None:
    """Change what is said of the tensors that were described since the first one."""
    tensors = walk.description.tensors
    tensors[first:] = [dataclasses.replace(entry, **changes) for entry in tensors[first:]]


def is_in_parts(tensor: torch.Tensor) -> bool:
    """True if a tensor is stored as its inner tensors, on this rank."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    return is_made_of_tensors(unwrapped(local))


def _add_shards(walk: Walk, path: Path, tensor: DTensor, local: torch.Tensor) -> None:
    """Record a DTensor whose local tensor is made of others."""
    where = name_of(path)
    inner = inner_tensors(local, where)
    for one in inner.values():
        check_strided(one, where)
    boxes = boxes_of_dtensor(tensor, tuple(local.shape), where)
    if not boxes:
        return
    record = record_of(local, tuple(tensor.shape), where)
    if is_block_state(local) and (flat := _flat_parts(tensor, local, inner, boxes)) is not None:
        parts = flat
    elif all(one.shape == local.shape for one in inner.values()):
        parts = {
            name: (tuple(tensor.shape), parts_of_dtensor(tensor, one, where))
            for name, one in inner.items()
        }
    else:
        shard = shard_of_dtensor(tensor, where)
        if shard is None:
            raise UnsupportedValueError(
                f"{where}: the inner tensors ({', '.join(inner)}) of its {type(local).__name__} "
                "cannot be resharded\n"
                f"With placements {tensor.placements} its shards have different shapes, since "
                f"shape {tuple(tensor.shape)} does not divide evenly"
            )
        number, count, record["layout"] = shard
        parts = {
            name: (
                (count, *one.shape),
                parts_at((number, *[0] * one.ndim), (1, *one.shape), one.unsqueeze(0)),
            )
            for name, one in inner.items()
        }
    walk.add_fixed((*path, TENSOR_RECORD), record)
    for name, (shape, own) in parts.items():
        one = inner[name]
        key = dtensor_key(tensor, one)
        walk.add_tensor((*path, name), shape, own, one, Role.EQUAL, key)


def _flat_parts(
    tensor: DTensor,
    local: torch.Tensor,
    inner: Mapping[str, torch.Tensor],
    boxes: list[tuple[Box, tuple[int, ...]]],
) -> dict[str, tuple[tuple[int, ...], tuple[Part, ...]]] | None:
    """Shape and parts of the inner tensors of block-quantised state."""
    block: int = local.block_size  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    if len(boxes) != 1:
        return None
    start, stop, is_run = flat_span(shape, boxes[0][0])
    if not is_run or start % block or stop % block or tensor.numel() % block:
        return None
    found: dict[str, tuple[tuple[int, ...], tuple[Part, ...]]] = {}
    for name, one in inner.items():
        if name == "qmap":  # the values of the codes, the same for all blocks
            found[name] = (tuple(one.shape), (Part(Box.whole(tuple(one.shape)), one),))
        elif one.shape == local.shape:
            found[name] = (shape, (Part(boxes[0][0], one),))
        else:
            each = local.numel() // one.numel()
            box = Box((start // each,), tuple(one.shape))
            found[name] = ((tensor.numel() // each,), (Part(box, one),))
    return found
