"""Which part of which global tensor a tensor of a module is.

A whole tensor or a DTensor says so itself. Everything else has a `ShardedTensor` of views of it:
declared by its module, or worked out for the flat parameters of FSDP1. Optimizer state is named
and cut by the `Placed` of its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remesh.adapters.declared import local_of
from remesh.adapters.memory import alias_key, check_strided
from remesh.core.sharded import ArrayLike, Part, ShardedTensor, dtype_name
from remesh.core.state import Path, Role, TensorEntry, Walk, name_of


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The global tensor that a parameter is, or is a part of."""

    name: str
    role: Role  # what is known of copies on other ranks of plain tensors
    shards: ShardedTensor | None = None
    """Which boxes the parameter holds, as views of it; None if it is a whole tensor or a DTensor,
    which speak for themselves."""
    full_name: str | None = None
    """Name of the parameter in the state, which begins with the path of its module; None if it is
    in no module."""


def add_shards(
    walk: Walk, path: Path, tensor: torch.Tensor, place: Placed, parts: tuple[Part, ...]
) -> None:
    """Record a tensor of which this rank holds declared boxes."""
    assert place.shards is not None
    check_strided(local_of(tensor), name_of(path))
    shape = place.shards.global_shape
    views = [(part.box, _alias_key(part.data)) for part in parts]
    key = ("shards", shape, *views) if views and views[0][1] is not None else None
    name = walk.claim(path)
    dtype = dtype_name(local_of(tensor), name)
    resize = "zeros" if place.shards.allow_shape_mismatch else None
    walk.description.tensors.append(
        TensorEntry(name, dtype, shape, parts, place.role, resize, alias_key=key)
    )


def _alias_key(data: ArrayLike) -> object:
    return alias_key(data) if isinstance(data, torch.Tensor) else None
