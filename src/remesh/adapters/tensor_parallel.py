"""Layers that were cut by hand: which boxes of the global weight a rank's tensor is.

Tensor parallelism cuts a dim of a weight into as many shards as there are ranks: the output dim of
a column-parallel layer, the input dim of a row-parallel one, the vocabulary of an embedding, the
expert number of grouped experts. A `Split` says so for one dim; a weight may have several, one for
each mesh axis that cuts it.

Three things make a shard more than a slice. *Blocks*: a fused weight packs several weights along
the dim (gate and up projection; query, key and value), each of which is cut by itself, so that a
rank holds one box of every block. *Units*: what cannot be cut, such as a key-value head; where
there are fewer of them than ranks, neighbouring ranks hold copies. *Padding*: a vocabulary that
was rounded up, so that its end is no part of the global tensor; it is left out of checkpoints.

All this is integers (`Split.segments`); a tensor is only looked at for its shape, and what comes
out is a `ShardedTensor` of views of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from remesh._repr import short_repr
from remesh.adapters.declared import parts_of
from remesh.adapters.dtensor import Segment, boxes_of_segments
from remesh.core.geometry import Box
from remesh.core.sharded import Part, ShardedTensor
from remesh.errors import StateError


@dataclass(frozen=True, slots=True)
class Block:
    """One of the weights that are packed along a dim."""

    size: int
    """Its extent in the global tensor, in elements."""
    num_units: int | None = None
    """How many units it consists of that are not cut (heads); with fewer units than shards,
    neighbouring shards are copies. None if it may be cut anywhere."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a dim of a global tensor is cut, and which shard this rank has.

    Raises:
        StateError: If there is no such shard, or units and shards do not divide.
    """

    dim: int
    """The dim; negative ones count from the end."""
    shard: int
    """The number of this rank's shard, from 0."""
    num_shards: int
    """How many there are."""
    blocks: tuple[Block, ...] = ()
    """What is packed along the dim, in the order of the global tensor. A single block may be
    smaller than all shards together: the rest is padding. Without blocks the global extent is
    `num_shards` times the local one."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise StateError(f"shard {self.shard} of {self.num_shards} does not exist")
        for block in self.blocks:
            units = self.num_shards if block.num_units is None else block.num_units
            if units < 1 or max(units, self.num_shards) % min(units, self.num_shards):
                raise StateError(
                    f"{block} cannot be cut into {self.num_shards} shards\n"
                    "Neither number of units and shards is a multiple of the other"
                )

    def segments(self, extent: int, name: str) -> tuple[int, list[Segment]]:
        """The indices of the global dim that a local one holds.

        Args:
            extent: The local extent.
            name: The name of the tensor, for the error message.

        Returns:
            The global extent, and the runs of global indices in the order of the local ones.

        Raises:
            StateError: If the blocks do not fit the local extent.
        """
        if not self.blocks:
            return self.num_shards * extent, [(self.shard * extent, extent)]
        segments, begin, done = [], 0, 0
        for block in self.blocks:
            num_cuts = min(block.num_units or self.num_shards, self.num_shards)
            own = extent if len(self.blocks) == 1 else block.size // num_cuts
            if block.size > num_cuts * own:
                raise StateError(
                    f"{name}: {num_cuts} shards of extent {own} in dim {self.dim}\n"
                    f"They cannot hold the {block.size} of {block}"
                )
            start = min(self.shard * num_cuts // self.num_shards * own, block.size)
            segments.append((begin + start, min(own, block.size - start)))
            begin += block.size
            done += own
        if done != extent:
            raise StateError(
                f"{name}: shard {self.shard} of {self.num_shards} of {self.blocks}\n"
                f"It has extent {done} in dim {self.dim}\n"
                f"The tensor has {extent}"
            )
        return begin, [segment for segment in segments if segment[1]]


def shard_weight(name: str, weight: torch.Tensor, *splits: Split) -> ShardedTensor:
    """Describe the shard of a weight that this rank holds. Copies are compared when it is saved.

    Args:
        name: Global name.
        weight: The local tensor: plain, or a DTensor of the shape of the shard (one that FSDP2
            has cut further). Of a shard of the transpose, pass `weight.t()`.
        *splits: How the dims of the global tensor are cut; dims without one are whole.

    Returns:
        A description by views of `weight`; no parts if all of it is padding.

    Raises:
        StateError: If splits and shape do not fit.
    """
    return shard_parts(name, tuple(weight.shape), parts_of(weight, name), splits)


def shard_parts(
    name: str, shape: tuple[int, ...], parts: Sequence[Part], splits: Sequence[Split]
) -> ShardedTensor:
    """Describe parts of a shard, of which a rank holds them, as parts of the global tensor."""
    global_shape = list(shape)
    segments: list[list[Segment]] = [[(0, extent)] for extent in shape]
    cut = set()
    for split in splits:
        dim = split.dim % len(shape) if -len(shape) <= split.dim < len(shape) else None
        if dim is None or dim in cut:
            raise StateError(
                f"{name}: dim {split.dim} is cut twice or does not exist in shape {shape}"
            )
        cut.add(dim)
        global_shape[dim], segments[dim] = split.segments(shape[dim], name)
    return ShardedTensor(name, tuple(global_shape), _moved(parts, segments), None)


def build_sharded_state_dict(
    state_dict: Mapping[str, object],
    splits: Mapping[str, int | Split | Sequence[Split]],
    prefix: str = "",
    *,
    shard: int,
    num_shards: int,
) -> dict[str, ShardedTensor]:
    """Describe the entries of a layer: what its `sharded_state_dict` method returns.

    Args:
        state_dict: The layer's state dict.
        splits: For each entry that is cut: the dim, a `Split`, or several. Entries that are not
            named are whole. A name without an entry, such as a bias that is off, is ignored.
        prefix: Put before every key and name; ends with a dot unless empty.
        shard: This rank's number in the tensor-parallel group.
        num_shards: Size of that group.

    Returns:
        A `ShardedTensor` for each tensor, by its key behind the prefix.

    Raises:
        StateError: If splits and shapes do not fit.
    """
    result = {}
    for key, entry in state_dict.items():
        if not isinstance(entry, torch.Tensor):
            continue
        cut = splits.get(key, ())
        if isinstance(cut, int):
            cut = Split(cut, shard, num_shards)
        cuts = (cut,) if isinstance(cut, Split) else tuple(cut)
        name = prefix + key
        result[name] = shard_weight(name, entry, *cuts)
    return result


def _moved(parts: Sequence[Part], segments: Sequence[Sequence[Segment]]) -> tuple[Part, ...]:
    """Parts of a local tensor as parts of the global one."""
    moved = []
    for box, local in boxes_of_segments(segments):
        here = Box(local, box.shape)
        for part in parts:
            common = part.box.intersect(here)
            if common is not None:
                data = part.data[common.relative_to(part.box).slices]
                moved.append(Part(common.shift(local, -1).shift(box.offset), data))
    return tuple(moved)
