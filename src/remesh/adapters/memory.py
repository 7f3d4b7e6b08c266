"""Memories over torch tensors and numpy arrays, and which tensors can have one.

The pipeline copies carrier arrays (`remesh.core.dtypes`): arrays whose bytes are right and whose
element type may be an unsigned stand-in. A CPU tensor is therefore seen, without a copy, as a
numpy array of the carrier type. Memory of a device is reached box by box: torch copies between
the device and the given host array. On both sides of that copy the elements are called integers
of the same size, because every device can move those, whatever it can compute with.

A tensor that holds its elements in another way than strided memory (sparse, quantised, a subclass
made of other tensors, a lazy conjugate) has no such view and is refused, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, HostMemory, Memory, memory_of_numpy
from remesh.core.sharded import ArrayLike, dtype_name
from remesh.core.strided import Layout
from remesh.errors import UnsupportedValueError

_DIGEST_CHUNK = 32 << 20
"""Bytes of a tensor that are digested at a time; a multiple of 8."""

_MULTIPLIERS = (
    (-0x61C8864680B583EB, -0x4B47D0C5A1A5C5B3),
    (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15),
)
"""Odd numbers of 64 bits, as signed ones."""

_STAND_INS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
MOVABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MOVABLE_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory(Memory):
    """Memory that only torch can reach, or that is read and written as another element type."""

    tensor: torch.Tensor  # the elements: called integers of the same size, or in their own type
    carrier: CarrierDType = field()  # dtype of the arrays that elements are copied to and from
    dtype: torch.dtype | None = None  # type of the values in these arrays, if it is another

    @property
    def layout(self) -> Layout | None:
        return strided_layout(self.tensor) if self.tensor.numel() else None

    @property
    def _values(self) -> torch.dtype:
        return self.dtype or self.tensor.dtype

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        known = _known_to_torch(into)
        _movable_view(known).view(self._values).copy_(self.tensor[box.slices])
        if known is not into:
            into[...] = known

    def queue_copy_out(self, box: Box, into: CarrierArray) -> None:
        # Truly queued only if `into` is pinned.
        values = _movable_view(into).view(self._values)
        values.copy_(self.tensor[box.slices], non_blocking=True)

    def digest(self) -> bytes:
        return digest_of(self.tensor)

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        self.fill(box, _movable_view(_known_to_torch(values)))

    def elements(self, box: Box) -> torch.Tensor:
        return self.tensor[box.slices].to(self._values).view(MOVABLE[self._values.itemsize])

    def fill(self, box: Box, elements: torch.Tensor) -> bool:
        # The mode is a thread's own, and outside of it torch does not change a tensor made in it.
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor[box.slices].copy_(elements.view(self._values))
        return True


def digest_of(tensor: torch.Tensor) -> bytes:
    """A digest of 16 bytes of a tensor of integers or `complex128`, made where they are.

    Every word of 8 bytes is mixed with its number, by multiplications and shifts that modern hash
    functions end with, and the results are added up; all arithmetic is modulo 2^64. That finds
    copies that differ by accident, and is no protection against forgery.
    """
    sums = [torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in _MULTIPLIERS]
    elements = tensor.contiguous().reshape(-1)
    if elements.numel() < 2:
        # Contiguous whatever its stride is, but with another stride than 1 it cannot be viewed.
        elements = elements.new_empty(elements.numel()).copy_(elements)
    flat = elements.view(torch.uint8)
    num_bytes = flat.numel()
    for start in range(0, num_bytes, _DIGEST_CHUNK):
        piece = flat[start : start + _DIGEST_CHUNK]
        if piece.numel() % 8 or piece.storage_offset() % 8:
            padded = piece.new_zeros(-(-piece.numel() // 8) * 8)
            padded[: piece.numel()] = piece
            piece = padded
        words = piece.view(torch.int64)
        number = torch.arange(words.numel(), device=words.device) + (start // 8 + 1)
        for which, (first, second) in enumerate(_MULTIPLIERS):
            mixed = words + number * first
            mixed = (mixed ^ (mixed >> 31)) * second
            mixed = (mixed ^ (mixed >> 29)) * first
            sums[which] += (mixed ^ (mixed >> 32)).sum()
    return torch.stack(sums).cpu().numpy().tobytes()


def memory_of(array: ArrayLike, where: str, *, writable: bool = False) -> Memory:
    """The memory of a tensor or a numpy array, which is not copied."""
    if isinstance(array, torch.Tensor):
        tensor = _with_memory(array, where, writable)
        dtype = BY_NAME[dtype_name(tensor, where)]
        if tensor.device.type == "cpu":
            # numpy knows only some types; the others are seen as one of the same size.
            known = tensor if dtype.is_native else tensor.view(_STAND_INS[dtype.itemsize])
            return HostMemory(known.numpy())
        return DeviceMemory(tensor.view(MOVABLE[tensor.itemsize]), dtype.carrier)
    return HostMemory(_numpy_carrier(array, where, writable))


def casting_memory_of(array: ArrayLike, stored_dtype: str, where: str) -> Memory:
    """A memory that takes values of another element type and keeps them in the array's own."""
    wanted_dtype = dtype_name(array, where)
    if BY_NAME[stored_dtype].is_opaque or BY_NAME[wanted_dtype].is_opaque:
        raise UnsupportedValueError(
            f"{where}: torch does not convert {stored_dtype} to {wanted_dtype}\nLoad into a tensor "
            f"of dtype {stored_dtype}, and convert its bits yourself"
        )
    if isinstance(array, torch.Tensor):
        tensor = _with_memory(array, where, writable=True)
    else:
        carrier = _numpy_carrier(array, where, writable=True)
        if _known_to_torch(carrier) is not carrier:
            raise UnsupportedValueError(
                f"{where}: torch does not convert to an array with these strides\nPut a copy() "
                "into the state"
            )
        tensor = _movable_view(carrier).view(torch_dtype(wanted_dtype))
    return DeviceMemory(tensor, BY_NAME[stored_dtype].carrier, torch_dtype(stored_dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in `remesh.core.dtypes`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValueError(
            f"torch {torch.__version__} has no element type {name}; a newer torch is needed"
        )
    return dtype


def check_strided(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose elements are not simply strided memory."""
    problem = _problem_of(tensor)
    if problem is not None:
        raise UnsupportedValueError(
            f"{where}: {problem}\n"
            "Or wrap it in remesh.sharding.LocalNonpersistentObject to leave it out of the "
            "checkpoint."
        )


def strided_layout(tensor: torch.Tensor) -> Layout:
    """The place of the elements of a strided tensor that has some."""
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    shape = tuple(tensor.shape)
    return Layout(str(tensor.device), tensor.data_ptr(), shape, strides, tensor.itemsize)


def alias_key(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors that are the same memory; None if there is no memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _problem_of(tensor: torch.Tensor) -> str | None:
    kind = type(tensor)
    if kind is not torch.Tensor:
        if is_lazy(tensor):
            return "this parameter of a lazy module has no shape yet; run a forward pass first"
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            inner = ""
            wrapper: Any = tensor
            if is_traceable_wrapper_subclass(wrapper):
                names = wrapper.__tensor_flatten__()[0]
                inner = f" ({', '.join(map(str, names))})"
            return (
                f"a tensor of type {kind.__module__}.{kind.__qualname__} keeps its elements in "
                f"other tensors{inner}; put those, or a plain tensor, into the state"
            )
    if tensor.is_nested:
        return "a nested tensor cannot be stored; put its values() and offsets() into the state"
    if tensor.is_quantized:
        return "a quantised tensor cannot be stored; put its int_repr() and scales into the state"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be stored; make it dense (to_dense())"
    if tensor.is_conj() or tensor.is_neg():
        return (
            "this tensor is a lazy conjugate or negative of other memory; call resolve_conj() and "
            "resolve_neg() on it"
        )
    return None


def _with_memory(tensor: torch.Tensor, where: str, writable: bool) -> torch.Tensor:
    """The tensor, detached, once it is known to have usable memory."""
    check_strided(tensor, where)
    if tensor.is_meta:
        raise UnsupportedValueError(
            f"{where}: a meta tensor has no memory\nMaterialise its module first with "
            "module.to_empty(device=...), then compute its buffers with persistent=False again"
        )
    if writable and tensor.numel() and strided_layout(tensor).overlaps_itself():
        raise UnsupportedValueError(
            f"{where}: several elements of this tensor share memory (it is expanded, or overlaps "
            "itself)\nThey cannot be loaded one by one; put a clone() into the state"
        )
    # Describing has detached most of them already, and it takes its time.
    return tensor.detach() if tensor.requires_grad else tensor


def _numpy_carrier(array: ArrayLike, where: str, writable: bool) -> CarrierArray:
    """A numpy array as a carrier, once it is known to be usable."""
    if not isinstance(array, np.ndarray):
        raise UnsupportedValueError(
            f"{where}: expected a torch tensor or a numpy array, got {type(array).__qualname__}"
        )
    return memory_of_numpy(array, where, writable=writable).array


def _known_to_torch(array: CarrierArray) -> CarrierArray:
    """The array, or a copy: torch has no read-only tensors, nor strides back or within elements."""
    is_known = all(stride >= 0 and not stride % array.itemsize for stride in array.strides)
    return array if is_known and array.flags.writeable else array.copy()


def _movable_view(array: CarrierArray) -> torch.Tensor:
    """A carrier array as a tensor of integers over the same memory."""
    return torch.from_numpy(array.view(_MOVABLE_NUMPY[array.dtype.itemsize]))


# ---------------------------------------------------------------------------------------------
# Memory of devices that ranks send each other as it is, by a backend such as NCCL
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TorchBuffer:
    """A tensor of bytes; a `remesh.core.memory.MessageBuffer`."""

    tensor: torch.Tensor

    def __len__(self) -> int:
        return self.tensor.numel()

    def part(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def memory(self, position: int, shape: tuple[int, ...], carrier: CarrierDType) -> DeviceMemory:
        raw = self.tensor[position : position + math.prod(shape) * carrier.itemsize]
        return DeviceMemory(raw.view(MOVABLE[carrier.itemsize]).reshape(shape), carrier)


class TorchDevice:
    """A `remesh.core.memory.Device`."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)

    def buffers(self, number: int, num_bytes: int) -> list[TorchBuffer]:
        empty = (
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(number)
        )
        return [TorchBuffer(tensor) for tensor in empty]

    def finish(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream(self._device).synchronize()


def identity_of(device: str) -> str:
    """A name that no other device of the machine has, by whatever number processes call it."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_properties(device).uuid)
    return device
