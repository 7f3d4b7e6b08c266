"""The backend `torch_dist`: checkpoints of torch.distributed.checkpoint, as Megatron lays them out.

Real Megatron and plain PyTorch load what is written here. Reading goes through the engine, which
finds the bytes of each tensor in the files as they are, so a rank reads what it needs of a chunk
and not the chunk. Flattened ranges are written as the boxes that they are, and those of older
Megatron are read, though newer Megatron refuses them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from remesh.compat.megatron.core import as_checkpointing_exception, storage_of
from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy
from remesh.compat.megatron.strategies.foreign import ForeignSaveShardedStrategy
from remesh.formats import restricted_pickle
from remesh.formats.torch_dcp import METADATA_CLASSES, METADATA_NAME


class TorchDistSaveShardedStrategy(ForeignSaveShardedStrategy):
    """Writes backend `torch_dist`."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        super().__init__(backend, version, file_format="torch_dcp")


class TorchDistLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `torch_dist`."""

    backend = "torch_dist"
    format = "torch_dcp"

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Take the tensors and objects whose keys begin with a prefix out. Not collective.

        Files that hold nothing else any more are removed; in others the bytes stay.

        Raises:
            CheckpointingException: If there is no checkpoint, or it is damaged.
        """
        storage = storage_of(checkpoint_dir)
        with as_checkpointing_exception():
            # torch's own classes, which only hold what they are given, so that torch's own pickle
            # of them can be written again.
            found: Metadata = restricted_pickle.loads(
                storage.read(METADATA_NAME),
                f"{storage.url}/{METADATA_NAME}",
                allow=METADATA_CLASSES,
            )
            kept = Metadata(
                _without(found.state_dict_metadata, key_prefix),
                _without(found.planner_data or {}, key_prefix) or None,
                {i: info for i, info in found.storage_data.items() if _stays(i.fqn, key_prefix)},
            )
            flat_shapes = getattr(found, "mcore_data", None)
            if flat_shapes is not None:
                vars(kept)["mcore_data"] = flat_shapes
            storage.put(METADATA_NAME, pickle.dumps(kept), overwrite=True)
            before, after = (
                {info.relative_path for info in metadata.storage_data.values()}
                for metadata in (found, kept)
            )
            for path in before - after:
                storage.delete(path)


def _stays(key: str, prefix: str) -> bool:
    return not key.startswith(prefix)


def _without(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key: entry for key, entry in entries.items() if _stays(key, prefix)}
