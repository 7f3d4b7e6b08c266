"""Shards as torch.distributed.checkpoint takes them, for code that calls it with shards directly.

The drop-in's own saves and loads do not go through these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import mul
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.mapping import ShardedTensor


class _Protocol(torch.Tensor):
    """What both classes share: no operation is defined on them."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, *_: Any, **__: Any
    ) -> NoReturn:
        raise NotImplementedError(
            f"{func}: a {cls.__name__} describes shards to torch.distributed.checkpoint\n"
            "Use the data of its ShardedTensor"
        )


class CheckpointableShardedTensor(_Protocol):
    """One shard; made by `from_sh_ten`."""

    _sh_ten: ShardedTensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, torch.Size(sh_ten.global_shape), dtype=data.dtype
        )
        assert isinstance(made, cls)
        return made

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:  # noqa: ARG002
        self._sh_ten = sh_ten

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> Self:
        """Wrap a shard.

        Raises:
            CheckpointingException: If it has no data or is a flattened range.
        """
        if sh_ten.data is None or sh_ten.flattened_range is not None:
            raise CheckpointingException(f"{sh_ten.key}: only a shard with data that is one box")
        return cls(sh_ten.data, sh_ten)

    def __create_write_items__(
        self, fqn: str, tensor: CheckpointableShardedTensor, index: int | None = None
    ) -> list[WriteItem]:
        """What torch.distributed.checkpoint is to write."""
        shard = tensor._sh_ten
        assert shard.data is not None
        return [
            WriteItem(
                index=MetadataIndex(fqn, shard.global_offset, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    self.__create_chunk_list__()[0],
                    TensorProperties.create_from_tensor(shard.data),
                    torch.Size(shard.global_shape),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The box of the shard."""
        shape = (1,) * self._sh_ten.prepend_axis_num + tuple(self._sh_ten.local_shape)
        return [ChunkStorageMetadata(torch.Size(self._sh_ten.global_offset), torch.Size(shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data."""
        assert self._sh_ten.data is not None, index
        return self._sh_ten.data[(None,) * self._sh_ten.prepend_axis_num]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._sh_ten})"


class LocalShardsContainer(_Protocol):
    """Several shards of one tensor on one rank.

    Args:
        local_shards: The shards.
    """

    _local_shards: list[CheckpointableShardedTensor]

    @staticmethod
    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor]) -> Self:
        if not local_shards:
            raise CheckpointingException("a container of shards needs at least one")
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, local_shards[0].size(), dtype=local_shards[0].dtype
        )
        assert isinstance(made, cls)
        return made

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = list(local_shards)

    def __create_write_items__(self, fqn: str, container: LocalShardsContainer) -> list[WriteItem]:
        """What torch.distributed.checkpoint is to write."""
        return [
            item
            for number, shard in enumerate(container._local_shards)
            for item in shard.__create_write_items__(fqn, shard, number)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes of the shards."""
        return [chunk for shard in self._local_shards for chunk in shard.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data of the shard at an offset.

        Raises:
            ValueError: If there is none.
        """
        for shard in self._local_shards:
            if index.offset == shard.__create_chunk_list__()[0].offsets:
                return shard.__get_tensor_shard__(index)
        raise ValueError(f"{index.fqn}: this rank has no shard at offset {index.offset}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_shards})"


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: Sequence[ShardedTensor], rank: int | None = None
) -> TorchShardedTensor:
    """This rank's shards of a tensor as a `ShardedTensor` of torch. Not collective.

    Args:
        sh_tens: The shards, of a regular grid.
        rank: The rank of this process; by default that in the default process group.

    Raises:
        CheckpointingException: If one has no data or is a flattened range, or they are no grid.
    """
    rank = dist.get_rank() if rank is None else rank
    elsewhere = (rank + 1) % dist.get_world_size()  # any rank but this one
    shards = [CheckpointableShardedTensor.from_sh_ten(one) for one in sh_tens]
    first = sh_tens[0]
    if first.axis_fragmentations is None:
        raise CheckpointingException(f"{first.key}: only shards of a grid")
    boxes = [one.__create_chunk_list__()[0] for one in shards]
    data = [one.__get_tensor_shard__(MetadataIndex(first.key)).contiguous() for one in shards]
    local = [
        Shard.from_tensor_and_offsets(tensor, list(box.offsets), rank)
        for tensor, box in zip(data, boxes, strict=True)
    ]
    here = {box.offsets for box in boxes}
    shape = boxes[0].sizes
    places = product(*(range(count) for count in first.axis_fragmentations))
    offsets = [torch.Size(map(mul, place, shape)) for place in places]
    described = [
        ShardMetadata(
            list(offset),
            list(shape),
            f"rank:{rank if offset in here else elsewhere}/{data[0].device}",
        )
        for offset in offsets
    ]
    metadata = ShardedTensorMetadata(
        described, torch.Size(first.global_shape), ShardProperties.create_from_tensor(data[0])
    )
    return TorchShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)  # noqa: SLF001
