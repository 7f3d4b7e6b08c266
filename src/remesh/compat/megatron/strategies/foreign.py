"""Saving in the formats that Megatron itself writes, `torch_dist` and `zarr`.

The engine lays out the files as those formats want them (`remesh.checkpoint.foreign`). A save
beside the training copies what this rank writes when the request is made; files are written in the
background, and finalizing makes the checkpoint exist. The common state is not the engine's business
here: it is in `common.pt`, which its own strategy has written before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from remesh.checkpoint import foreign
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.save_plan import SaveOptions
from remesh.compat.megatron.core import as_checkpointing_exception, storage_of
from remesh.compat.megatron.dict_utils import dict_list_map_outplace
from remesh.compat.megatron.mapping import ShardedTensor, is_main_replica
from remesh.compat.megatron.strategies.async_utils import AsyncRequest, run_here
from remesh.compat.megatron.strategies.base import AsyncSaveShardedStrategy
from remesh.compat.megatron.strategies.engine import state_to_save
from remesh.errors import NotSharedError
from remesh.events import emitter, ignore
from remesh.exchange import Exchange, run_joined
from remesh.formats.framing import Saved, SmallFile, Writer
from remesh.formats.torch_dcp import COMMON_NAME
from remesh.pipeline import write_file


class ForeignSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves in a format of another system.

    Args:
        backend: What `metadata.json` calls it.
        version: Its version.
        file_format: What the engine calls it.
    """

    def __init__(self, backend: str, version: int, *, file_format: str) -> None:
        super().__init__(backend, version)
        self._writer = _without_common_state(foreign.writer_of(file_format))

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are written with the tensors."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save; returns when the checkpoint is durable. Collective.

        Raises:
            CheckpointingException: On every rank, if something cannot be stored.
        """
        self._prepared(sharded_state_dict, checkpoint_dir).execute_sync()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Prepare a save. The state may change as soon as this returns. Collective.

        Raises:
            CheckpointingException: On every rank, if something cannot be stored.
        """
        return self._prepared(dict_list_map_outplace(_copied, sharded_state_dict), checkpoint_dir)

    def _prepared(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        exchange = exchange_of(None)
        with as_checkpointing_exception():
            planned = foreign.prepare(
                exchange,
                storage_of(checkpoint_dir),
                state_to_save(sharded_state_dict),
                self._writer,
                SaveOptions(overwrite=True, metadata={}),
                emit=emitter(ignore, exchange.rank),
            )
        save = _PreparedSave(exchange, planned)
        return AsyncRequest(run_here, (None, save.write), [save.finalize])


def _without_common_state(writer: Writer) -> Writer:
    """The writer, leaving alone the common state that is there already."""

    def small_files(saved: Saved) -> Sequence[SmallFile]:
        return [file for file in writer.small_files(saved) if file[0] != COMMON_NAME]

    return replace(writer, small_files=small_files)


def _copied(leaf: Any) -> Any:
    """The leaf with a copy of its data in host memory, if this rank writes it."""
    if not isinstance(leaf, ShardedTensor) or leaf.data is None:
        return leaf
    if not is_main_replica(leaf.replica_id):
        return leaf
    return replace(leaf, data=leaf.data.detach().to("cpu", copy=True))


class _PreparedSave:
    """A save after the ranks have agreed; its methods are the steps, in order."""

    def __init__(self, exchange: Exchange, planned: foreign.ForeignSave) -> None:
        self._exchange = exchange
        self._planned = planned
        self._error: Exception | None = None

    def write(self) -> None:
        """Write this rank's files. A failure is kept for `finalize`."""
        try:
            for name, layout in self._planned.files:
                write_file(self._planned.storage, name, layout, lambda _size: None)
            self._planned.storage.sync()
        except Exception as error:  # noqa: BLE001 - every rank raises it in `finalize`
            self._error = error

    def finalize(self) -> None:
        """Make the checkpoint exist. Collective.

        Raises:
            CheckpointingException: On every rank, if one could not write.
        """

        def tell() -> bytes:
            if self._error is not None:
                raise self._error
            return b""

        def join(replies: list[bytes]) -> list[bytes]:
            foreign.finish(self._planned, emitter(ignore, self._exchange.rank))
            return replies

        with as_checkpointing_exception():
            try:
                run_joined(self._exchange, tell, join, lambda: foreign.give_up(self._planned))
            except NotSharedError:
                foreign.remove_own(self._planned)
                raise
