"""The backend `remesh`, remesh's own format, and what all backends share.

A state dict of shards is a state for the engine. Saving describes the main replicas of a rank to
the engine, which plans, writes and commits. Loading gives the engine the memory of the shards, made
where a shard has none; the engine reads the bytes that are needed, converts dtypes and fills or
cuts where another shape is allowed. What comes back has the structure of what was asked for.

In the backend `remesh` everything is in one commit: tensors, objects, and the common state as an
object of its own, so there is no `common.pt`, and nothing is a pickle. `metadata.json` lies beside.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import msgspec
import torch

from remesh.adapters.memory import strided_layout
from remesh.background import Saver
from remesh.checkpoint import load
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.stored import StoredState
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    maybe_load_config,
    on_all_ranks,
    require_known,
)
from remesh.compat.megatron.dict_utils import dict_list_map_outplace, nested_values
from remesh.compat.megatron.mapping import ShardedObject, ShardedTensor, is_main_replica
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
)
from remesh.compat.megatron.utils import _sharded_tensor_shard_id
from remesh.core.state import Path, assemble
from remesh.core.strided import shared_pairs
from remesh.core.values import encode_object
from remesh.errors import CoverageError
from remesh.exchange import Alone, run_on_all
from remesh.formats.archive import archive_of, read_archive
from remesh.formats.place import Place
from remesh.formats.table import place_of
from remesh.formats.torch_dcp import COMMON_NAME, opaque

COMMON_KEY = "common_state"
"""Name of the object that holds the common state in remesh's own format."""


class RemeshSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves through a `remesh.Saver`, in remesh's own format; other backends derive from it.

    An instance keeps the plan and the host memory of its last save: as long as the layout stays the
    same, the ranks only compare fingerprints. A checkpoint at the same place is replaced. `options`
    are the saver's: with `writer="process"`, a process of its own writes saves beside the training.
    """

    format = "remesh"  # as the engine calls it
    shares_replicas = False
    """Whether each copy of a shard may be the one that is written, so that ranks share the work."""

    def __init__(self, backend: str = "remesh", version: int = 1, **options: Any) -> None:
        super().__init__(backend, version)
        self._options = options
        self.saver  # noqa: B018 - a writer process is started now

    @cached_property
    def saver(self) -> Saver:
        """What saves; to close it gives memory and process back."""
        return Saver(format=self.format, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: no plan and no memory of earlier saves."""
        return {name: value for name, value in vars(self).items() if name != "saver"}

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        with as_checkpointing_exception():
            self._prepared(self.saver.save, sharded_state_dict, checkpoint_dir)()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Prepare a save: scheduling it stages the state and begins to write."""
        begin = self._prepared(self.saver.save_async, sharded_state_dict, checkpoint_dir)

        def stage() -> Callable[[], object]:
            with as_checkpointing_exception():
                return begin().result  # type: ignore[no-any-return]

        # The background is the saver's: what runs beside the training waits for it.
        return AsyncRequest(lambda _, end: end(), (None, None), [], preload_fn=stage)

    def _prepared(
        self, begin: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any
    ) -> Callable[[], Any]:
        """A save of the main replicas of a state dict. Collective."""
        options = self._format_options(sharded_state_dict)

        def describe() -> tuple[list[Any], dict[str, Any]]:
            leaves = [self._stored_form(one, options) for one in self._written(sharded_state_dict)]
            return leaves, _engine_state(leaves)

        leaves, state = on_all_ranks(describe)
        save = partial(begin, path=checkpoint_dir, overwrite=True, format_options=options)
        if not self.shares_replicas:
            return partial(save, state)

        def share() -> Any:
            try:
                return save(state)
            except CoverageError:
                # Copies may be cut otherwise than main replicas. No rank writes such, so none
                # shares the work. That there is no main replica at all stays an error.
                return save(_engine_state(_without_copies(leaves)))

        return share

    def _written(self, sharded_state_dict: Any) -> list[Any]:
        """The main replicas, and where ranks share the work all copies that they may write."""
        leaves = list(nested_values(sharded_state_dict))
        mains = [leaf for leaf in leaves if is_main_replica(leaf.replica_id)]
        if not self.shares_replicas:
            return mains
        # Several equal shards on one rank are one to write.
        tensors = [leaf for leaf in (*leaves, *mains) if isinstance(leaf, ShardedTensor)]
        of_shard = {_sharded_tensor_shard_id(leaf): leaf for leaf in tensors}
        others = [leaf for leaf in of_shard.values() if leaf.data is not None]
        copies = [leaf for leaf in others if not is_main_replica(leaf.replica_id)]
        return [*mains, *copies]

    def _format_options(self, sharded_state_dict: Any) -> dict[str, Any]:  # noqa: ARG002
        """Options of the format, besides those of the saver. Collective."""
        return {}

    def _stored_form(self, leaf: Any, options: dict[str, Any]) -> Any:  # noqa: ARG002
        """What is stored of a leaf."""
        return leaf


def _without_copies(leaves: list[Any]) -> list[Any]:
    """The main replicas, and what has none on any rank. Collective."""
    own = {one.key for one in leaves if is_main_replica(one.replica_id)}
    replies = run_on_all(exchange_of(None), lambda: msgspec.msgpack.encode(own))
    with_main = {key for reply in replies for key in msgspec.msgpack.decode(reply, type=set[str])}
    return [one for one in leaves if is_main_replica(one.replica_id) or one.key not in with_main]


def _engine_state(leaves: Iterable[Any]) -> dict[str, Any]:
    """Leaves as a state for the engine; its keys appear in errors only."""
    return {
        f"{number} {leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key}": (
            leaf.to_remesh()
        )
        for number, leaf in enumerate(leaves)
    }


def _make_memory(tensors: list[ShardedTensor]) -> None:
    """Give tensors memory that have none, or that share theirs with one before.

    The parts that a factory builds may all be its whole tensor; their values are what counts.
    """
    for one in tensors:
        one.init_data("cpu")
    found = [(one, one.data) for one in tensors if one.data is not None and one.data.numel()]
    for _, later in shared_pairs([strided_layout(data) for _, data in found]):
        one, data = found[later]
        one.data = data.detach().clone()


class RemeshLoadShardedStrategy(LoadShardedStrategy):
    """Loads version 1 of a backend: remesh's own format; other backends derive from it."""

    backend = "remesh"
    format = "remesh"
    group: Any = None  # the ranks that read for each other; all by default
    share_reads: bool | None = None  # whether they do; by default where that is cheaper

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != self.backend:
            raise CheckpointingException(
                f"{type(self).__name__} reads backend {self.backend!r}, not {loaded_backend!r}; "
                "leave the strategy out, and the right one is taken"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise CheckpointingException(
                f"{self.backend} version {loaded_version} is not known, only version 1"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        leaves = list(nested_values(sharded_state_dict))

        def describe() -> tuple[dict[str, Any], Place]:
            _make_memory([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
            # What an object holds does not matter to a load, and might not be storable.
            target = _engine_state(
                leaf if isinstance(leaf, ShardedTensor) else leaf.without_data() for leaf in leaves
            )
            return target, place_of(checkpoint_dir, self.format)

        target, source = on_all_ranks(describe)

        def work() -> Any:
            load(target, source, cast=True, share_reads=self.share_reads, group=self.group)
            filled = iter(target.values())

            def result(leaf: Any) -> Any:
                new = next(filled)
                if isinstance(leaf, ShardedTensor):
                    assert leaf.data is not None
                    return leaf.data.detach()
                return require_known(new.data, f"{checkpoint_dir}: {leaf.key}")

            return dict_list_map_outplace(result, sharded_state_dict)

        # On every rank, though groups load apart, and only one may know too little of an object.
        return on_all_ranks(work)

    def stored_state(self, checkpoint_dir: Any) -> StoredState:
        """The index and values of a checkpoint, read by this process alone."""
        with as_checkpointing_exception():
            return open_shared(Alone(), place_of(checkpoint_dir, self.format))

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        return tensors_metadata(self.stored_state(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        stored = self.stored_state(checkpoint_dir)
        objects = {
            unique: ShardedObject(element.name, None, tuple(element.shape), tuple(element.offset))
            for unique, element in stored.document.objects.items()
            if element.name != COMMON_KEY
        }
        return {**objects, **tensors_metadata(stored)}


def tensors_metadata(stored: StoredState) -> dict[str, Any]:
    """The stored tensors by key, each as one shard that is all of it, without data.

    Tensors in the common state are left out. The engine finds them at a place in a nested state, or
    in `common.pt`, where sharded ones never are.
    """
    found = {}
    for name in stored.index:
        files = {piece.path for piece in stored.index.pieces(name)}
        if stored.document.path_of(name) == (name,) and COMMON_NAME not in files:
            tensor = stored.index[name]
            whole = torch.empty(
                tuple(tensor.shape), dtype=getattr(torch, tensor.dtype), device="meta"
            )
            found[name] = ShardedTensor.from_rank_offsets(name, whole).without_data()
    return found


# ---------------------------------------------------------------------------------------------
# The common state
# ---------------------------------------------------------------------------------------------


def common_bytes(common_state_dict: Any) -> bytes:
    """The content of `common.pt`; an error if the restricted unpickler refuses it."""
    encode_object(common_state_dict, "common state")
    return archive_of(common_state_dict, "common state")


def load_common(checkpoint_dir: Any) -> Any:
    """The common state: `common.pt`, or what is an object of that name. Not collective.

    `common.pt` is a file of `torch.save`, because Megatron reads no other. What it may not ask for
    is an error that names it, and `load(..., allow=...)` allows it.
    """
    place, config = place_of(checkpoint_dir), maybe_load_config(checkpoint_dir)
    # A file of another checkpoint that was here before does not count.
    is_native = config is not None and config.common_backend == "remesh"
    with as_checkpointing_exception():
        if not is_native and place.storage.exists(COMMON_NAME):
            data, where = place.storage.read(COMMON_NAME), f"{place.storage.url}/{COMMON_NAME}"
            archive = read_archive(io.BytesIO(data), where, allow=place.allow)
            return require_known(opaque(archive, data, 0), where)
        stored = open_shared(Alone(), place_of(place, "remesh" if is_native else "torch_dcp"))
        where = f"{place.storage.url}: common state"
        document, unique_key = stored.document, common_object({}, 0).unique_key
        if unique_key in document.objects:
            return require_known(stored.object(unique_key), where)
        if is_native:
            raise CheckpointingException(f"{where}: none is stored here")
        # That of newer Megatron is taken apart, its tensors are values.
        leaves: dict[Path, object] = {
            document.path_of(name): require_known(stored.value(name), f"{where}: {name}")
            for name in document.values
        }
        return assemble(leaves, stored.sequences)


def common_object(common_state_dict: Any, rank: int) -> ShardedObject:
    """The common state as an object that rank 0 writes."""
    return ShardedObject(
        COMMON_KEY, common_state_dict if rank == 0 else None, (1,), (0,), replica_id=min(rank, 1)
    )
