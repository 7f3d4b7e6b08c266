"""Applying a resolved transformation to arrays in memory.

numpy arrays and torch tensors are accepted, mixed if need be. numpy does what it can; torch, which
is imported only then, does the rest.

All results are made before the first is written, so that nothing is if one of them is wrong, and so
that a target may lie in the memory of a source.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from remesh.core.dtypes import BY_NAME
from remesh.core.sharded import dtype_name
from remesh.errors import TransformError
from remesh.transform.rearrange import Permute
from remesh.transform.resolve import Region, Resolved
from remesh.transform.tensor_info import TensorInfo

Array = Any


def describe(arrays: Mapping[str, Array]) -> dict[str, TensorInfo | None]:
    """Dtype and shape of arrays; None for a plain value, which has no shape."""
    return {
        name: TensorInfo(dtype_name(array, name), tuple(int(n) for n in array.shape))
        if hasattr(array, "shape") and hasattr(array, "dtype")
        else None
        for name, array in arrays.items()
    }


def apply(
    resolved: Resolved, tensors: Mapping[str, Array], targets: Mapping[str, Array] | None
) -> dict[str, Array]:
    """Fill targets, or make new arrays if there are none; see `Transform.apply`."""
    results = {
        name: _agreed_value(resolved, tensors, name)
        if info is None
        else _made(resolved, tensors, name, info)
        for name, info in resolved.targets.items()
        if name in resolved.plans
    }
    if targets is None:
        return results
    for name, info in resolved.targets.items():
        if info is not None and name in results:
            _copy(targets[name], results[name])
    return {
        name: targets[name] if info is not None or name not in results else results[name]
        for name, info in resolved.targets.items()
    }


def arranged(block: Array, region: Region) -> Array:
    """The elements of a region's source box in the shape of its target box."""
    for step in region.steps:
        if isinstance(step, Permute):
            block = block.permute(step.order) if _is_torch(block) else block.transpose(step.order)
        else:
            block = block.reshape(step.shape)
    return block


def _agreed_value(resolved: Resolved, tensors: Mapping[str, Array], name: str) -> Array:
    first, *others = resolved.sources_of(name)
    for other in others:
        if tensors[other] != tensors[first]:
            raise TransformError(
                f"{name}: must be what {first!r} and {other!r} hold\n"
                f"These are {tensors[first]!r} and {tensors[other]!r}"
            )
    return tensors[first]


def _made(resolved: Resolved, tensors: Mapping[str, Array], name: str, info: TensorInfo) -> Array:
    """A new array with what a target is made of, once what must agree does, bit by bit."""
    regions, checks = resolved.regions(name), resolved.checks(name)
    made = _empty(info, [tensors[source] for source in resolved.sources_of(name)])
    for region in regions:
        _copy(made[..., *region.target_box.slices], _block(region, tensors))
    for region in checks:
        expected = made[..., *region.target_box.slices]
        num_different = _num_different(expected, _block(region, tensors))
        if num_different:
            others = ", ".join(sorted({repr(r.source) for r in regions}))
            raise TransformError(
                f"{name}: {region.source!r} must hold the same values as {others}\n"
                f"{num_different} of {region.target_box.size} elements differ (in {region.source} "
                f"{region.source_box}). To prefer one of them, name only that one, and delete the "
                "other with '-> _'"
            )
    return made


def _block(region: Region, tensors: Mapping[str, Array]) -> Array:
    """The elements of a region in the shape and element type that they have in the target."""
    block = arranged(tensors[region.source][..., *region.source_box.slices], region)
    for dtype in region.dtypes:
        if _is_torch(block) or not BY_NAME[dtype].is_native:
            block = _as_torch(block).to(getattr(_torch(), dtype))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                block = block.astype(dtype)
    return block


def _num_different(one: Array, other: Array) -> int:
    one, other = (np.ascontiguousarray(_as_numpy(array)).reshape(-1) for array in (one, other))
    width = one.dtype.itemsize
    a, b = (array.view(np.uint8).reshape(-1, width) for array in (one, other))
    return int((a != b).any(axis=1).sum())


# ---------------------------------------------------------------------------------------------
# Arrays of either kind
# ---------------------------------------------------------------------------------------------


def _is_torch(array: Array) -> bool:
    # A program that has a torch tensor has imported torch; others need not.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch() -> Any:
    return importlib.import_module("torch")


def _empty(info: TensorInfo, sources: list[Array]) -> Array:
    """A new array: numpy's if the sources are and numpy knows the dtype, else torch's."""
    if not any(map(_is_torch, sources)) and BY_NAME[info.dtype].is_native:
        return np.empty(info.shape, dtype=info.dtype)
    device = next((source.device for source in sources if _is_torch(source)), None)
    torch = _torch()
    return torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)


def _copy(place: Array, block: Array) -> None:
    if _is_torch(place):
        with _torch().no_grad():
            place.copy_(_as_torch(block))
    else:
        place[...] = _as_numpy(block)


def _as_torch(array: Array) -> Array:
    if _is_torch(array):
        return array
    array = np.asarray(array)
    # torch shares memory with arrays that it may write to and whose strides are positive.
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return _torch().from_numpy(array)


def _as_numpy(array: Array) -> np.ndarray[Any, Any]:
    """An array as numpy sees it, as integers where numpy has no such element type."""
    if not _is_torch(array):
        return np.asarray(array)
    torch = _torch()
    array = array.detach().cpu().contiguous()
    if not BY_NAME[dtype_name(array, "array")].is_native:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        array = array.view(integers[array.element_size()])
    bits: np.ndarray[Any, Any] = array.numpy()
    return bits
