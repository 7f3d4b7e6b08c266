"""Tensor leaves: the one place where a plain tensor and a DTensor part ways."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from remesh.adapters.dtensor import add_dtensor
from remesh.adapters.memory import alias_key, check_strided
from remesh.state import (
    Path,
    Rebuild,
    Role,
    Walk,
    name_of,
)


def describe_tensor(
    walk: Walk, path: Path, tensor: torch.Tensor, role: Role = Role.ASSUMED
) -> Rebuild:
    """Describe a tensor that is filled in place.

    Args:
        walk: The walk.
        path: Path of the tensor.
        tensor: A plain tensor, a parameter, or a DTensor.
        role: What is known of a plain tensor's copies on other ranks. The copies of a DTensor are
            declared equal by its placements.

    Raises:
        StateError: If the tensor is of a kind that cannot be stored.
    """
    if isinstance(tensor, DTensor):
        add_dtensor(walk, path, tensor)
    else:
        check_strided(tensor, name_of(path))
        walk.add_array(path, tensor.detach(), role, alias_key=alias_key(tensor))
    return lambda _loaded: tensor
