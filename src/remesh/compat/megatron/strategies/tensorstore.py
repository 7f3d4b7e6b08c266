"""The backend `zarr` under the name of the library by which Megatron before 0.16 reads it."""

from __future__ import annotations

from remesh.compat.megatron.strategies.zarr import ZarrLoadShardedStrategy


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Reads backend `zarr`, without TensorStore, always into the memory of the shards."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        self.load_directly_on_device = load_directly_on_device
