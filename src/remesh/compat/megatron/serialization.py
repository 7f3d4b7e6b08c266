"""The entry points: save and load sharded state dicts.

Saving splits the state dict: factories become what they build, local objects are left out, what is
sharded goes to a strategy, everything else is *common state* and rank 0's copy is stored: in a file
of its own, and in remesh's own format with the rest.
`metadata.json` is written last; without it there is no checkpoint. Loading begins with the common
state, puts local objects, loaded objects and loaded tensors into it, and lets factories merge.

The strategies do the work; see `strategies`. A failure on one rank raises on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import (
    CheckpointingConfig,
    CheckpointingException,
    as_checkpointing_exception,
    on_all_ranks,
    save_config,
    storage_of,
)
from remesh.compat.megatron.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
)
from remesh.compat.megatron.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
    apply_factory_merges,
)
from remesh.compat.megatron.redirect import of_release
from remesh.compat.megatron.strategies.async_utils import AsyncRequest
from remesh.compat.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from remesh.compat.megatron.strategies.native import (
    common_bytes,
    common_object,
    load_common,
)
from remesh.compat.megatron.utils import extract_nonpersistent, extract_sharded_base
from remesh.compat.megatron.validation import (
    CkptShardedMetadata,
    StrictHandling,
    check_common_strategy,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
    verify_checkpoint_and_load_strategy,
)
from remesh.exchange import run_on_one
from remesh.formats.table import place_of
from remesh.formats.torch_dcp import COMMON_NAME

CONTENT_METADATA_KEY = "content_metadata"
DEFAULT_BACKEND = ("torch_dist", 1)
"""What `save` writes by default, as Megatron does."""


def save(  # noqa: PLR0917 - the order is Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
) -> AsyncRequest | None:
    """Save a sharded state dict. Collective.

    `checkpoint_dir` may be a URL; it is made if it is not there, and what lies there is replaced.
    The default is `torch_dist`. The common state is stored as `sharded_strategy` wants it;
    `common_strategy` may say no other. What `async_sharded_save` returns is for
    the drop-in's queue, so `async_strategy` may be `mcore`. `verify_integrity` has the installed
    Megatron, from 0.19 on, write the digests of all files to `integrity.json`; checkpoints in
    remesh's format have digests without it.

    Raises:
        CheckpointingException: On every rank, if something cannot be stored, ranks do not fit
            together, or a strategy does not exist.
        StorageError: If the storage fails.
    """
    sharded: Any = sharded_strategy or DEFAULT_BACKEND
    if isinstance(sharded, tuple):
        sharded = get_default_strategy(StrategyAction.SAVE_SHARDED, *sharded)
    config = CheckpointingConfig(sharded.backend, sharded.version)
    is_native = sharded.backend == "remesh"
    config.common_backend = "remesh" if is_native else "torch"
    check_common_strategy(common_strategy, config)
    if async_sharded_save:
        _check_async(sharded, async_strategy)
    write_digests = (
        _digests_of_release("save_integrity_manifest", checkpoint_dir) if verify_integrity else None
    )
    exchange = exchange_of(None)
    if content_metadata is not None:
        sharded_state_dict[CONTENT_METADATA_KEY] = content_metadata
    comparable = preprocess_common_before_consistancy_check if validate_access_integrity else None
    has_file = not is_native
    sharded_part, common_part, compared, common_file = on_all_ranks(
        lambda: _split(sharded_state_dict, comparable, has_file and exchange.rank == 0)
    )
    if validate_access_integrity:
        validate_sharding_integrity(determine_global_metadata(sharded_part)[1], compared)
    if is_native:
        common_part = common_object(common_part, exchange.rank)
        sharded_part = {"sharded": sharded_part, "common": common_part}

    def write_last() -> bytes:
        # After the tensors, so that a save that fails leaves an old checkpoint whole.
        if common_file:
            storage_of(checkpoint_dir).put(COMMON_NAME, common_file, overwrite=True)
        save_config(config, checkpoint_dir)
        if write_digests is not None:
            write_digests()
        return b""

    def finalize() -> None:
        with as_checkpointing_exception():
            run_on_one(exchange, write_last)

    if async_sharded_save:
        request: AsyncRequest = sharded.async_save(sharded_part, checkpoint_dir)
        request.add_finalize_fn(finalize)
        return request
    sharded.save(sharded_part, checkpoint_dir)
    finalize()
    return None


def _split(
    sharded_state_dict: Any, comparable: Callable[[Any], Any] | None, has_file: bool
) -> tuple[Any, Any, Any, bytes]:
    """What is sharded, what is common, what of that ranks compare, and the file of it, if any.

    Factories are replaced by what they build, in place.
    """
    apply_factories(sharded_state_dict)
    _, persistent = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(persistent)
    compared = common if comparable is None else comparable(common)
    file = common_bytes(common) if has_file else b""
    return _without_empty_ranges(sharded), common, compared, file


def _check_async(sharded: SaveShardedStrategy, async_strategy: str | None) -> None:
    if not isinstance(sharded, AsyncSaveShardedStrategy):
        raise CheckpointingException(f"{sharded} cannot save beside the training")
    if async_strategy == "nvrx":
        raise CheckpointingException(
            "async_strategy='nvrx' is not supported: nvidia-resiliency-ext writes in a process that"
            " lacks the memory of the drop-in's saves; set async_strategy to 'mcore'"
        )


def _digests_of_release(name: str, checkpoint_dir: Any) -> Callable[[], None]:
    """A call of a function of `validation` that only the installed Megatron has.

    That function takes nothing but a local path, and other things fail on rank 0 alone.
    """
    found = of_release("validation", name)
    if found is None:
        raise CheckpointingException(
            f"verify_integrity needs {name} of Megatron Core 0.19 or later; call "
            "remesh.compat.megatron.install(), or save in remesh's format, which has digests"
        )
    place = storage_of(checkpoint_dir).url
    if "://" in place:
        raise CheckpointingException(
            f"{place}: verify_integrity reads local directories only; save in remesh's format"
        )
    return functools.partial(found, place)


def load(  # noqa: PLR0917 - the order is Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | bool | None = None,
    validate_access_integrity: bool = True,
    strict: str | bool | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
    *,
    allow: Sequence[str] = (),
) -> Any:
    """Load into a sharded state dict. Collective.

    Tensors are filled in place and converted to their dtype; tensors without data are made on the
    CPU. Everything in the state dict that is not sharded is ignored. `checkpoint_dir` may be a
    URL. A bool as `common_strategy` is `validate_access_integrity`, which newer Megatron has in
    this place. `process_group` has the ranks that together hold everything exactly once, by default
    all: all ranks take part in the load, each group with a state dict of its own. `allow` is that
    of `remesh.load`.

    Raises:
        CheckpointingException: On every rank, if there is no checkpoint, or it does not fit what is
            asked for, or is damaged.
        ValueError: If `strict` is unknown, or loaded and stored entries lie at one place.
        StorageError: If the storage fails.
    """
    if isinstance(common_strategy, bool):
        validate_access_integrity = common_strategy
        common_strategy = None
    handling = parse_strict_flag(strict)
    stored: CkptShardedMetadata = {}

    if verify_integrity:
        _digests_of_release("verify_integrity_manifest", checkpoint_dir)()
    if allow:
        checkpoint_dir = place_of(checkpoint_dir, allow=allow)

    def open_checkpoint() -> tuple[LoadShardedStrategy, StateDict, Any, Any]:
        found = verify_checkpoint_and_load_strategy(
            checkpoint_dir, sharded_strategy, common_strategy
        )
        if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            stored.update(found.load_sharded_metadata(checkpoint_dir))
        asked, local, factories = _taken_apart(sharded_state_dict)
        return found, merge(load_common(checkpoint_dir), local), asked, factories

    sharded, common, asked, factories = on_all_ranks(open_checkpoint)
    mine = of_all = None
    if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
        mine, of_all = determine_global_metadata(asked, process_group)
    asked, missing, unexpected = validate_integrity_and_strict_load(
        asked, handling, validate_access_integrity, mine, of_all, stored
    )

    def load_asked() -> Any:
        return apply_factory_merges(merge(common, sharded.load(asked, checkpoint_dir)), factories)

    result = on_all_ranks(load_asked)
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return result, missing, unexpected
    return result


def _taken_apart(sharded_state_dict: Any) -> tuple[Any, Any, Any]:
    """What is sharded, the local objects, and the factories of a state dict, which stays as it is.

    Factories are replaced by what they build among what is sharded, and local objects unwrapped.
    """
    copied = _without_empty_ranges(sharded_state_dict)
    factories, _ = extract_matching_values(
        copied, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    # What factories hold is not needed any more; without it, its memory can be freed.
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, _ = extract_nonpersistent(copied)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), local)
    return extract_sharded_base(copied)[0], local, factories


def _without_empty_ranges(sharded_state_dict: Any) -> Any:
    """A copy of the state dict without tensors whose flattened range is empty."""

    def is_empty(leaf: Any) -> bool:
        is_range = isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
        return is_range and leaf.data_shape == (0,)

    return extract_matching_values(sharded_state_dict, is_empty)[1]


def load_common_state_dict(checkpoint_dir: Any) -> StateDict:
    """The common state of a checkpoint. Not collective."""
    verify_checkpoint_and_load_strategy(checkpoint_dir)
    return load_common(checkpoint_dir)  # type: ignore[no-any-return]


def load_tensors_metadata(
    checkpoint_dir: Any, sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
) -> CkptShardedMetadata:
    """The stored tensors by key, each as one `ShardedTensor` without data. Not collective."""
    sharded = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    return sharded.load_tensors_metadata(checkpoint_dir)


def load_sharded_metadata(
    checkpoint_dir: Any,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
) -> CkptShardedMetadata:
    """The same with `ShardedObject`s, by unique key. Not collective."""
    sharded = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy, common_strategy)
    return sharded.load_sharded_metadata(checkpoint_dir)


def load_plain_tensors(checkpoint_dir: Any) -> Any:
    """All stored tensors by key, whole, without the common state. Collective: all ranks get all."""
    sharded = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return sharded.load(sharded.load_tensors_metadata(checkpoint_dir), checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: Any = None, *, preloaded_state_dict: Any = None
) -> dict[str, Any] | None:
    """The `content_metadata` that was given to `save`, or None."""
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("load_content_metadata needs a checkpoint_dir or a loaded state dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    found: dict[str, Any] | None = preloaded_state_dict.get(CONTENT_METADATA_KEY)
    return found


def remove_sharded_tensors(checkpoint_dir: Any, key_prefix: str) -> None:
    """Take the tensors whose keys begin with a prefix out of a checkpoint. Not collective."""
    sharded = verify_checkpoint_and_load_strategy(checkpoint_dir)
    sharded.remove_sharded_tensors(checkpoint_dir, key_prefix)


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """The strategy that writes a backend."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)  # type: ignore[no-any-return]


def get_default_load_sharded_strategy(checkpoint_dir: Any = None) -> LoadShardedStrategy:
    """The strategy that reads a checkpoint; without one, that of what `save` writes by default."""
    if checkpoint_dir is None:
        return get_default_strategy(StrategyAction.LOAD_SHARDED, *DEFAULT_BACKEND)  # type: ignore[no-any-return]
    return verify_checkpoint_and_load_strategy(checkpoint_dir)
