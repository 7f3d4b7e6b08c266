"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Real Megatron and plain PyTorch load what is written here. Reading goes through the engine, which
finds the bytes of each tensor in the files as they are, so a rank reads what it needs of a chunk
and not the chunk. Flattened ranges are written and read as Megatron before 0.16 has them, though
newer Megatron refuses them; those of irregular grids are written as the boxes that they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    storage_of,
)
from remesh.compat.megatron.dict_utils import nested_values
from remesh.compat.megatron.mapping import ShardedTensor
from remesh.compat.megatron.strategies.native import (
    RemeshLoadShardedStrategy,
    RemeshSaveShardedStrategy,
)
from remesh.errors import CorruptCheckpointError
from remesh.exchange import run_on_all
from remesh.formats.pickle_records import Record
from remesh.formats.pickle_writer import dumps
from remesh.formats.torch_dcp import METADATA_NAME, read_metadata


class TorchDistException(CheckpointingException, CheckpointException):
    """A load of `torch_dist` that failed: the drop-in's exception, and torch's as well."""

    def __init__(self, message: str) -> None:
        CheckpointException.__init__(self, message, {})
        self._message = message

    def __str__(self) -> str:
        return self._message


class TorchDistSaveShardedStrategy(RemeshSaveShardedStrategy):
    """Writes backend `torch_dist`: main replicas, in one file a rank, whatever the options say.

    Tensors whose keys begin with `separation_hint` are written to files of their own, whose names
    begin with it; `remove_sharded_tensors` then gives their bytes back. A plan is kept while the
    layout stays the same, also without `cached_metadata`.
    """

    format = "torch_dcp"

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,  # noqa: ARG002 - the interface is Megatron's
        separation_hint: str | None = None,
        *,
        writer: Literal["thread", "process"] = "thread",
        **_ignored: Any,
    ) -> None:
        hint = {} if separation_hint is None else {"separation_hint": separation_hint}
        super().__init__(backend, version, writer=writer, format_options=hint)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.separation_hint = separation_hint

    def _format_options(self, sharded_state_dict: Any) -> dict[str, Any]:
        return {"flat_shapes": _flat_shapes(sharded_state_dict)}

    def _stored_form(self, leaf: Any, options: dict[str, Any]) -> Any:
        # What has no data is left to the engine, which refuses it on all ranks.
        is_tensor = isinstance(leaf, ShardedTensor) and leaf.data is not None
        is_flat = is_tensor and leaf.key in options["flat_shapes"]
        return _as_megatron_has_it(leaf) if is_flat else leaf


def _flat_shapes(sharded_state_dict: Any) -> dict[str, tuple[int, ...]]:
    """The global shapes of the tensors that all ranks describe by flattened ranges. Collective."""
    mine: dict[str, tuple[int, ...] | None] = {}
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor):
            shape = tuple(map(int, leaf.global_shape)) if _is_grid_of_ranges(leaf) else None
            mine[leaf.key] = shape if mine.get(leaf.key, shape) == shape else None
    kinds = list[tuple[str, tuple[int, ...] | None]]

    def gather(keys: set[str]) -> list[tuple[str, tuple[int, ...] | None]]:
        encoded = msgspec.msgpack.encode([(key, mine[key]) for key in mine if key in keys])
        replies = run_on_all(exchange_of(None), lambda: encoded)
        return [one for reply in replies for one in msgspec.msgpack.decode(reply, type=kinds)]

    # Tensors that no rank describes so do not travel.
    found = dict(gather({key for key, shape in mine.items() if shape is not None}))
    if not found:
        return {}
    other = {key for key, shape in gather(found.keys() & mine.keys()) if shape != found[key]}
    return {key: shape for key, shape in found.items() if shape is not None and key not in other}


def _is_grid_of_ranges(tensor: ShardedTensor) -> bool:
    """True if a shard is a flattened range of a part of a regular grid."""
    return tensor.flattened_range is not None and tensor.axis_fragmentations is not None


def _as_megatron_has_it(tensor: ShardedTensor) -> ShardedTensor:
    """A flattened range as Megatron stores it: the number of its part, and its place in that part.

    The stored tensor has the shape of the grid and, as one more dim, the size of a part.
    """
    assert tensor.data is not None
    assert tensor.flattened_range is not None
    assert tensor.axis_fragmentations is not None
    grid, size = tuple(tensor.axis_fragmentations), math.prod(tensor.local_shape)
    start = tensor.flattened_range.indices(size)[0]
    return replace(
        tensor,
        local_shape=tuple(tensor.data.shape),
        global_shape=(*grid, size),
        global_offset=(*tensor.local_chunk_offset_in_global(), start),
        axis_fragmentations=None,
        prepend_axis_num=len(grid),
        flattened_range=None,
    )


class TorchDistLoadShardedStrategy(RemeshLoadShardedStrategy):
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

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """As the class above, with errors that are torch's `CheckpointException` as well."""
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        except CheckpointingException as error:
            raise TorchDistException(str(error)) from error.__cause__

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Take the tensors and objects whose keys begin with a prefix out. Not collective.

        Files that hold nothing else any more are removed; in others the bytes stay.
        """
        storage = storage_of(checkpoint_dir)
        with as_checkpointing_exception():
            found = read_metadata(storage)
            places: dict[Record, Record] = found.field("storage_data")
            try:
                kept = {
                    key: at
                    for key, at in places.items()
                    if not key.field("fqn").startswith(key_prefix)
                }
                data = dumps(_metadata_of(found, kept, key_prefix), 4)
                before, after = (
                    {at.field("relative_path") for at in some.values()} for some in (places, kept)
                )
            except (AttributeError, TypeError, ValueError) as error:
                raise CorruptCheckpointError(
                    f"{storage.url}/{METADATA_NAME}: not the metadata of a checkpoint "
                    f"({error!s:.80})\nLoad another checkpoint, or restore this file from a copy."
                ) from error
            storage.put(METADATA_NAME, data, overwrite=True)
            for path in before - after:
                storage.delete(path)


def _metadata_of(found: Record, places: dict[Record, Record], without: str) -> Record:
    """The metadata without the names that begin with a prefix."""
    state = {**found.state, "storage_data": places}
    for name in ("state_dict_metadata", "planner_data"):
        if state.get(name) is not None:
            entries = state[name].items()
            state[name] = {key: entry for key, entry in entries if not key.startswith(without)}
    state.pop("all_local_plans", None)
    return Record(found.name, found.args, found.is_new, state)
