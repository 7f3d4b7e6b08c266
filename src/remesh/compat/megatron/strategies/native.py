"""The backend `remesh`: remesh's own format, and the default of the drop-in.

Everything is in one commit: tensors, objects, and the common state as an object of its own, so
there is no `common.pt`, and nothing is a pickle. `metadata.json` lies beside.
"""

from __future__ import annotations

from typing import Any, Literal

from remesh.compat.megatron.boxes import COMMON_KEY
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    storage_of,
)
from remesh.compat.megatron.mapping import ShardedObject
from remesh.compat.megatron.objects import decode_object
from remesh.compat.megatron.strategies.base import (
    LoadCommonStrategy,
    OneBackend,
    SaveCommonStrategy,
)
from remesh.compat.megatron.strategies.engine import (
    EngineLoadShardedStrategy,
    EngineSaveShardedStrategy,
)
from remesh.core.index import Index
from remesh.formats import native


def common_object(common_state_dict: Any, rank: int) -> ShardedObject:
    """The common state as an object that rank 0 writes."""
    return ShardedObject(
        COMMON_KEY, common_state_dict if rank == 0 else None, (1,), (0,), replica_id=min(rank, 1)
    )


class RemeshSaveShardedStrategy(EngineSaveShardedStrategy):
    """Writes remesh's own format; arguments as of `EngineSaveShardedStrategy`."""

    def __init__(
        self,
        backend: str = "remesh",
        version: int = 1,
        *,
        writer: Literal["thread", "process"] = "thread",
    ) -> None:
        super().__init__(backend, version, writer=writer)


class RemeshLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads remesh's own format."""

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Take the tensors whose keys begin with a prefix out of the index. Not collective.

        Readers see the checkpoint with them until they see it without. Their bytes stay in the data
        files, which hold others too.
        """
        storage = storage_of(checkpoint_dir)
        with as_checkpointing_exception():
            files = native.read_small_files(storage)
            index = Index.decode(files.index_bytes, storage.url).without(
                lambda name: name.startswith(key_prefix)
            )
            native.replace_index(storage, files.record, index)


class RemeshSaveCommonStrategy(SaveCommonStrategy):
    """Stands for the common state that is saved with the sharded part, in one commit.

    `save` hands it over to the sharded strategy, so it is never called.
    """

    def __init__(self, backend: str = "remesh", version: int = 1) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        raise CheckpointingException(
            f"{checkpoint_dir}: backend remesh has no file of its own for the "
            f"{len(common_state_dict)} entries of the common state\nSave with "
            "sharded_strategy=('remesh', 1), or take common_strategy=('torch', 1)"
        )


class RemeshLoadCommonStrategy(OneBackend, LoadCommonStrategy):
    """Reads the common state of remesh's own format."""

    backend = "remesh"

    def load_common(self, checkpoint_dir: Any) -> Any:
        with as_checkpointing_exception():
            stored = RemeshLoadShardedStrategy().stored_state(checkpoint_dir)
            element = stored.document.objects.get(common_object({}, 0).unique_key)
            if element is None:
                raise CheckpointingException(f"{checkpoint_dir}: no common state is stored here")
            return decode_object(bytes(element.value), f"{checkpoint_dir}: common state")

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        return RemeshLoadShardedStrategy().load(sharded_objects_state_dict, checkpoint_dir)
