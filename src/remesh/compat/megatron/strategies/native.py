"""The backend `remesh`: remesh's own format, and the default of the drop-in.

Everything is in one commit: tensors, objects, and the common state as an object of its own, so
there is no `common.pt`, and nothing is a pickle. `metadata.json` lies beside.

An asynchronous save is cut at the points that Megatron's callers know: the ranks agree when the
request is made, the state is staged when it is scheduled, files are written in the background, and
finalizing commits.
"""

from __future__ import annotations

from typing import Any

import msgspec

from remesh.checkpoint.agreement import Agreement, PlanCache, SaveOptions, agree
from remesh.checkpoint.commit import commit, remove_files
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.saving import part_of, save_agreed
from remesh.compat.megatron.boxes import COMMON_KEY
from remesh.compat.megatron.core import CheckpointingException, as_checkpointing_exception
from remesh.compat.megatron.mapping import ShardedObject
from remesh.compat.megatron.objects import unpack
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    SaveCommonStrategy,
)
from remesh.compat.megatron.strategies.engine import EngineLoadShardedStrategy, state_to_save
from remesh.events import emitter, ignore
from remesh.exchange import Alone, Exchange, run_joined
from remesh.formats import native
from remesh.pipeline.arena import Arena
from remesh.pipeline.stage import StagedFile
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import Storage, open_storage
from remesh.values import decode

_OPTIONS = SaveOptions(overwrite=True, metadata={})
"""Megatron saves over whatever is there; readers see the old checkpoint until the new one is."""


def common_object(common_state_dict: Any, rank: int) -> ShardedObject:
    """The common state as an object that rank 0 writes."""
    return ShardedObject(
        COMMON_KEY, common_state_dict if rank == 0 else None, (1,), (0,), replica_id=min(rank, 1)
    )


class RemeshSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Writes remesh's own format.

    An instance keeps the plan and the host memory of its last save: as long as the layout stays the
    same, the ranks only compare fingerprints.

    Args:
        backend: Always `remesh`.
        version: Always 1.
    """

    def __init__(self, backend: str = "remesh", version: int = 1) -> None:
        super().__init__(backend, version)
        self._cache = PlanCache()
        self._arena = Arena(CHUNK_SIZE, CHUNK_SIZE)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are written with the tensors."""
        return True

    @property
    def num_plans_reused(self) -> int:
        """How many saves used the plan of an earlier one."""
        return self._cache.hits

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save; returns when the checkpoint is durable. Collective.

        Raises:
            CheckpointingException: On every rank, if something cannot be stored.
        """
        with as_checkpointing_exception():
            save_agreed(
                state_to_save(sharded_state_dict),
                checkpoint_dir,
                _OPTIONS,
                group=None,
                cache=self._cache,
                on_event=ignore,
            )

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Prepare a save. Collective.

        Raises:
            CheckpointingException: On every rank, if something cannot be stored.
        """
        exchange, storage = exchange_of(None), open_storage(checkpoint_dir)
        with as_checkpointing_exception():
            mine = agree(
                exchange,
                storage,
                state_to_save(sharded_state_dict),
                _OPTIONS,
                cache=self._cache,
                emit=emitter(ignore, exchange.rank),
            )
        self._arena.grow((mine.layout.num_chunks + 1) * CHUNK_SIZE)
        save = _PreparedSave(exchange, storage, mine, self._arena)
        return AsyncRequest(save.write, (), [save.finalize], preload_fn=save.stage)


class _PreparedSave:
    """A save after the ranks have agreed; its methods are the steps, in order."""

    def __init__(self, exchange: Exchange, storage: Storage, mine: Agreement, arena: Arena) -> None:
        self._exchange = exchange
        self._storage = storage
        self._mine = mine
        self._staged = StagedFile(mine.layout, arena)
        self._part = native.NO_PART
        self._error: Exception | None = None

    def stage(self) -> None:
        """Copy this rank's share out of the trainer's memory. A failure is kept for `finalize`."""
        if self._mine.path:
            try:
                self._staged.stage(lambda _size: None)
            except Exception as error:  # noqa: BLE001 - every rank raises it in `finalize`
                self._error = error

    def write(self, _staged: object = None) -> None:
        """Write this rank's file. A failure is kept for `finalize`."""
        if not self._mine.path:
            return
        try:
            written = self._staged.write(self._storage, self._mine.path, lambda _size: None)
            self._storage.sync()
            if written is not None:
                self._part = part_of(self._mine, written)
        except Exception as error:  # noqa: BLE001 - every rank raises it in `finalize`
            self._error = self._error or error

    def finalize(self) -> None:
        """Commit. Collective.

        Raises:
            CheckpointingException: On every rank, if one could not stage or write.
        """

        def tell() -> bytes:
            if self._error is not None:
                raise self._error
            return msgspec.msgpack.encode(self._part)

        def join(replies: list[bytes]) -> list[bytes]:
            parts = [msgspec.msgpack.decode(reply, type=native.Part) for reply in replies]
            emit = emitter(ignore, self._exchange.rank)
            commit(self._storage, self._mine.coordinator, parts, emit)
            return [b""] * self._exchange.world_size

        with as_checkpointing_exception():
            run_joined(
                self._exchange,
                tell,
                join,
                lambda: remove_files(self._storage, self._mine.save_id),
            )


class RemeshLoadShardedStrategy(EngineLoadShardedStrategy):
    """Reads remesh's own format."""

    backend = "remesh"


class RemeshSaveCommonStrategy(SaveCommonStrategy):
    """Stands for the common state that is saved with the sharded part, in one commit.

    `save` hands it over to the sharded strategy, so it is never called.
    """

    def __init__(self, backend: str = "remesh", version: int = 1) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        """Refuse: there is no file of its own to write.

        Raises:
            CheckpointingException: Always.
        """
        raise CheckpointingException(
            f"{checkpoint_dir}: backend remesh has no file of its own for the "
            f"{len(common_state_dict)} entries of the common state; save with "
            "sharded_strategy=('remesh', 1), or take common_strategy=('torch', 1)"
        )


class RemeshLoadCommonStrategy(LoadCommonStrategy):
    """Reads the common state of remesh's own format."""

    def load_common(self, checkpoint_dir: Any) -> Any:
        """The common state, read by this process alone."""
        with as_checkpointing_exception():
            stored = open_shared(Alone(), open_storage(checkpoint_dir))
            element = stored.document.objects.get(common_object({}, 0).unique_key)
            if element is None:
                raise CheckpointingException(f"{checkpoint_dir}: no common state is stored here")
            return unpack(decode(bytes(element.value)))

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        """The sharded objects of a state dict, loaded."""
        return RemeshLoadShardedStrategy().load(sharded_objects_state_dict, checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """See `LoadStrategyBase`."""
        if loaded_backend != "remesh":
            raise CheckpointingException(f"the common state is stored by {loaded_backend!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """See `LoadStrategyBase`."""
        if loaded_version != 1:
            raise CheckpointingException(f"common state of version {loaded_version} is not known")
