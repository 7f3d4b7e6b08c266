"""State described by hand: what a rank holds of tensors and values that no framework describes.

A `ShardedTensor` is one rank's boxes of a named global tensor, with their arrays. Whatever a
framework calls a shard comes down to it, flattened ranges included; its constructors take the forms
in which people think of shards. `ShardedObject` is the same for values. A `ShardedTensorFactory`
stores something in another form than it has in memory, and a `LocalNonpersistentObject` is not
stored at all. All of them stand as leaves in a state; `remesh.core.state` finds them there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from remesh._repr import short_repr
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, boxes_of_flat_range
from remesh.errors import StateError, UnsupportedValueError

RankOffset = tuple[int, int, int]


class ArrayLike(Protocol):
    """The part of torch tensors and numpy arrays that descriptions need."""

    @property
    def shape(self) -> Sequence[int]:
        """Extent of each dim."""

    @property
    def dtype(self) -> object:
        """Element type, whose text is or ends in its name."""

    def reshape(self, shape: tuple[int, ...], /) -> Any:
        """A view of another shape."""

    def __getitem__(self, key: Any, /) -> Any: ...


def dtype_name(array: ArrayLike, where: str) -> str:
    """The name of an array's element type."""
    name = _name_of(array.dtype)
    if name not in BY_NAME:
        raise UnsupportedValueError(
            f"{where}: element type {array.dtype} cannot be stored; known are {', '.join(BY_NAME)}"
        )
    return name


@functools.cache  # there are few, and states have very many tensors
def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One box of a global tensor and the local array that holds it (same shape)."""

    box: Box
    data: ArrayLike

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """One rank's boxes of a named global tensor, with their data.

    Usually made by `whole`, `from_rank_offsets` or `from_rank_offsets_flat`.

    Raises:
        StateError: If a box leaves the tensor, overlaps another, or differs from its array.
    """

    name: str
    """Global name in the checkpoint, the same on every rank that holds a box of it."""
    global_shape: tuple[int, ...]
    """Shape of the global tensor."""
    parts: tuple[Part, ...]
    """This rank's boxes with their arrays; disjoint; may be empty."""
    replica_id: int | tuple[int, ...] | None = 0
    """0, or a tuple of zeros, on the one rank that is the main replica of these boxes; anything
    else on ranks that hold identical copies. None if no rank counts the copies: they are
    compared when they are saved, and one of them is stored."""
    allow_shape_mismatch: bool = False
    """On load, accept a stored tensor of another global shape with as many dims: what lies outside
    the stored tensor is filled with zeros, what the target has no room for is left out. For
    padded vocabularies."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        whole = Box.whole(self.global_shape)
        for number, part in enumerate(self.parts):
            if part.box.ndim != whole.ndim or not whole.contains(part.box):
                raise StateError(
                    f"{self.name}: box {part.box} does not lie in shape {self.global_shape}"
                )
            if tuple(part.data.shape) != part.box.shape:
                raise StateError(
                    f"{self.name}: box {part.box} has shape {part.box.shape}, "
                    f"its array {tuple(part.data.shape)}"
                )
            for other in self.parts[:number]:
                if part.box.intersect(other.box) is not None:
                    raise StateError(f"{self.name}: boxes {other.box} and {part.box} overlap")

    @property
    def is_main_replica(self) -> bool:
        """True if this rank's copy is declared to be the one that counts."""
        if self.replica_id is None or isinstance(self.replica_id, int):
            return self.replica_id == 0
        return not any(self.replica_id)

    @classmethod
    def whole(cls, name: str, data: ArrayLike, **options: Any) -> Self:
        """All of a tensor. `options` are the fields `replica_id` and `allow_shape_mismatch`."""
        shape = tuple(int(n) for n in data.shape)
        return cls(name, shape, (Part(Box.whole(shape), data),), **options)

    @classmethod
    def at_offset(
        cls,
        name: str,
        data: ArrayLike,
        global_shape: Sequence[int],
        offset: Sequence[int],
        **options: Any,
    ) -> Self:
        """One box of a tensor, its offset given in elements."""
        box = Box(tuple(offset), tuple(int(n) for n in data.shape))
        return cls(name, tuple(global_shape), (Part(box, data),), **options)

    @classmethod
    def from_rank_offsets(
        cls,
        name: str,
        data: ArrayLike,
        *rank_offsets: RankOffset,
        prepend_axis_num: int = 0,
        **options: Any,
    ) -> Self:
        """A box of a tensor that is cut evenly, its position given in shards.

        Args:
            name: Global name.
            data: The local shard.
            *rank_offsets: `(dim, shard, num_shards)` for each dim that is cut; dims that are not
                named are whole. Dims count the prepended ones.
            prepend_axis_num: Number of dims that the global tensor has in front of those of
                `data`, each of local extent 1 (a layer number, say).
            **options: The fields `replica_id` and `allow_shape_mismatch`.

        Raises:
            StateError: If a dim is named twice or does not exist, or a shard number is out of
                range.
        """
        local_shape = (1,) * prepend_axis_num + tuple(int(n) for n in data.shape)
        box, global_shape = _grid_box(name, local_shape, rank_offsets)
        part = Part(box, data.reshape(local_shape) if prepend_axis_num else data)
        return cls(name, global_shape, (part,), **options)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        name: str,
        data: ArrayLike,
        local_shape: Sequence[int],
        *rank_offsets: RankOffset,
        flattened_range: slice,
        prepend_axis_num: int = 0,
        **options: Any,
    ) -> Self:
        """A range of a flattened shard, as ZeRO-style optimizers hold it.

        Args:
            name: Global name.
            data: One dim, as long as the range.
            local_shape: Shape of the shard before it was flattened, without prepended dims.
            *rank_offsets: Where that shard lies; see `from_rank_offsets`.
            flattened_range: Which elements of the flattened shard `data` holds.
            prepend_axis_num: See `from_rank_offsets`.
            **options: The fields `replica_id` and `allow_shape_mismatch`.

        Raises:
            StateError: As `from_rank_offsets`, or if the range does not fit `data`.
        """
        shard_shape = (1,) * prepend_axis_num + tuple(local_shape)
        shard, global_shape = _grid_box(name, shard_shape, rank_offsets)
        start, stop, step = flattened_range.indices(math.prod(shard_shape))
        if step != 1 or tuple(data.shape) != (max(stop - start, 0),):
            raise StateError(
                f"{name}: flattened range {start}:{stop}:{step}\n"
                f"It is of a shard of shape {shard_shape}\n"
                f"It does not fit an array of shape {tuple(data.shape)}"
            )
        parts = parts_at(shard.offset, shard_shape, data, (start, max(start, stop)))
        return cls(name, global_shape, parts, **options)


def parts_at(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    data: ArrayLike,
    flat_range: tuple[int, int] | None = None,
) -> tuple[Part, ...]:
    """The box of a shape at an offset, or the boxes of a range of its elements in row-major order.

    `data` has the shape of the box, or one dim with at least the elements of the range.
    """
    if flat_range is None:
        return (Part(Box(offset, shape), data),)
    parts, done = [], 0
    for box in boxes_of_flat_range(shape, *flat_range):
        parts.append(Part(box.shift(offset), data[done : done + box.size].reshape(box.shape)))
        done += box.size
    return tuple(parts)


def _grid_box(
    name: str, local_shape: tuple[int, ...], rank_offsets: Sequence[RankOffset]
) -> tuple[Box, tuple[int, ...]]:
    """The box of one shard of an evenly cut tensor, and the tensor's shape."""
    offset, shape = [0] * len(local_shape), list(local_shape)
    seen: set[int] = set()
    for dim, shard, num_shards in rank_offsets:
        if not 0 <= dim < len(local_shape) or dim in seen:
            raise StateError(
                f"{name}: dim {dim} is named twice or does not exist in shape {local_shape}"
            )
        if not 0 <= shard < num_shards:
            raise StateError(f"{name}: shard {shard} of {num_shards} in dim {dim} does not exist")
        seen.add(dim)
        offset[dim], shape[dim] = shard * local_shape[dim], num_shards * local_shape[dim]
    return Box(tuple(offset), local_shape), tuple(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ShardedObject:
    """A plain value that is one element of a grid of values, such as a per-rank RNG state."""

    name: str
    """Global name of the grid."""
    data: object
    """The value; on load, what it is replaced by is found in the returned state."""
    global_shape: tuple[int, ...]
    """Shape of the grid."""
    global_offset: tuple[int, ...]
    """Place in the grid."""
    replica_id: int | tuple[int, ...] = 0
    """As in `ShardedTensor`."""

    __repr__ = short_repr

    @property
    def is_main_replica(self) -> bool:
        """True if this rank's copy is the one that is stored."""
        if isinstance(self.replica_id, int):
            return self.replica_id == 0
        return not any(self.replica_id)

    @property
    def unique_name(self) -> str:
        """The name of this element of the grid: `name/shard_<offset>_<shape>`."""
        offset = ".".join(map(str, self.global_offset))
        return f"{self.name}/shard_{offset}_{'.'.join(map(str, self.global_shape))}"


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensorFactory:
    """A leaf that is stored in another form than it has in memory.

    Saving stores `build(name, data)`, a state of its own. Loading builds the same, fills it, and
    puts `merge(filled)` in place of the factory's data.
    """

    name: str
    """Global name handed to `build`; use another name to store optimizer state of the same tensor
    in the same form."""
    data: Any
    """What is in memory."""
    build: Callable[[str, Any], Any]
    """Makes the stored form: a nested state of sharded tensors or tensors."""
    merge: Callable[[Any], Any]
    """Makes the memory form from a filled state of that structure."""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, eq=False)
class LocalNonpersistentObject:
    """A leaf that is not stored; loading does not change it.

    A module wrapped in it is not stored either, but still lends its parameter names to an
    optimizer in the same state.
    """

    obj: Any

    __repr__ = short_repr
