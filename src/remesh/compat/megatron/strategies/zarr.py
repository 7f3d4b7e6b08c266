"""The backend `zarr`: a folder of plain chunk files for each tensor, in zarr's version 2.

It is the older of Megatron's formats, for checkpoints that exist and tools that want them. A save
does not replace a zarr checkpoint, because its files have fixed names; save to another directory.
"""

from __future__ import annotations

from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy
from remesh.compat.megatron.strategies.foreign import ForeignSaveShardedStrategy


class ZarrSaveShardedStrategy(ForeignSaveShardedStrategy):
    """Writes backend `zarr`."""

    def __init__(self, backend: str = "zarr", version: int = 1) -> None:
        super().__init__(backend, version, file_format="zarr")


class ZarrLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads backend `zarr`."""

    backend = "zarr"
    format = "zarr"
