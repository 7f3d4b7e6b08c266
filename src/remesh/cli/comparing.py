"""Two checkpoints compared: names, types, shapes, values. Nothing needs torch.

Values are compared in chunks, so memory is bounded. Of each tensor the largest difference and the
number of elements that differ are found; two NaN at the same place are equal. With a
transformation, what it makes of the first checkpoint is compared with the second; casts that it
asks for are left out, so a tolerance should be given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from remesh.checkpoint import Checkpoint
from remesh.cli import summary
from remesh.dtypes import BY_NAME
from remesh.geometry import Box
from remesh.transform import Resolved, Transform, arranged

_Array = summary.Array


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs.

    Attributes:
        name: Its name, in the second checkpoint if the first is transformed.
        dtypes: Its element types in both.
        shapes: Its shapes in both.
        num_different: Elements that differ by more than the tolerance; None if the shapes differ,
            or values were not compared.
        max_difference: The largest absolute difference of finite elements, likewise.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_different: int | None = None
    max_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two checkpoints.

    Attributes:
        only_first: Names of tensors that only the first has; with a transformation, those that
            nothing in the second is made of.
        only_second: Names of tensors that only the second has.
        tensors: The tensors that differ.
        num_equal: Tensors that do not.
        only_first_values: Names of plain values and objects that only the first has.
        only_second_values: Those that only the second has.
        values: Name → text of both values, of values that differ.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    num_equal: int
    only_first_values: tuple[str, ...]
    only_second_values: tuple[str, ...]
    values: Mapping[str, tuple[str, str]]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        lists = (self.only_first, self.only_second, self.tensors, self.only_first_values)
        return not any(map(bool, (*lists, self.only_second_values, self.values)))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements are equal if they differ by `absolute + relative * abs(second)` at most."""

    relative: float = 0.0
    absolute: float = 0.0


def compare(
    first: Checkpoint,
    second: Checkpoint,
    *,
    transform: Transform | None,
    tolerance: Tolerance | None,
    on_read: Callable[[int], None],
) -> Comparison:
    """Compare two checkpoints, of any formats.

    Args:
        first: One of them.
        second: The other.
        transform: What the first becomes before it is compared; None if nothing.
        tolerance: What counts as equal; None to compare no values of tensors.
        on_read: Called with the bytes of the second that were compared.

    Raises:
        TransformError: If the transformation does not fit.
        CorruptCheckpointError: If stored bytes are missing or damaged.
    """
    resolved = None
    if transform is not None:
        resolved = transform.resolve(first.index, second.index, aliases=first.index.aliases)
    found = _names_of(first, second, resolved)
    differences, num_equal = [], 0
    for name in found.both:
        if resolved is None:
            left = first.index[name]
            difference = TensorDifference(
                name,
                (left.dtype, second.index[name].dtype),
                (left.shape, second.index[name].shape),
            )
        else:
            stored = second.index[name]
            difference = TensorDifference(
                name, (stored.dtype, stored.dtype), (stored.shape, stored.shape)
            )
        equal_kind = len(set(difference.dtypes)) == len(set(difference.shapes)) == 1
        if len(set(difference.shapes)) == 1 and tolerance is not None:
            count, largest = _compare_values(first, second, name, resolved, tolerance, on_read)
            if count or not equal_kind:
                differences.append(
                    TensorDifference(name, difference.dtypes, difference.shapes, count, largest)
                )
            else:
                num_equal += 1
        elif equal_kind:
            num_equal += 1
        else:
            differences.append(difference)
    values = _compare_plain(first, second) if resolved is None else ((), (), {})
    return Comparison(found.only_first, found.only_second, tuple(differences), num_equal, *values)


@dataclass(frozen=True, slots=True)
class _Names:
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    both: tuple[str, ...]


def _names_of(first: Checkpoint, second: Checkpoint, resolved: Resolved | None) -> _Names:
    if resolved is None:
        left, right = set(first.index), set(second.index)
        both = tuple(name for name in second.index if name in left)
        return _Names(tuple(sorted(left - right)), tuple(sorted(right - left)), both)
    made = tuple(name for name in second.index if resolved.sources_of(name))
    rest = tuple(sorted(set(second.index) - set(made)))
    return _Names(resolved.unused, rest, made)


def _compare_values(
    first: Checkpoint,
    second: Checkpoint,
    name: str,
    resolved: Resolved | None,
    tolerance: Tolerance,
    on_read: Callable[[int], None],
) -> tuple[int, float]:
    """How many elements of a tensor differ, and the largest difference of finite ones."""
    stored = second.index[name]
    num_different, largest = 0, 0.0
    if not math.prod(stored.shape):
        return 0, 0.0
    max_elements = summary.CHUNK_BYTES // BY_NAME[stored.dtype].itemsize
    for chunk in summary.chunks_of(Box.whole(stored.shape), max_elements):
        right = _numbers(second, name, chunk)
        left = np.empty(right.shape, right.dtype)
        for box, block in _blocks(first, name, chunk, resolved):
            if block.dtype != left.dtype:
                left = left.astype(np.result_type(left.dtype, block.dtype))
            place: tuple[Any, ...] = (*box.relative_to(chunk).slices, ...)
            left[place] = block
        count, distance = _difference(left, right, tolerance)
        num_different += count
        largest = max(largest, distance)
        on_read(right.nbytes)
    return num_different, largest


def _blocks(
    first: Checkpoint, name: str, chunk: Box, resolved: Resolved | None
) -> Iterator[tuple[Box, _Array]]:
    """What the first checkpoint has in a box of the second: boxes and their elements."""
    if resolved is None:
        yield chunk, _numbers(first, name, chunk)
        return
    for region in resolved.regions(name, chunk):
        yield region.target_box, arranged(_numbers(first, region.source, region.source_box), region)


def _numbers(checkpoint: Checkpoint, name: str, box: Box) -> _Array:
    dtype = checkpoint.index[name].dtype
    carried = checkpoint.read_array(name, box)
    return summary.true_values(carried.reshape(-1), dtype).reshape(box.shape)


def _difference(left: _Array, right: _Array, tolerance: Tolerance) -> tuple[int, float]:
    """How many elements differ, and by how much at most."""
    if left.dtype.kind not in "fc" and right.dtype.kind not in "fc":
        unequal = left != right
        if not unequal.any():
            return 0, 0.0
        left, right = left[unequal], right[unequal]
    wide = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
    a, b = left.astype(wide), right.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
        limit = tolerance.absolute + tolerance.relative * np.abs(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    close = np.isfinite(a) & np.isfinite(b) & (distance <= limit)
    finite = distance[np.isfinite(distance)]
    return int((~(same | close)).sum()), float(finite.max(initial=0.0))


def _compare_plain(
    first: Checkpoint, second: Checkpoint
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, str]]]:
    """Names of values that only one has, and the values that differ, as text."""
    left = {**first.values, **first.lists, **first.objects}
    right = {**second.values, **second.lists, **second.objects}
    texts = {name: (repr(left[name]), repr(right[name])) for name in left if name in right}
    return (
        tuple(sorted(left.keys() - right.keys())),
        tuple(sorted(right.keys() - left.keys())),
        {name: pair for name, pair in texts.items() if pair[0] != pair[1]},
    )
