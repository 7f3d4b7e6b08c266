"""Where the elements of a box lie while remesh copies them: host or device memory.

The pipeline moves carrier arrays (see `remesh.core.dtypes`) and knows nothing of torch. What it
copies from and to is a `Memory`. `HostMemory` is a numpy view of memory that the CPU can reach;
adapters add memories for devices and for casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.strided import Layout
from remesh.errors import UnsupportedValueError

CarrierArray = npt.NDArray[Any]


class Memory:
    """The elements of one box of a tensor. Boxes here are relative to that box.

    It has `copy_out` if it is read, and `copy_in` if it is filled; the rest has defaults.
    """

    __slots__ = ()

    @property
    def carrier(self) -> CarrierDType:
        """Dtype of the arrays that elements are copied to and from."""
        raise NotImplementedError

    @property
    def layout(self) -> Layout | None:
        """Where the elements lie; None if there are none, or in no memory of this process."""
        return None

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        """Copy the elements of `box` into an array of the same shape."""
        raise NotImplementedError

    def queue_copy_out(self, box: Box, into: CarrierArray) -> None:
        """Like `copy_out`, but may be done only when the `CopyQueue` that is entered says so."""
        self.copy_out(box, into)

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        """Replace the elements of `box` by those of an array of the same shape."""
        raise NotImplementedError

    def digest(self) -> bytes | None:
        """16 bytes that are equal for equal elements in equal order; None on the host."""
        return None

    def elements(self, box: Box) -> Any:  # noqa: ARG002 - for memory of devices
        """The elements of `box`, as tensors of the device's library of integers; None elsewhere."""
        return None

    def fill(self, box: Box, elements: Any) -> bool:  # noqa: ARG002 - for memory of devices
        """Replace the elements of `box`, maybe later, in order; False if it takes no tensors."""
        return False


class MessageBuffer(Protocol):
    """Bytes in memory of the host or of a device, for messages between ranks."""

    def __len__(self) -> int: ...

    def part(self, start: int, stop: int) -> Any:
        """The bytes [start, stop), as `Exchange.swap` or `begin_swap` sends and fills them."""

    def memory(self, position: int, shape: tuple[int, ...], carrier: CarrierDType) -> Memory:
        """The bytes from `position` on, as elements of a box."""


class Device(Protocol):
    """A device whose memory ranks send each other as it is."""

    def buffers(self, number: int, num_bytes: int) -> Sequence[MessageBuffer]:
        """Some buffers of one size."""

    def finish(self) -> None:
        """Wait until all that the thread has queued is done."""


class CopyQueue(Protocol):
    """A queue of copies out of devices; one thread's. Enter it to queue copies."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_error: object) -> None: ...

    def mark(self) -> Callable[[], None]:
        """A function that waits until all copies that are queued by now are done."""


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory(Memory):
    """Memory seen as a carrier array, of any strides."""

    array: CarrierArray

    @property
    def carrier(self) -> CarrierDType:
        return self.array.dtype

    @property
    def layout(self) -> Layout | None:
        return _layout(self.array) if self.array.size else None

    def view(self, box: Box) -> CarrierArray:
        """The elements of a box."""
        place: tuple[Any, ...] = (*box.slices, ...)  # the dots keep it a view, also without dims
        elements: CarrierArray = self.array[place]
        return elements

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        into[...] = self.array[box.slices]

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        self.array[box.slices] = values


def copy_box(source: Memory, box: Box, target: Memory, place: Box) -> None:
    """Copy a box of one memory to a box of the same shape in another one."""
    if isinstance(target, HostMemory):
        source.copy_out(box, target.view(place))
    elif isinstance(source, HostMemory):
        target.copy_in(place, source.view(box))
    else:
        values = np.empty(box.shape, source.carrier)
        source.copy_out(box, values)
        target.copy_in(place, values)


def copy_directly(source: Memory, box: Box, target: Memory, place: Box) -> None:
    """`copy_box`, which stays on the device if it can; then it may be done later, in order."""
    elements = None if isinstance(target, HostMemory) else source.elements(box)
    if elements is None or not target.fill(place, elements):
        copy_box(source, box, target, place)


def contiguous_bytes(memory: Memory) -> npt.NDArray[np.uint8] | None:
    """The bytes of a memory of the host whose elements lie row-major without gaps; else None."""
    if isinstance(memory, HostMemory) and memory.array.flags.c_contiguous:
        return memory.array.reshape(-1).view(np.uint8)
    return None


def memory_of_numpy(array: npt.NDArray[Any], where: str, *, writable: bool = False) -> HostMemory:
    """The memory of a numpy array, which is not copied."""
    dtype = BY_NAME.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise UnsupportedValueError(
            f"{where}: numpy elements of type {array.dtype} cannot be stored; convert them with "
            "astype()"
        )
    if writable and not array.flags.writeable:
        raise UnsupportedValueError(
            f"{where}: this array is read-only, so nothing can be loaded into it; put a copy() "
            "into the state"
        )
    if writable and array.size and _layout(array).overlaps_itself():
        raise UnsupportedValueError(
            f"{where}: several elements of this array share memory (it is broadcast, or overlaps "
            "itself)\nThey cannot be loaded one by one; put a copy() into the state"
        )
    return HostMemory(array.view(dtype.carrier))


def _layout(array: npt.NDArray[Any]) -> Layout:
    # Of the ways to an array's address, this is the quick one.
    address = array.__array_interface__["data"][0]
    return Layout("cpu", address, array.shape, array.strides, array.itemsize)
