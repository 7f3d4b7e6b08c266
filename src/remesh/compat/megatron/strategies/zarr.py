"""The backend `zarr`: a folder of plain chunk files for each tensor, in zarr's version 2.

It is the older of Megatron's formats, and only read.
"""

from __future__ import annotations

from typing import Any

from remesh.compat.megatron.core import storage_of
from remesh.compat.megatron.strategies.native import EngineLoadShardedStrategy
from remesh.formats.zarr import ARRAY_NAME


class ZarrLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `zarr`."""

    backend = "zarr"
    format = "zarr"

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        storage = storage_of(checkpoint_dir)
        removed = [
            f"{key}/"
            for key in self.load_tensors_metadata(checkpoint_dir)
            if key.startswith(key_prefix)
        ]
        paths = [path for path in storage.list() if path.startswith(tuple(removed))]
        # The file that makes an array exist goes first.
        for path in sorted(paths, key=lambda path: not path.endswith(f"/{ARRAY_NAME}")):
            storage.delete(path)
