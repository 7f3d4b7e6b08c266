"""The backend `zarr`: a folder of plain chunk files for each tensor, in zarr's version 2.

It is the older of Megatron's formats, and only read.
"""

from __future__ import annotations

from remesh.compat.megatron.strategies.native import RemeshLoadShardedStrategy


class ZarrLoadShardedStrategy(RemeshLoadShardedStrategy):
    """Reads backend `zarr`."""

    backend = "zarr"
    format = "zarr"
