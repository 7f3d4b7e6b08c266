"""The backend `remesh`, remesh's own format, and what all backends share.

A state dict of shards is a state for the engine. Saving describes the main replicas of a rank to
the engine, which plans, writes and commits. Loading gives the engine the memory of the shards, made
where a shard has none; the engine finds the stored boxes, reads the bytes that are needed, converts
dtypes and fills or cuts where another shape is allowed. What comes back has the structure of what
was asked for, with tensors and values as leaves.

In the backend `remesh` everything is in one commit: tensors, objects, and the common state as an
object of its own, so there is no `common.pt`, and nothing is a pickle. `metadata.json` lies beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, Literal, Self

import torch

from remesh.adapters.memory import strided_layout
from remesh.background import Saver
from remesh.checkpoint import load
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.stored import StoredState
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    decode_object,
    on_all_ranks,
    require_known,
    source_of,
    storage_of,
)
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from remesh.compat.megatron.strategies.async_utils import AsyncRequest, run_here
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    OneBackend,
    SaveCommonStrategy,
)
from remesh.core.index import Index
from remesh.core.sharded import ShardedObject as EngineObject
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.core.strided import shared_pairs
from remesh.exchange import Alone
from remesh.formats import native
from remesh.formats.torch_dcp import COMMON_NAME

COMMON_KEY = "common_state"
"""Name of the object that holds the common state in a native checkpoint."""

Describe = Callable[[ShardedTensor], EngineTensor]
"""What a shard with data is to the engine."""


class EngineSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves through a `remesh.Saver`.

    An instance keeps the plan and the host memory of its last save: as long as the layout stays the
    same, the ranks only compare fingerprints. A checkpoint at the same place is replaced. `writer`
    says what writes saves beside the training: threads of this process, or a process of its own,
    which neither shares the interpreter with the trainer nor dies with it. `without` are small
    files of the format that are written elsewhere.
    """

    def __init__(
        self,
        backend: str = native.FORMAT_NAME,
        version: int = 1,
        *,
        writer: Literal["thread", "process"] = "thread",
        file_format: str = native.FORMAT_NAME,
        without: tuple[str, ...] = (),
        **format_options: object,
    ) -> None:
        super().__init__(backend, version)
        self._make_saver = partial(
            Saver,
            writer=writer,
            format=file_format,
            format_options=format_options,
            without=without,
        )
        self._saver = self._make_saver()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A strategy with the same settings, and with no plan and no memory of earlier saves."""
        copied = copy(self)
        for name, value in vars(self).items():
            vars(copied)[name] = self._make_saver() if name == "_saver" else deepcopy(value, memo)
        return copied

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    @property
    def num_plans_reused(self) -> int:
        """How many saves used the plan of an earlier one."""
        return self._saver.num_plans_reused

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        with as_checkpointing_exception():
            describe, options = self._agree(sharded_state_dict)
            state = state_to_save(sharded_state_dict, describe)
            self._saver.save(state, checkpoint_dir, overwrite=True, format_options=options)

    def close(self) -> None:
        """Wait for the save in flight, and give memory and process back."""
        with as_checkpointing_exception():
            self._saver.close()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Prepare a save: scheduling it stages the state and begins to write."""
        describe, options = self._agree(sharded_state_dict)
        state = state_to_save(sharded_state_dict, describe)

        def stage() -> Callable[[], object]:
            with as_checkpointing_exception():
                handle = self._saver.save_async(
                    state, checkpoint_dir, overwrite=True, format_options=options
                )
            return handle.result

        return AsyncRequest(run_here, (None, None), [], preload_fn=stage)

    def _agree(
        self,
        sharded_state_dict: Any,  # noqa: ARG002 - what overrides look at
    ) -> tuple[Describe, dict[str, object]]:
        """How shards are described to the engine, and options of the format. Collective."""
        return ShardedTensor.to_remesh, {}


def state_to_save(sharded_state_dict: Any, describe: Describe) -> dict[str, Any]:
    """The main replicas of a state dict as a state for the engine. Collective."""
    leaves = [x for x in nested_values(sharded_state_dict) if is_main_replica(x.replica_id)]

    def check() -> None:
        for leaf in leaves:
            if isinstance(leaf, ShardedTensor) and leaf.data is None:
                raise CheckpointingException(f"{leaf.key}: there is no data to save")

    on_all_ranks(check)
    return _engine_state(leaves, describe)


def _engine_state(
    leaves: Sequence[Any], describe: Describe = ShardedTensor.to_remesh
) -> dict[str, Any]:
    """Leaves as a state for the engine; its keys appear in errors only."""
    state: dict[str, Any] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, ShardedTensor):
            state[f"{number} {leaf.key}"] = describe(leaf)
        else:
            state[f"{number} {leaf.unique_key}"] = EngineObject(
                leaf.key,
                leaf.data,
                tuple(leaf.global_shape),
                tuple(leaf.global_offset),
                leaf.replica_id,
            )
    return state


def _fill_apart(leaves: Sequence[Any]) -> None:
    """Give memory of their own to tensors that share theirs with one before.

    The parts that a factory builds may all be its whole tensor; their values are what counts.
    """
    found = [
        (leaf, leaf.data)
        for leaf in leaves
        if isinstance(leaf, ShardedTensor) and leaf.data is not None and leaf.data.numel()
    ]
    for _, later in shared_pairs([strided_layout(data) for _, data in found]):
        leaf, data = found[later]
        leaf.data = data.detach().clone()


class EngineLoadShardedStrategy(OneBackend, LoadShardedStrategy):
    """Loads what the engine can open, in the format that it calls `format`."""

    backend = "remesh"
    format = "remesh"

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return self.load_together(sharded_state_dict, checkpoint_dir)

    def load_together(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: Any,
        *,
        group: Any = None,
        share_reads: bool | None = None,
    ) -> Any:
        """Load; the ranks of a group read for each other, see `remesh.load`. Collective over all.

        By default the group is all ranks, which share where that is cheaper.
        """
        for leaf in nested_values(sharded_state_dict):
            if isinstance(leaf, ShardedTensor):
                leaf.init_data("cpu")
        _fill_apart(list(nested_values(sharded_state_dict)))
        # What an object holds does not matter to a load, and might not be storable.
        leaves = [
            leaf if isinstance(leaf, ShardedTensor) else leaf.without_data()
            for leaf in nested_values(sharded_state_dict)
        ]

        def work() -> Any:
            target = _engine_state(leaves)
            load(
                target,
                source_of(checkpoint_dir, self.format),
                cast=True,
                share_reads=share_reads,
                group=group,
            )
            filled = iter(target.values())

            def result(leaf: ShardedBase) -> Any:
                new = next(filled)
                if isinstance(leaf, ShardedTensor):
                    return None if leaf.data is None else leaf.data.detach()
                return require_known(new.data, f"{checkpoint_dir}: {leaf.key}")

            return dict_list_map_outplace(result, sharded_state_dict)

        # On every rank, though groups load apart, and only one may know too little of an object.
        return on_all_ranks(work)

    def stored_state(self, checkpoint_dir: Any) -> StoredState:
        """The index and values of a checkpoint, read by this process alone."""
        with as_checkpointing_exception():
            return open_shared(Alone(), source_of(checkpoint_dir, self.format))

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        return _tensors_metadata(self.stored_state(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        stored = self.stored_state(checkpoint_dir)
        objects = {
            unique: ShardedObject(element.name, None, tuple(element.shape), tuple(element.offset))
            for unique, element in stored.document.objects.items()
            if element.name != COMMON_KEY
        }
        return {**objects, **_tensors_metadata(stored)}


def _tensors_metadata(stored: StoredState) -> dict[str, Any]:
    """The stored tensors by key, each as one shard that is all of it, without data.

    Tensors in the common state are left out. The engine finds them at a place in a nested state, or
    in `common.pt`, where sharded ones never are.
    """
    found = {}
    for name in stored.index:
        tensor = stored.index[name]
        files = {piece.path for piece in stored.index.pieces(name)}
        if stored.document.path_of(name) != (name,) or COMMON_NAME in files:
            continue
        shape = tuple(tensor.shape)
        dtype = getattr(torch, tensor.dtype)
        ones, zeros = (1,) * len(shape), (0,) * len(shape)
        found[name] = ShardedTensor(name, None, dtype, shape, shape, zeros, ones)
    return found


# ---------------------------------------------------------------------------------------------
# The backend `remesh`
# ---------------------------------------------------------------------------------------------


def common_object(common_state_dict: Any, rank: int) -> ShardedObject:
    """The common state as an object that rank 0 writes."""
    return ShardedObject(
        COMMON_KEY, common_state_dict if rank == 0 else None, (1,), (0,), replica_id=min(rank, 1)
    )


class RemeshSaveShardedStrategy(EngineSaveShardedStrategy):
    """Writes remesh's own format."""


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
