"""Common state in `common.pt`, and sharded objects in files of their own, as Megatron has them.

Both are files of `torch.save`, because Megatron reads no others. They are written of plain values
only, tensors and numpy arrays included, and read by remesh's restricted unpickler: what a file may
not ask for is an error that names it, and `remesh.formats.Source(path, allow=...)` allows it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.opened import Checkpoint
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    on_all_ranks,
    require_known,
    source_of,
    storage_of,
)
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.mapping import ShardedObject, is_main_replica
from remesh.compat.megatron.strategies.base import (
    LoadCommonStrategy,
    OneBackend,
    SaveCommonStrategy,
)
from remesh.core.state import Path, assemble
from remesh.core.values import encode_object
from remesh.errors import CheckpointNotFoundError
from remesh.exchange import Alone, run_on_one
from remesh.formats.archive import archive_of, read_archive
from remesh.formats.table import place_of
from remesh.formats.torch_dcp import COMMON_NAME, opaque

COMMON_STATE_FNAME = COMMON_NAME
"""The file of the common state."""


def torch_bytes(value: Any, where: str) -> bytes:
    """The bytes of `torch.save` for a value; an error if the restricted unpickler refuses them."""
    encode_object(value, where)
    return archive_of(value, where)


def read_torch_file(checkpoint_dir: Any, path: str) -> Any:
    """The value in a file of `torch.save`, through the restricted unpickler."""
    place = place_of(checkpoint_dir)
    data, where = place.storage.read(path), f"{place.storage.url}/{path}"
    archive = read_archive(io.BytesIO(data), where, allow=place.allow)
    return require_known(opaque(archive, data, 0), where)


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes `common.pt` on rank 0, and an object's file where its main replica is."""

    can_handle_sharded_objects = True

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        self.prepare_common(common_state_dict, checkpoint_dir)()

    def prepare_common(self, common_state_dict: Any, checkpoint_dir: Any) -> Callable[[], None]:
        """Collective, and so is what it returns."""
        exchange, encoded = exchange_of(None), []

        def encode() -> bytes:
            encoded.append(torch_bytes(common_state_dict, "common state"))
            return b""

        def put() -> bytes:
            storage_of(checkpoint_dir).put(COMMON_NAME, encoded[0], overwrite=True)
            return b""

        def write() -> None:
            with as_checkpointing_exception():
                run_on_one(exchange, put)

        with as_checkpointing_exception():
            run_on_one(exchange, encode)
        return write

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> None:
        storage = storage_of(checkpoint_dir)

        def write() -> None:
            for item in nested_values(sharded_objects_state_dict):
                if is_main_replica(item.replica_id):
                    data = torch_bytes(item.data, item.unique_key)
                    storage.put(f"{item.unique_key}.pt", data, overwrite=True)

        on_all_ranks(write)


class TorchCommonLoadStrategy(OneBackend, LoadCommonStrategy):
    """Reads what `TorchCommonSaveStrategy` and Megatron write."""

    backend = "torch"
    can_handle_sharded_objects = True

    def load_common(self, checkpoint_dir: Any) -> Any:
        # Newer Megatron keeps the common state among the objects.
        with as_checkpointing_exception():
            if storage_of(checkpoint_dir).exists(COMMON_NAME):
                return read_torch_file(checkpoint_dir, COMMON_NAME)
            return _common_among_objects(checkpoint_dir)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        def read(item: ShardedObject) -> Any:
            try:
                return read_torch_file(checkpoint_dir, f"{item.unique_key}.pt")
            except CheckpointNotFoundError as error:
                raise CheckpointingException(
                    f"{checkpoint_dir}: no object {item.unique_key} is stored"
                ) from error

        return on_all_ranks(lambda: dict_list_map_outplace(read, sharded_objects_state_dict))

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        found: dict[str, ShardedObject] = {}
        for path in storage_of(checkpoint_dir).list():
            if path.endswith(".pt") and "/shard_" in path:
                item = ShardedObject.empty_from_unique_key(path.removesuffix(".pt"))
                found[item.unique_key] = item
        return found


def _common_among_objects(checkpoint_dir: Any) -> Any:
    """The common state of newer Megatron, which the engine finds nested: sharded things are not."""
    source = source_of(checkpoint_dir, "torch_dcp")
    stored = open_shared(Alone(), source)
    document = stored.document
    leaves: dict[Path, object] = {
        document.path_of(name): require_known(stored.value(name), f"{checkpoint_dir}: {name}")
        for name in document.values
    }
    nested = [name for name in stored.index if document.path_of(name) != (name,)]
    if nested:
        checkpoint = Checkpoint(source)
        leaves.update({document.path_of(name): checkpoint.read(name) for name in nested})
    return assemble(leaves, stored.sequences)
