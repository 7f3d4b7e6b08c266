"""Where the elements of strided arrays lie, and which arrays share memory.

Arrays are compared by their addresses; no memory is touched, so it may be that of any device.
Whether two strided arrays have a byte in common is a bounded Diophantine problem, which numpy
solves (`numpy.shares_memory`). It is asked about arrays that have the right address, shape and
strides, but no memory of their own. Only arrays whose spans overlap are asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_WORK = 1_000_000
"""Candidates that numpy tries before it gives up on a pair; the pair then counts as sharing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of the elements of an array that has any."""

    device: str  # the device, as torch calls it
    address: int  # address of the first element
    shape: tuple[int, ...]  # extents, none of which is 0
    strides: tuple[int, ...]  # bytes from element to element along each dim
    itemsize: int  # bytes of an element

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the lowest byte and of one past the highest."""
        steps = [
            stride * (extent - 1) for stride, extent in zip(self.strides, self.shape, strict=True)
        ]
        low = self.address + sum(step for step in steps if step < 0)
        return low, self.address + sum(step for step in steps if step > 0) + self.itemsize

    def overlaps_itself(self) -> bool:
        """True if two elements have a byte in common."""
        dims = [
            (abs(stride), extent)
            for stride, extent in zip(self.strides, self.shape, strict=True)
            if extent > 1
        ]
        reach = self.itemsize
        for stride, extent in sorted(dims):
            if stride < reach:
                return _differences_meet_zero(dims, self.itemsize)
            reach += stride * (extent - 1)
        return False

    def shares_memory(self, other: Layout) -> bool:
        """True if an element of this array and one of the other have a byte in common."""
        return self.device == other.device and _share(
            _phantom(self.address, self.shape, self.strides, self.itemsize),
            _phantom(other.address, other.shape, other.strides, other.itemsize),
        )


def shared_pairs(
    layouts: Sequence[Layout], skip: Callable[[int, int], bool] = lambda _first, _second: False
) -> Iterator[tuple[int, int]]:
    """The pairs of arrays that have a byte in common, but for those that `skip` names."""
    spans = [(layout.device, *layout.span, number) for number, layout in enumerate(layouts)]
    reaching: list[tuple[str, int, int, int]] = []
    for span in sorted(spans):
        device, start, _, number = span
        reaching = [one for one in reaching if one[0] == device and one[2] > start]
        for *_, earlier in reaching:
            pair = (min(earlier, number), max(earlier, number))
            if not skip(*pair) and layouts[earlier].shares_memory(layouts[number]):
                yield pair
        reaching.append(span)


def _differences_meet_zero(dims: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """True if two elements of an array with the given strides and extents have a byte in common.

    The differences of two positions whose first differing dim is a certain one are a strided array
    themselves; the two elements meet where this array meets the element at position zero.
    """
    zero = 1 << 62
    element = _phantom(zero, (), (), itemsize)
    for number, (stride, extent) in enumerate(dims):
        later = dims[number + 1 :]
        lowest = zero + stride - sum(step * (size - 1) for step, size in later)
        shape = (extent - 1, *(2 * size - 1 for _, size in later))
        differences = _phantom(lowest, shape, (stride, *(step for step, _ in later)), itemsize)
        if _share(differences, element):
            return True
    return False


def _share(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    try:
        # Its annotation knows only two special values of the limit.
        return np.shares_memory(first, second, max_work=MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Phantom:
    """Lets numpy make an array over any address; nothing may read or write its elements."""

    def __init__(self, interface: dict[str, object]) -> None:
        self.__array_interface__ = interface


def _phantom(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> npt.NDArray[Any]:
    return np.asarray(
        _Phantom(
            {
                "version": 3,
                "data": (address, True),
                "shape": shape,
                "strides": strides,
                "typestr": f"|V{itemsize}",
            }
        )
    )
