"""What Megatron asks of `strategies.torch` besides the strategies: planners, modules, errors.

For code that calls torch.distributed.checkpoint with its own planners or schedules saves itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.mapping import ShardedTensor
from remesh.compat.megatron.strategies import (
    async_utils,
    cached_metadata_filesystem_reader,
    filesystem_async,
    state_dict_saver,
)


class TorchDistException(CheckpointingException, CheckpointException):
    """A load of `torch_dist` that failed: the drop-in's exception, and torch's as well."""

    def __init__(self, message: str) -> None:
        CheckpointException.__init__(self, message, {})
        self._message = message

    def __str__(self) -> str:
        return self._message


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """What schedules saves beside the training: `mcore`, which the drop-in provides.

    With its classes and functions by name, or the one that `module` names.
    """
    if async_strategy == "nvrx":
        raise ModuleNotFoundError(
            "async_strategy='nvrx' is not supported: nvidia-resiliency-ext writes in a process that"
            " lacks the memory of the drop-in's saves; set async_strategy to 'mcore'"
        )
    if async_strategy != "mcore":
        raise TypeError(f"async_strategy={async_strategy!r} is not supported; set it to 'mcore'")
    places = {
        "AsyncCallsQueue": async_utils,
        "AsyncRequest": async_utils,
        "CachedMetadataFileSystemReader": cached_metadata_filesystem_reader,
        "FileSystemWriterAsync": filesystem_async,
        "_results_queue": filesystem_async,
        "get_write_results_queue": filesystem_async,
        "save_state_dict_async_finalize": state_dict_saver,
        "save_state_dict_async_plan": state_dict_saver,
    }
    found = {name: getattr(place, name) for name, place in places.items()}
    return "mcore", found if module is None else found[module]


def get_reformulation_metadata(
    sharded_state_dict: Any,  # noqa: ARG001 - the interface is Megatron's
    checkpoint_dir: Any,  # noqa: ARG001
) -> dict[str, Any]:
    """The stored tensors that have to be cut before a load: none, the engine reads any boxes."""
    return {}


def _get_filesystem_reader(
    checkpoint_dir: str | os.PathLike[str],
    cache_metadata: bool = False,
    async_strategy: str = "mcore",  # noqa: ARG001 - the interface is Megatron's
) -> FileSystemReader:
    """A reader of torch.distributed.checkpoint; see `CachedMetadataFileSystemReader`."""
    if cache_metadata:
        return cached_metadata_filesystem_reader.CachedMetadataFileSystemReader(checkpoint_dir)
    return FileSystemReader(checkpoint_dir)


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: Sequence[ShardedTensor], rank: int | None = None
) -> TorchShardedTensor:
    """This rank's shards of a regular grid as a `ShardedTensor` of torch. Not collective."""
    rank = dist.get_rank() if rank is None else rank
    elsewhere = (rank + 1) % dist.get_world_size()  # any rank but this one
    data = []
    for one in sh_tens:
        if one.data is None or one.flattened_range is not None:
            raise CheckpointingException(f"{one.key}: only a shard with data that is one box")
        data.append(one.data[(None,) * one.prepend_axis_num].contiguous())
    first = sh_tens[0]
    if first.axis_fragmentations is None:
        raise CheckpointingException(f"{first.key}: only shards of a grid")
    local = [
        Shard.from_tensor_and_offsets(tensor, list(one.global_offset), rank)
        for tensor, one in zip(data, sh_tens, strict=True)
    ]
    here = {tuple(one.global_offset) for one in sh_tens}
    shape = data[0].shape
    places = product(*(range(count) for count in first.axis_fragmentations))
    offsets = [tuple(map(mul, place, shape)) for place in places]
    described = [
        ShardMetadata(
            list(offset),
            list(shape),
            f"rank:{rank if offset in here else elsewhere}/{data[0].device}",
        )
        for offset in offsets
    ]
    metadata = ShardedTensorMetadata(
        described,
        torch.Size(first.global_shape),
        TensorProperties.create_from_tensor(data[0]),
    )
    return TorchShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)  # noqa: SLF001


class MCoreSavePlanner(DefaultSavePlanner):
    """Torch's own planner; shards come as they are."""


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Torch's own planner, with a check of global shapes.

    Those of `allow_shape_mismatch_sharded_tensors` may be stored with another one. Quantised
    tensors are read as they are, whatever `stream_ckpt_dequant` is.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        stream_ckpt_dequant: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors or {}
        self.stream_ckpt_dequant = stream_ckpt_dequant

    def _validate_global_shapes(
        self, metadata: Metadata, sharded_tensors: Iterable[ShardedTensor]
    ) -> None:
        for tensor in sharded_tensors:
            entry: Any = metadata.state_dict_metadata.get(tensor.key)
            if entry is None:
                raise KeyError(
                    f"{tensor.key} from model not in state dict; ask for keys that are stored"
                )
            if tuple(entry.size) != tuple(tensor.global_shape):
                raise CheckpointingException(
                    f"Global shape mismatch for loaded ({entry.size}) and expected "
                    f"({tensor.global_shape}) tensor for key {tensor.key}; set "
                    "allow_shape_mismatch, or ask for the stored shape"
                )

    def create_local_plan(self) -> LoadPlan:
        """Torch's plan, after the check."""
        metadata = self.metadata
        assert metadata is not None
        self._validate_global_shapes(metadata, self.shapes_validation_sharded_tensors)
        entries: Any = metadata.state_dict_metadata
        sizes = {key: entries[key].size for key in self.allow_shape_mismatch_sharded_tensors}
        try:
            for key, tensor in self.allow_shape_mismatch_sharded_tensors.items():
                entries[key].size = tensor.global_shape
            return super().create_local_plan()
        finally:
            for key, size in sizes.items():
                entries[key].size = size
