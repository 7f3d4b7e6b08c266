"""Tensors that are made of other tensors: what torch calls traceable wrapper subclasses.

`__tensor_flatten__` of such a tensor names the inner tensors that hold its elements, and gives a
context: all else that the class needs to make it anew. Quantised weights and the state of low-bit
optimizers are of this kind. An inner tensor is stored under the name of the outer one and its own
(`weight.qdata`). Beside them a record says what they make (`weight.__tensor_flatten__`): the class,
the context, the dtypes. It is there to be compared: a load fills the inner tensors of a live tensor
whose record is equal, and refuses any other, since the same codes mean something else there.
Nothing is looked up or made from a record; classes and contexts are those of the live tensors.

A weight of float8 training only wraps a tensor of the same shape and dtype, which says how its
matmul is computed. That tensor is stored in place of the weight, as if there were no wrapper.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remesh.core.sharded import dtype_name
from remesh.errors import UnsupportedValueError

_SCALE = "_precomputed_scale"
"""Attribute of a float8 weight: its scale, worked out before the forward pass."""
_BLOCKS = frozenset({"OptimState8bit", "OptimState4bit", "OptimStateFp8"})
_PLAIN = (bool, int, float, str, bytes, type(None))


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """True if a tensor is stored as its inner tensors.

    The subclasses of torch itself are not: a DTensor has placements, a nested tensor sizes that are
    symbols, and one that a collective still fills has no values yet.
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter or kind.__module__.partition(".")[0] == "torch":
        return False
    return is_traceable_wrapper_subclass(tensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a weight of float8 training wraps; any other tensor itself."""
    if not is_of_torchao(tensor) or not is_made_of_tensors(tensor):
        return tensor
    wrapper: Any = tensor
    names = [name for name in wrapper.__tensor_flatten__()[0] if name != _SCALE]
    if len(names) != 1:
        return tensor
    inner: torch.Tensor = getattr(wrapper, names[0])
    is_same = (inner.shape, inner.dtype, inner.device) == (
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )
    return inner if is_same and not is_made_of_tensors(inner) else tensor


def forget_scale(tensor: torch.Tensor) -> None:
    """Make a weight of float8 training work out its scale anew, for its elements have changed."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    if is_of_torchao(local) and getattr(local, _SCALE, None) is not None:
        setattr(local, _SCALE, None)


def is_block_state(tensor: torch.Tensor) -> bool:
    """True if this is state of a low-bit optimizer of torchao: codes with a scale for each block.

    A block is a run of elements in row-major order, of which all have the same length.
    """
    return type(tensor).__name__ in _BLOCKS and is_of_torchao(tensor)


def inner_tensors(tensor: torch.Tensor, where: str) -> dict[str, torch.Tensor]:
    """The inner tensors of a tensor by their names."""
    wrapper: Any = tensor
    found = {}
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name, None)
        if not name.isidentifier() or not isinstance(inner, torch.Tensor):
            raise UnsupportedValueError(
                f"{where}: __tensor_flatten__ of {_class_of(tensor)} names {name!r}\n"
                "It has no attribute of that name that is a tensor"
            )
        found[name] = inner
    return found


def record_of(tensor: torch.Tensor, shape: tuple[int, ...], where: str) -> dict[str, object]:
    """The record of a tensor, or of its part on this rank; `shape` is that of the whole tensor."""
    inner = inner_tensors(tensor, where)
    record: dict[str, object] = {
        "class": _class_of(tensor),
        "tensors": {name: _dtype_of(one, where) for name, one in inner.items()},
    }
    wrapper: Any = tensor
    if is_block_state(tensor):
        # The dtype of such a tensor is what it was made with or float32, whatever it has met since.
        signed = getattr(wrapper, "signed", None)
        context: dict[str, object] = {"signed": signed, "block_size": wrapper.block_size}
    else:
        context = {"context": _plain(wrapper.__tensor_flatten__()[1], where)}
        context |= {"shape": list(shape), "dtype": str(tensor.dtype)}
    return {**record, **context}


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same class and context with memory of its own; a plain tensor itself."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = tensor.to_local()
        if not is_made_of_tensors(local):
            return tensor
        return DTensor.from_local(
            new_like(local),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if not is_made_of_tensors(tensor):
        return tensor
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    inner = {name: getattr(wrapper, name) for name in names}
    copies = {
        name: new_like(one) if is_made_of_tensors(one) else torch.empty_like(one.detach())
        for name, one in inner.items()
    }
    make: Any = type(wrapper).__tensor_unflatten__
    made: torch.Tensor = make(copies, context, tensor.shape, tensor.stride())
    return made


def is_of_torchao(value: object) -> bool:
    """True if the class of a value is in torchao, which is not imported for the question."""
    return type(value).__module__.partition(".")[0] == "torchao"


def _class_of(value: object) -> str:
    """The class of a value without the modules inside its package, which move between versions."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"


def _dtype_of(tensor: torch.Tensor, where: str) -> str:
    return _class_of(tensor) if is_made_of_tensors(tensor) else dtype_name(tensor, where)


def _plain(value: object, where: str) -> object:
    """A context, or what is in one, as plain values.

    What has no such form is told by its class. Devices are left out: they may differ.
    """
    if isinstance(value, torch.Tensor):
        raise UnsupportedValueError(
            f"{where}: the context of its __tensor_flatten__ holds a tensor, which would be lost\n"
            "Put a plain tensor into the state"
        )
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    # A named tuple's; other classes may call something else so.
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if dataclasses.is_dataclass(value):
        fields = tuple(one.name for one in dataclasses.fields(value))
    if fields is not None and not isinstance(value, type):
        plain = {name: _plain(getattr(value, name), where) for name in fields}
        return {"type": _class_of(value), **plain}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    return _class_of(value)
