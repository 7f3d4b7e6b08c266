"""The classes in which an application wraps its state, to say how it is sharded.

A `ShardedTensor` says where a local tensor lies in a global one, a `ShardedObject` the same for a
value in a grid of values. A `ShardedTensorFactory` is a leaf that is stored as a sharded state dict
of its own, and a `LocalNonpersistentObject` is not stored at all. Their `key` is what they are
stored under; the keys of the dicts they stand in are the application's own business.

These classes have the fields and methods of Megatron's, mutable as there, because applications set
`key`, `data` and `replica_id` of what they are handed. `to_remesh` turns them into the engine's: a
shard is one box of the global tensor, a flattened range of it a few.

A flattened range counts the elements of the *local* shard in row-major order. Prepended axes are
axes of the global tensor that the local one lacks, each of local extent 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import dict_list_map_inplace, nested_values
from remesh.core.geometry import Box, boxes_of_flat_range
from remesh.core.sharded import ShardedObject as EngineObject
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.core.sharded import parts_at
from remesh.errors import StateError

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


class ShardedBase(ABC):
    """Anything sharded: has a `key`, `data` and a `replica_id`."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` if the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same with `data=None`."""


@dataclass
class ShardedTensor(ShardedBase):
    """Where a local tensor lies in a global one."""

    key: str  # name of the global tensor
    data: torch.Tensor | None = field(repr=False)
    """The local tensor, or None where only the description counts; one dim if `flattened_range` is
    given."""
    dtype: torch.dtype  # element type; that of `data`
    local_shape: tuple[int, ...]
    """Shape of the local shard, before flattening, without prepended axes."""
    global_shape: tuple[int, ...]  # shape of the global tensor, with prepended axes
    global_offset: tuple[int, ...]  # where the shard begins, in elements
    axis_fragmentations: tuple[int, ...] | None
    """Number of shards along each axis, or None if the shards are no grid."""
    replica_id: ReplicaId = 0  # 0 or zeros on exactly one of the ranks that hold this shard
    prepend_axis_num: int = 0
    """Number of axes that the global tensor has in front of the local ones."""
    allow_shape_mismatch: bool = False
    """On load, accept a stored tensor of another global shape: what is not stored becomes zeros,
    what does not fit is left out."""
    flattened_range: slice | None = None  # the elements of the flattened shard that `data` holds

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise CheckpointingException(f"{problem}: {self}")

    def _problem(self) -> str | None:
        local_shape = tuple(self.local_shape)
        if len(self.global_offset) != len(self.global_shape):
            return "global_offset and global_shape differ in length"
        if len(local_shape) + self.prepend_axis_num != len(self.global_shape):
            return "local_shape and the prepended axes do not make up global_shape"
        if self.axis_fragmentations is not None:
            offsets = self.global_offset[self.prepend_axis_num :]
            pairs = zip(offsets, local_shape, strict=True)
            if any(extent and offset % extent for offset, extent in pairs):
                return "global_offset is not a multiple of local_shape, so there is no grid"
        if self.flattened_range is not None:
            if self.flattened_range.step is not None:
                return "flattened_range has a step"
            if self._span() != (self.flattened_range.start or 0, self.flattened_range.stop):
                return "flattened_range leaves the local shard"
        if self.data is not None and self.data.dtype != self.dtype:
            return f"data is of {self.data.dtype}, not of dtype {self.dtype}"
        if self.data is not None and tuple(self.data.shape) != self.data_shape:
            return f"data has shape {tuple(self.data.shape)}, not {self.data_shape}"
        return None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of `data`, whether there is any or not."""
        if self.flattened_range is None:
            return tuple(self.local_shape)
        start, stop = self._span()
        return (max(stop - start, 0),)

    def _span(self) -> tuple[int, int]:
        """The elements of the flattened shard that `data` holds."""
        flat = self.flattened_range or slice(None)
        return flat.indices(math.prod(self.local_shape))[:2]

    def boxes(self) -> list[Box]:
        """The boxes of the global tensor that the shard is, in the order of its data."""
        offset = tuple(self.global_offset)
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        if self.flattened_range is None:
            return [Box(offset, shape)]
        start, stop = self._span()
        return [box.shift(offset) for box in boxes_of_flat_range(shape, start, max(start, stop))]

    def to_remesh(self) -> EngineTensor:
        """The engine's description of the same memory."""
        if self.data is None:
            raise StateError(f"{self.key}: there is no data to save or to fill")
        # Views: a load fills them, and `data` of another shape, set later, is found to be one.
        data, span = self.data.detach(), None
        if self.flattened_range is None:
            data = data[(None,) * self.prepend_axis_num]
        else:
            start, stop = self._span()
            span = (start, max(start, stop))
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        parts = parts_at(tuple(self.global_offset), shape, data, span)
        return EngineTensor(
            self.key,
            tuple(self.global_shape),
            parts,
            self.replica_id,
            self.allow_shape_mismatch,
        )

    @property
    def has_regular_grid(self) -> bool:
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """The index that selects this shard of the global tensor; integers at prepended axes."""
        prepended = self.global_offset[: self.prepend_axis_num]
        own = self.global_offset[self.prepend_axis_num :]
        slices = (slice(a, a + n) for a, n in zip(own, self.local_shape, strict=True))
        return (*prepended, *slices)

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Position of this shard in the grid of shards, counted in shards."""
        position = list(self.global_offset[: self.prepend_axis_num])
        own = self.global_offset[self.prepend_axis_num :]
        for offset, extent in zip(own, self.local_shape, strict=True):
            if extent and offset % extent:
                raise CheckpointingException(f"the shard lies in no grid: {self}")
            position.append(offset // extent if extent else 0)
        return tuple(position)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """The largest extent that shards may have along each axis so that the grid stays."""
        if self.axis_fragmentations is None:
            raise CheckpointingException(f"the shards are no grid: {self}")
        pairs = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        for extent, count in pairs:
            if extent % count and not self.allow_shape_mismatch:
                raise CheckpointingException(f"{extent} cannot be cut into {count} shards: {self}")
        return tuple(extent // count for extent, count in pairs)

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """A shard of an even grid, its position counted in shards.

        Rank offsets are `(axis, position, number of shards)` for each axis that is cut; axes count
        the prepended ones. The last one for an axis holds.
        """
        if flattened_range is not None:
            raise ValueError(
                f"{key}: from_rank_offsets makes no flattened shards; use from_rank_offsets_flat"
            )
        local_shape = (1,) * prepend_axis_num + tuple(data.shape)
        offset, counts = [0] * len(local_shape), [1] * len(local_shape)
        for axis, position, count in rank_offsets:
            if not 0 <= axis < len(local_shape) or not 0 <= position < count:
                raise CheckpointingException(
                    f"{key}: rank offset {(axis, position, count)} does not exist for a shard of "
                    f"shape {tuple(data.shape)} with {prepend_axis_num} prepended axes"
                )
            offset[axis], counts[axis] = position * local_shape[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(n * count for n, count in zip(local_shape, counts, strict=True)),
            tuple(offset),
            tuple(counts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *args: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """A range of a flattened shard; `data` has one dim, as long as the range.

        Megatron since 0.16 refuses it. The other arguments are those of `from_rank_offsets`.
        """
        if flattened_range is None:
            raise CheckpointingException(
                f"{key}: from_rank_offsets_flat needs a flattened_range; use from_rank_offsets"
            )
        shard = torch.empty(non_flat_local_shape, dtype=data.dtype, device="meta")
        described = cls.from_rank_offsets(key, shard, *args, **kwargs)
        return replace(described, data=data, flattened_range=flattened_range)

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Make `data` if there is none."""
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """`torch.narrow`, done to the local shards of all ranks at once.

        Shapes and offsets of the global tensor shrink in proportion. `dim` does not count prepended
        axes. A flattened range is narrowed in the first dim only, where it stays contiguous; if
        nothing of it is left, the list is empty.
        """
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        if self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            raise CheckpointingException(f"only shards of a grid can be narrowed: {self}")

        def scaled(values: tuple[int, ...], at: int) -> tuple[int, ...]:
            return (*values[:at], values[at] // extent * length, *values[at + 1 :])

        narrowed = partial(
            replace,
            self,
            local_shape=scaled(self.local_shape, dim),
            global_shape=scaled(self.global_shape, axis),
            global_offset=scaled(self.global_offset, axis),
        )
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [narrowed(data=data)]
        if dim != 0:
            raise CheckpointingException(f"a flattened range can be narrowed in dim 0 only: {self}")
        row = math.prod(self.local_shape[1:])
        own = self._span()
        first, last = max(own[0], start * row), min(own[1], (start + length) * row)
        if first >= last:
            return []
        data = None if self.data is None else self.data[first - own[0] : last - own[0]]
        left = slice(first - start * row, last - start * row)
        return [narrowed(data=data, flattened_range=left)]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True if a replica id is 0 or all zeros: the copy that is written."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


class LocalNonpersistentObject:
    """A leaf that is not stored; loading puts the object itself into the result."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


LocalNonpersitentObject = LocalNonpersistentObject
"""The name as Megatron once spelt it."""


@dataclass
class ShardedObject(ShardedBase):
    """A value that is one element of a grid of values. The grid is never cut differently."""

    key: str  # name of the grid
    data: Any  # the value, or None where only the description counts
    global_shape: tuple[int, ...]  # shape of the grid
    global_offset: tuple[int, ...]  # place in the grid
    replica_id: ReplicaId = 0  # see `ShardedTensor`

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    def validate_metadata_integrity(self) -> None:
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(f"global_offset and global_shape differ in length: {self}")

    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    def to_remesh(self) -> EngineObject:
        """The engine's description of the same value."""
        shape, offset = tuple(self.global_shape), tuple(self.global_offset)
        return EngineObject(self.key, self.data, shape, offset, self.replica_id)

    @property
    def unique_key(self) -> str:
        """The name of this element: `key/shard_<offset>_<shape>`, numbers joined by dots."""
        return self.to_remesh().unique_name

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The description that a unique key spells out, without data.

        The key itself may contain slashes. Old checkpoints have keys that lack the last number of
        the shape; it becomes -1.
        """
        key, _, shard = unique_key.rpartition("/")
        try:
            prefix, offset_text, shape_text = shard.split("_")
            offset = tuple(map(int, offset_text.split(".")))
            shape = tuple(map(int, shape_text.split(".")))
        except ValueError:
            prefix = ""
        if prefix != "shard" or not key:
            raise CheckpointingException(f"{unique_key!r} is not of the form key/shard_0.1_2.3")
        if len(shape) + 1 == len(offset):
            shape = (*shape, -1)
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn = Callable[[str, Any, ReplicaId, slice | None], Any]
FactoryMergeFn = Callable[[Any], Any]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as a sharded state dict of its own.

    The stored form must depend on the arguments of `build_fn` alone: optimizer state of the tensor
    is stored by the same factory with another key and other data.
    """

    key: str  # handed to `build_fn`
    data: Any  # the tensor in memory
    build_fn: FactoryBuildFn
    """Makes the stored form of `(key, data, replica_id, flattened_range)`: a sharded dict or list.
    """
    merge_fn: FactoryMergeFn  # makes the tensor from the loaded dict or list
    replica_id: ReplicaId = 0  # handed to `build_fn`
    flattened_range: slice | None = None  # handed to `build_fn`
    local_shape: tuple[int, ...] | None = None
    """Shape of the tensor before it was flattened; by default that of `data`. A copy of a factory
    for flattened data, as `dataclasses.replace` makes it, keeps it."""

    def __post_init__(self) -> None:
        if self.flattened_range is None and isinstance(self.data, torch.Tensor):
            self.local_shape = tuple(self.data.shape)

    def build(self) -> Any:
        """The stored form, of a flattened range too.

        Where `build_fn` ignores the range, as those of Megatron do since 0.16, what it makes must
        be parts of the tensor, one after the other.
        """
        built = self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)
        leaves = nested_values(built)
        if self.flattened_range is None or all(
            isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None for leaf in leaves
        ):
            return built
        return self._ranges(self.flattened_range)

    def _ranges(self, flattened: slice) -> list[ShardedTensor]:
        """The ranges that a flattened range has of the parts that `build_fn` makes of a tensor."""
        parts, ranges, done = [], [], 0
        if self.local_shape is not None:
            whole = torch.empty(self.local_shape, dtype=self.data.dtype, device="meta")
            parts = self.build_fn(self.key, whole, self.replica_id, None)
        size = math.prod(self.local_shape or ())
        start, stop, _ = flattened.indices(size)
        for part in parts:
            data = part.data if isinstance(part, ShardedTensor) else None
            if not (
                data is not None
                and data.untyped_storage() is whole.untyped_storage()
                and data.is_contiguous()
                and data.storage_offset() == done
            ):
                break
            first, last = max(start, done), min(stop, done + data.numel())
            if first < last:
                own = self.data[first - start : last - start]
                ranges.append(
                    replace(part, data=own, flattened_range=slice(first - done, last - done))
                )
            done += data.numel()
        if done != size:
            raise CheckpointingException(
                f"{self.key}: its factory cannot store a flattened range\nIts build_fn ignores "
                "flattened_range, and makes no parts that lie one after the other in the tensor; "
                "choose another format of the optimizer's state"
            )
        return ranges

    def to_remesh(self) -> EngineTensor:
        """The stored form as the engine's description; `StateError` if it is several tensors."""
        leaves: list[Any] = list(nested_values(self.build()))
        shards = [leaf.to_remesh() for leaf in leaves if isinstance(leaf, ShardedTensor)]
        names = sorted({shard.name for shard in shards})
        if len(shards) < len(leaves) or len(names) != 1:
            raise StateError(
                f"{self.key}: its factory stores other things than shards of one tensor\nIt stores "
                f"{', '.join(names) or 'no tensor'}. Save it with remesh.compat.megatron.save."
            )
        return replace(shards[0], parts=tuple(part for shard in shards for part in shard.parts))

    def validate_metadata_integrity(self) -> None:
        """Nothing can be checked before it is built."""

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)


def apply_factories(sharded_state_dict: Any) -> None:
    """Put what factories build in their places, in place."""

    def build(leaf: Any) -> Any:
        return leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf

    dict_list_map_inplace(build, sharded_state_dict)


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Let factories make their tensors from what was loaded, in place.

    `x2` is a part of the structure of `x1`, with factories as leaves; lists may be dicts by
    position. Each place at which it has a factory gets what its `merge_fn` returns.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        raise ValueError(f"lists of lengths {len(x1)} and {len(x2)} do not fit, at {key}")
    if not isinstance(x1, dict | list) or not isinstance(x2, dict | list):
        raise ValueError(f"a {type(x1).__name__} was loaded where factories lie deeper, at {key}")
    places: Any = x1 if isinstance(x1, dict) else range(len(x1))
    for name, inner in x2.items() if isinstance(x2, dict) else enumerate(x2):
        if name not in places:
            raise ValueError(f"nothing was loaded for the factory at {(*key, name)}")
        x1[name] = apply_factory_merges(x1[name], inner, (*key, name))
    return x1
