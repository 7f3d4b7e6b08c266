"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Real Megatron and plain PyTorch load what is written here. Reading goes through the engine, which
finds the bytes of each tensor in the files as they are, so a rank reads what it needs of a chunk
and not the chunk. Flattened ranges are written and read as Megatron before 0.16 has them, though
newer Megatron refuses them; those of irregular grids are written as the boxes that they are.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from operator import mul
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    storage_of,
)
from remesh.compat.megatron.dict_utils import nested_values
from remesh.compat.megatron.mapping import (
    ShardedTensor,
    is_main_replica,
)
from remesh.compat.megatron.strategies import (
    async_utils,
    cached_metadata_filesystem_reader,
    filesystem_async,
    state_dict_saver,
)
from remesh.compat.megatron.strategies.native import (
    Describe,
    EngineLoadShardedStrategy,
    EngineSaveShardedStrategy,
)
from remesh.core.geometry import Box
from remesh.core.sharded import Part
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.exchange import run_on_all
from remesh.formats.checks import integers
from remesh.formats.pickle_records import Record
from remesh.formats.pickle_writer import described, dumps
from remesh.formats.torch_dcp import (
    FLAT_SHAPES,
    METADATA_NAME,
    dtype_of,
    kind_of,
    read_metadata,
    size_of,
)
from remesh.storage import Storage


class TorchDistException(CheckpointingException, CheckpointException):
    """A load of `torch_dist` that failed: the drop-in's exception, and torch's as well."""

    def __init__(self, message: str) -> None:
        CheckpointException.__init__(self, message, {})
        self._message = message

    def __str__(self) -> str:
        return self._message


class TorchDistSaveShardedStrategy(EngineSaveShardedStrategy):
    """Writes backend `torch_dist`: main replicas, in one file a rank, whatever the options say.

    Tensors whose keys begin with `separation_hint` are written to files of their own, whose names
    begin with it; `remove_sharded_tensors` then gives their bytes back. `cached_metadata` sets
    `use_cached_ckpt_structure`. With it, the application takes `cached_global_metadata` from the
    load strategy and sets it here; `validated_loaded_metadata_reuse` then says whether the last
    save had the layout of that checkpoint: each rank wrote the parts that it had written there.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        *,
        writer: Literal["thread", "process"] = "thread",
        **_ignored: Any,
    ) -> None:
        options: dict[str, Any] = (
            {} if separation_hint is None else {"separation_hint": separation_hint}
        )
        super().__init__(backend, version, writer=writer, file_format="torch_dcp", **options)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cached_global_metadata: Metadata | None = None
        self.validated_loaded_metadata_reuse = False

    def _agree(self, sharded_state_dict: Any) -> tuple[Describe, dict[str, object]]:
        """As the class above. Also finds out whether this save has the layout of the loaded one."""
        flat_shapes = _flat_shapes(sharded_state_dict)

        def describe(tensor: ShardedTensor) -> EngineTensor:
            return _engine_range(tensor) if tensor.key in flat_shapes else tensor.to_remesh()

        if self.use_cached_ckpt_structure:
            exchange = exchange_of(None)
            plans = getattr(self.cached_global_metadata, _PLANS, None)
            written = {
                (leaf.key, part.box.offset)
                for leaf in nested_values(sharded_state_dict)
                if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id)
                for part in (() if leaf.data is None else describe(leaf).parts)
            }
            is_same = plans is not None and written == plans.get(exchange.rank, set())
            replies = run_on_all(exchange, lambda: b"1" if is_same else b"")
            self.validated_loaded_metadata_reuse = all(replies)
        return describe, {"flat_shapes": flat_shapes}


def _flat_shapes(sharded_state_dict: Any) -> dict[str, tuple[int, ...]]:
    """The global shapes of the tensors that all ranks describe by flattened ranges. Collective."""
    mine: dict[str, tuple[int, ...] | None] = {}
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor):
            shape = tuple(leaf.global_shape) if _is_grid_of_ranges(leaf) else None
            mine[leaf.key] = shape if mine.get(leaf.key, shape) == shape else None
    # Tensors that no rank describes so do not travel.
    flat = {key for key, shape in mine.items() if shape is not None}
    kinds = list[tuple[str, tuple[int, ...] | None]]

    def gather(keys: set[str]) -> list[tuple[str, tuple[int, ...] | None]]:
        encoded = msgspec.msgpack.encode([(key, mine[key]) for key in mine if key in keys])
        replies = run_on_all(exchange_of(None), lambda: encoded)
        return [one for reply in replies for one in msgspec.msgpack.decode(reply, type=kinds)]

    found = dict(gather(flat))
    if not found:
        return {}
    other = {key for key, shape in gather(found.keys() & mine.keys()) if shape != found[key]}
    return {key: shape for key, shape in found.items() if shape is not None and key not in other}


def _is_grid_of_ranges(tensor: ShardedTensor) -> bool:
    """True if a shard is a flattened range of a part of a regular grid."""
    return tensor.flattened_range is not None and tensor.axis_fragmentations is not None


def _engine_range(tensor: ShardedTensor) -> EngineTensor:
    """A flattened range as Megatron stores it: the number of its part, and its place in that part.

    The stored tensor has the shape of the grid and, as one more dim, the size of a part.
    """
    assert tensor.data is not None
    assert tensor.flattened_range is not None
    assert tensor.axis_fragmentations is not None
    grid, size = tuple(tensor.axis_fragmentations), math.prod(tensor.local_shape)
    start, stop, _ = tensor.flattened_range.indices(size)
    box = Box((*tensor.local_chunk_offset_in_global(), start), (1,) * len(grid) + (stop - start,))
    part = Part(box, tensor.data.detach().view(box.shape))
    return EngineTensor(tensor.key, (*grid, size), (part,), tensor.replica_id)


_PLANS = "all_local_plans"
"""Name of the attribute of the metadata that holds what each rank has written."""

_RANK_OF_FILE = re.compile(r"__(\d+)_\d+")


def _local_plans(found: Metadata) -> dict[int, set[tuple[str, tuple[int, ...]]]]:
    """The keys and offsets of the tensors that each rank has written, by the names of its files."""
    plans: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for index, info in found.storage_data.items():
        rank = _RANK_OF_FILE.search(info.relative_path)
        if rank is not None and index.offset is not None:
            plans.setdefault(int(rank[1]), set()).add((index.fqn, tuple(index.offset)))
    return plans


class TorchDistLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `torch_dist`; options of Megatron's own reader change nothing.

    Metadata are read once for each load, and quantised tensors as they are.
    """

    backend = "torch_dist"
    format = "torch_dcp"

    def __init__(
        self, cache_metadata: bool = True, stream_ckpt_dequant: bool = True, **_ignored: Any
    ) -> None:
        self.cache_metadata = cache_metadata
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self._loaded_dir: Any = None
        self._loaded_metadata: Metadata | None = None

    @property
    def cached_global_metadata(self) -> Metadata | None:
        """The metadata of the last checkpoint that was loaded, read when it is first asked for.

        None if nothing was loaded, or that checkpoint has been removed.
        """
        if self._loaded_metadata is None and self._loaded_dir is not None:
            with as_checkpointing_exception(), suppress(CheckpointNotFoundError):
                found = _torch_metadata(storage_of(self._loaded_dir))
                vars(found)[_PLANS] = _local_plans(found)
                self._loaded_metadata = found
        return self._loaded_metadata

    def _load(
        self, sharded_state_dict: Any, checkpoint_dir: Any, *, group: Any, share_reads: bool | None
    ) -> Any:
        """As the class above, with errors that are torch's `CheckpointException` as well."""
        try:
            loaded = super()._load(
                sharded_state_dict, checkpoint_dir, group=group, share_reads=share_reads
            )
        except CheckpointingException as error:
            raise TorchDistException(str(error)) from error.__cause__
        self._loaded_dir, self._loaded_metadata = checkpoint_dir, None
        return loaded

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Take the tensors and objects whose keys begin with a prefix out. Not collective.

        Files that hold nothing else any more are removed; in others the bytes stay.
        """
        storage = storage_of(checkpoint_dir)
        with as_checkpointing_exception():
            found = _torch_metadata(storage)
            kept = Metadata(
                _without(found.state_dict_metadata, key_prefix),
                _without(found.planner_data or {}, key_prefix) or None,
                {i: info for i, info in found.storage_data.items() if _stays(i.fqn, key_prefix)},
            )
            flat_shapes = getattr(found, FLAT_SHAPES, None)
            if flat_shapes is not None:
                vars(kept)[FLAT_SHAPES] = flat_shapes
            storage.put(METADATA_NAME, dumps(described(kept)), overwrite=True)
            before, after = (
                {info.relative_path for info in metadata.storage_data.values()}
                for metadata in (found, kept)
            )
            for path in before - after:
                storage.delete(path)


def _torch_metadata(storage: Storage) -> Metadata:
    """The metadata in torch's own classes, as Megatron asks for them."""
    record = read_metadata(storage)
    try:
        found = Metadata(
            {name: _entry(entry) for name, entry in record.field("state_dict_metadata").items()},
            {
                name: tuple(key if isinstance(key, int) else str(key) for key in path)
                for name, path in (record.field("planner_data") or {}).items()
            },
            {
                MetadataIndex(
                    key.field("fqn"), _optional_size(key.field("offset")), key.field("index")
                ): _StorageInfo(
                    info.field("relative_path"), info.field("offset"), info.field("length")
                )
                for key, info in record.field("storage_data").items()
            },
        )
        flat_shapes = record.field(FLAT_SHAPES)
        if flat_shapes is not None:
            vars(found)[FLAT_SHAPES] = {
                name: {key: _optional_size(shape) for key, shape in shapes.items()}
                for name, shapes in flat_shapes.items()
            }
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{storage.url}/{METADATA_NAME}: not the metadata of a checkpoint ({error!s:.80})\n"
            "Load another checkpoint, or restore this file from a copy."
        ) from error
    return found


def _entry(entry: Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if kind_of(entry) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    dtype = dtype_of(entry)
    if kind_of(entry) != "TensorStorageMetadata" or dtype is None:
        raise ValueError("an entry that is neither a tensor nor bytes")
    chunks = [
        ChunkStorageMetadata(_size(chunk.field("offsets")), _size(chunk.field("sizes")))
        for chunk in entry.field("chunks")
    ]
    properties = TensorProperties(dtype=getattr(torch, dtype))
    return TensorStorageMetadata(properties, _size(entry.field("size")), chunks)


def _size(value: object) -> torch.Size:
    return torch.Size(integers(size_of(value), METADATA_NAME, "a shape"))


def _optional_size(value: object) -> torch.Size | None:
    return None if value is None else _size(value)


def _stays(key: str, prefix: str) -> bool:
    return not key.startswith(prefix)


def _without(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key: entry for key, entry in entries.items() if _stays(key, prefix)}


# ---------------------------------------------------------------------------------------------
# For code that calls torch.distributed.checkpoint itself, or schedules saves itself
# ---------------------------------------------------------------------------------------------


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """The scheduler of saves beside the training: `mcore`, which the drop-in provides.

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
        ShardedProperties.create_from_tensor(data[0]),
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
