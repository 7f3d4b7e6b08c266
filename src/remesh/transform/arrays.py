"""Applying a resolved transformation to arrays in memory.

numpy arrays and torch tensors are accepted, mixed if need be. Where both sides of a copy are numpy
arrays, numpy does it; else torch, which is imported only then.

All checks come before the first element is written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from remesh.core.dtypes import BY_NAME
from remesh.core.sharded import dtype_name
from remesh.core.strided import Layout, shared_pairs
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
    results: dict[str, Array] = {}
    for name, info in resolved.targets.items():
        if info is None:
            results[name] = _agreed_value(resolved, tensors, targets, name)
        elif targets is not None:
            results[name] = targets[name]
        else:
            results[name] = _empty(info, [tensors[s] for s in resolved.sources_of(name)])
    tensors = _apart_from(tensors, results.values() if targets is not None else ())
    for name, info in resolved.targets.items():
        if info is not None:
            _check(resolved, tensors, name)
    for name, info in resolved.targets.items():
        if info is not None:
            for region in resolved.regions(name):
                fill(results[name], region, tensors[region.source])
    return results


def fill(target: Array, region: Region, source: Array) -> None:
    """Copy what a region says from a whole source array into a whole target array."""
    block = arranged(source[region.source_box.slices], region)
    place = target[region.target_box.slices] if region.target_box.ndim else target
    if _is_torch(target) or _is_torch(block):
        _fill_with_torch(place, block, region.dtypes)
        return
    for dtype in region.dtypes:
        block = _numpy_converted(block, dtype, region)
    place[...] = block


def arranged(block: Array, region: Region) -> Array:
    """The elements of a region's source box in the shape of its target box."""
    for step in region.steps:
        if isinstance(step, Permute):
            block = block.permute(step.order) if _is_torch(block) else block.transpose(step.order)
        else:
            block = block.reshape(step.shape)
    return block


# ---------------------------------------------------------------------------------------------
# Checks of equal values
# ---------------------------------------------------------------------------------------------


def _agreed_value(
    resolved: Resolved, tensors: Mapping[str, Array], targets: Mapping[str, Array] | None, name: str
) -> Array:
    sources = resolved.sources_of(name)
    if not sources:
        return None if targets is None else targets[name]
    first = tensors[sources[0]]
    for other in sources[1:]:
        if tensors[other] != first:
            raise TransformError(
                f"{name}: must be what {sources[0]!r} and {other!r} hold\n"
                f"These are {first!r} and {tensors[other]!r}"
            )
    return first


def _check(resolved: Resolved, tensors: Mapping[str, Array], name: str) -> None:
    """Compare what must agree, bit by bit."""
    checks = resolved.checks(name)
    if not checks:
        return
    info = resolved.targets[name]
    assert info is not None
    regions = resolved.regions(name)
    expected = _empty(info, [tensors[region.source] for region in (*regions, *checks)])
    for region in regions:
        fill(expected, region, tensors[region.source])
    for region in checks:
        found = _empty(info, [tensors[region.source], expected])
        fill(found, region, tensors[region.source])
        place = region.target_box.slices
        num_different = _num_different(expected[place], found[place])
        if num_different:
            others = ", ".join(sorted({repr(r.source) for r in regions}))
            raise TransformError(
                f"{name}: {region.source!r} must hold the same values as {others}\n"
                f"{num_different} of {region.target_box.size} elements differ (in {region.source} "
                f"{region.source_box}). To prefer one of them, name only that one, and delete the "
                "other with '-> _'"
            )


def _num_different(one: Array, other: Array) -> int:
    one, other = (np.ascontiguousarray(_bits(array)).reshape(-1) for array in (one, other))
    width = one.dtype.itemsize
    a, b = (array.view(np.uint8).reshape(-1, width) for array in (one, other))
    return int((a != b).any(axis=1).sum())


def _bits(array: Array) -> np.ndarray[Any, Any]:
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


def _fill_with_torch(place: Array, block: Array, dtypes: tuple[str, ...]) -> None:
    torch = _torch()
    if not _is_torch(place):
        place = torch.from_numpy(place)
    if not _is_torch(block):
        block = np.asarray(block)
        # torch shares memory with arrays that it may write to and whose strides are positive.
        if not block.flags.writeable or min(block.strides, default=0) < 0:
            block = block.copy()
        block = torch.from_numpy(block)
    with torch.no_grad():
        for dtype in dtypes:
            block = block.to(getattr(torch, dtype))
        place.copy_(block)


def _numpy_converted(block: Array, dtype: str, region: Region) -> Array:
    if not BY_NAME[dtype].is_native:
        raise TransformError(
            f"{region.source}: numpy has no {dtype}; give the target as a torch tensor"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return block.astype(dtype)


def _apart_from(tensors: Mapping[str, Array], targets: Iterable[Array]) -> Mapping[str, Array]:
    """The source arrays, copied where a target lies in the same memory."""
    taken = [layout for target in targets if (layout := _layout(target)) is not None]
    sources = [(name, at) for name, array in tensors.items() if (at := _layout(array)) is not None]
    layouts = [*taken, *(layout for _, layout in sources)]
    pairs = shared_pairs(layouts, lambda one, two: (one < len(taken)) == (two < len(taken)))
    result = dict(tensors)
    for name in {sources[number - len(taken)][0] for _, number in pairs}:
        array = tensors[name]
        result[name] = array.detach().clone() if _is_torch(array) else array.copy()
    return result


def _layout(array: Array) -> Layout | None:
    """Where the elements of an array lie; None if it has none, or no memory."""
    if _is_torch(array) and array.numel() and not array.is_meta:
        size = array.element_size()
        strides = tuple(stride * size for stride in array.stride())
        return Layout(str(array.device), array.data_ptr(), tuple(array.shape), strides, size)
    if isinstance(array, np.ndarray) and array.size:
        address = array.__array_interface__["data"][0]
        return Layout("cpu", address, array.shape, array.strides, array.itemsize)
    return None
