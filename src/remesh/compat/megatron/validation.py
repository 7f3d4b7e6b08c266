"""Does what ranks ask for fit together, and does it fit the checkpoint?

*Access integrity*: the main replicas of all ranks hold every element of every tensor exactly once.
Each rank's descriptions are gathered and given to the engine's own check (`remesh.planner`), which
knows grids, irregular boxes and flattened ranges alike. *Strictness*: what to do about keys that
only the state or only the checkpoint has; see `StrictHandling`.

Every check that can fail raises on every rank, whichever rank found the fault.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import torch

from remesh._repr import listed
from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import (
    CheckpointingConfig,
    CheckpointingException,
    as_checkpointing_exception,
    maybe_load_config,
    on_all_ranks,
)
from remesh.compat.megatron.dict_utils import diff, extract_matching_values, nested_values
from remesh.compat.megatron.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from remesh.compat.megatron.strategies.base import (
    LoadShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from remesh.core import values
from remesh.core.geometry import Box
from remesh.core.integrity import raw_digest
from remesh.core.state import Role
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import StateError
from remesh.exchange import run_on_all, run_on_one
from remesh.planner import LocalBoxes, plan_save

logger = logging.getLogger(__name__)

LocalMetadata = list[ShardedBase]
GlobalMetadata = list[LocalMetadata]
CkptShardedMetadata = dict[str, Any]


class StrictHandling(Enum):
    """How a load treats keys that do not match.

    *Unexpected* keys are asked for but not stored; each rank has its own. *Missing* keys are stored
    but no rank asks for them; they are the same on all ranks. The forms that end in `_UNEXPECTED`
    do not look for missing keys.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Nothing is compared before the load; the load itself fails on an unexpected key."""
    LOG_UNEXPECTED = "log_unexpected"  # unexpected keys are dropped from the result, with a warning
    LOG_ALL = "log_all"  # likewise, and missing keys are named in the warning
    RAISE_UNEXPECTED = "raise_unexpected"  # unexpected keys are an error
    RAISE_ALL = "raise_all"  # unexpected and missing keys are errors
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are dropped and returned; the set of missing keys is empty."""
    RETURN_ALL = "return_all"  # unexpected keys are dropped and returned, and so are missing ones
    IGNORE_ALL = "ignore_all"  # unexpected keys are dropped without a warning

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        return val.value.startswith("return")


def parse_strict_flag(strict: str | bool | StrictHandling) -> StrictHandling:
    """The handling that a flag means: itself, its text, True for the first, False for logging."""
    if isinstance(strict, bool):
        return StrictHandling.ASSUME_OK_UNEXPECTED if strict else StrictHandling.LOG_UNEXPECTED
    try:
        return StrictHandling(strict)
    except ValueError as error:
        known = ", ".join(one.value for one in StrictHandling)
        raise ValueError(f"strict={strict!r} is none of {known}") from error


# ---------------------------------------------------------------------------------------------
# What all ranks hold
# ---------------------------------------------------------------------------------------------


def determine_global_metadata(
    sharded_state_dict: Any, process_group: Any = None
) -> tuple[LocalMetadata, GlobalMetadata]:
    """The shards that this rank and that all ranks describe, without data. Collective."""
    local = [leaf.without_data() for leaf in nested_values(sharded_state_dict)]

    def tell() -> bytes:
        return msgspec.msgpack.encode([_row_of(leaf) for leaf in local], enc_hook=_plain)

    replies = run_on_all(exchange_of(process_group), tell)
    rows = [msgspec.msgpack.decode(reply, type=list[list[Any]]) for reply in replies]
    return local, [[_of_row(row) for row in of_rank] for of_rank in rows]


def _row_of(leaf: ShardedBase) -> list[Any]:
    """The fields of a shard, on their way to other ranks."""
    kind = ShardedObject if isinstance(leaf, ShardedObject) else ShardedTensor
    return [getattr(leaf, one.name) for one in fields(kind)]


def _plain(value: Any) -> Any:
    """What msgpack does not know of a field: a flattened range, a dtype, or numpy's integers."""
    if isinstance(value, slice):
        return value.start, value.stop
    return str(value) if isinstance(value, torch.dtype) else operator.index(value)


def _of_row(row: list[Any]) -> ShardedBase:
    own: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
    if len(own) == len(fields(ShardedObject)):
        return ShardedObject(*own)
    own[2] = getattr(torch, own[2].removeprefix("torch."))
    own[-1] = None if own[-1] is None else slice(*own[-1])
    return ShardedTensor(*own)


# ---------------------------------------------------------------------------------------------
# Access integrity
# ---------------------------------------------------------------------------------------------


def validate_sharding_integrity(
    global_metadata: GlobalMetadata, common_state_dict: Any = None
) -> None:
    """Check that main replicas hold each element of each tensor and object exactly once.

    Every rank has the same global metadata, so this raises on every rank. A common state is
    compared with that of the other ranks (`validate_common_state_dict`).
    """
    if common_state_dict is not None:
        validate_common_state_dict(common_state_dict)
    tensors = [[x for x in rank if isinstance(x, ShardedTensor)] for rank in global_metadata]
    objects = [[x for x in rank if isinstance(x, ShardedObject)] for rank in global_metadata]
    both = {x.key for rank in tensors for x in rank} & {x.key for rank in objects for x in rank}
    if both:
        raise CheckpointingException(
            f"{min(both)}: a tensor on one rank and an object on another; rename one of them"
        )
    _check_objects([(rank, x) for rank, items in enumerate(objects) for x in items])
    with_main = {x.key for rank in tensors for x in rank if is_main_replica(x.replica_id)}
    try:
        plan_save([_local_boxes_of(items, with_main) for items in tensors])
    except StateError as error:
        raise CheckpointingException(f"Invalid access pattern: {error}") from error


def _local_boxes_of(tensors: Sequence[ShardedTensor], with_main: set[str]) -> LocalBoxes:
    """The boxes that a rank holds, for the planner; data is not looked at.

    Copies count only where there are no main replicas: they may be cut in another way.
    """
    table: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    rows: dict[str, int] = {}
    boxes: list[tuple[int, Box]] = []
    roles: list[Role] = []
    for tensor in tensors:
        shape = tuple(tensor.global_shape)
        described = (tensor.key, str(tensor.dtype).removeprefix("torch."), shape)
        known = table.setdefault(tensor.key, described)
        if known != described:
            raise CheckpointingException(
                f"{tensor.key}: one rank describes it as {known[1:]} and as {described[1:]}\nDtype "
                "and global shape of a key must be the same everywhere"
            )
        row = rows.setdefault(tensor.key, len(rows))
        for box in tensor.boxes():
            if not Box.whole(shape).contains(box):
                raise CheckpointingException(
                    f"{tensor.key}: {box} leaves the global tensor of shape {shape}"
                )
            is_main = is_main_replica(tensor.replica_id)
            if is_main or tensor.key not in with_main:
                boxes.append((row, box))
                roles.append(Role.MAIN if is_main else Role.REPLICA)
    tables = BoxTable.of(TensorTable.of(list(table.values())), boxes)
    return LocalBoxes.of(tables, np.array(roles, dtype=np.int64))


def _check_objects(objects: Sequence[tuple[int, ShardedObject]]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    mains: dict[str, list[int]] = {}
    for rank, item in objects:
        shape = shapes.setdefault(item.key, item.global_shape)
        if shape != item.global_shape:
            raise CheckpointingException(
                f"{item.key}: grids of shapes {shape} and {item.global_shape}; all ranks must "
                "describe one"
            )
        holders = mains.setdefault(item.unique_key, [])
        if is_main_replica(item.replica_id):
            holders.append(rank)
    for unique_key, ranks in mains.items():
        if len(ranks) != 1:
            raise CheckpointingException(
                f"Invalid access pattern: {unique_key}: main replica on ranks {ranks}\nExactly one "
                "rank must have a replica_id of 0"
            )


def validate_common_state_dict(common_state_dict: Any) -> None:
    """Warn, on each rank whose common state differs from that of rank 0, of what differs.

    Collective. Rank 0's common state is what is stored, so a difference means that something is
    lost; it is not an error, because applications keep timers and the like in it.
    """
    exchange = exchange_of(None)
    encoded = b""

    def digest() -> bytes:
        nonlocal encoded
        encoded = values.encode_object(common_state_dict, "common state")
        return raw_digest(encoded)

    with as_checkpointing_exception():
        digests = run_on_all(exchange, digest)
        if len(set(digests)) == 1:
            return
        first = values.decode(run_on_one(exchange, lambda: encoded))
        here = values.decode(encoded)
    only_first, only_here, differing = diff(first, here)
    if digests[exchange.rank] != digests[0]:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: "
            "%s, Keys only on %d: %s, Mismatched keys: %s",
            exchange.rank,
            only_first,
            exchange.rank,
            only_here,
            differing,
        )
        # A record of its own: others look for the whole text of Megatron's.
        logger.warning(
            "That of rank 0 is stored; put what belongs to a rank into a ShardedObject, and take "
            "out what may differ by preprocess_common_before_consistancy_check"
        )


# ---------------------------------------------------------------------------------------------
# Strictness
# ---------------------------------------------------------------------------------------------


def validate_integrity_and_strict_load(
    sharded_state_dict: Any,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: LocalMetadata | None = None,
    global_metadata: GlobalMetadata | None = None,
    ckpt_sharded_metadata: CkptShardedMetadata | None = None,
) -> tuple[Any, set[str], set[str]]:
    """Check what is asked for against itself and against the checkpoint. Collective.

    Returns the state dict without unexpected keys, missing keys, unexpected keys. Without
    `global_metadata` missing keys are unknown; only the first `strict` can do without
    `ckpt_sharded_metadata`.
    """
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(f"strict={strict.value} needs the checkpoint's metadata")
        local = local_metadata or list(nested_values(sharded_state_dict))
        stored = {item.key for item in ckpt_sharded_metadata.values()}
        unexpected = {item.key for item in local} - stored
        if global_metadata is not None and StrictHandling.requires_global_app_metadata(strict):
            missing = stored - {item.key for rank in global_metadata for item in rank}
        if strict.value.startswith("raise"):
            on_all_ranks(lambda: maybe_report_missing_and_unexpected_keys(missing, unexpected))
        _, sharded_state_dict = extract_matching_values(
            sharded_state_dict, lambda leaf: leaf.key in unexpected
        )
        if strict.value.startswith("log"):
            maybe_report_missing_and_unexpected_keys(missing, unexpected, raise_error=False)
        if strict is StrictHandling.IGNORE_ALL:
            missing, unexpected = set(), set()
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException("checking access integrity needs global_metadata")
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, missing, unexpected


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise or log keys that do not match, if there are any."""
    kinds = {
        "Unexpected keys (asked for, but not stored)": unexpected_keys,
        "Missing keys (stored, but not asked for by any rank)": missing_keys,
    }
    lines = [f"{kind}: {listed(sorted(keys))}" for kind, keys in kinds.items() if keys]
    if not lines:
        return
    message = (
        f"state and checkpoint do not match; {'; '.join(lines)}; ask for what is stored, or let "
        "`strict` say what to do"
    )
    if raise_error:
        raise CheckpointingException(message)
    logger.warning("%s", message)


# ---------------------------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------------------------


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: Any, sharded_strategy: Any = None, common_strategy: Any = None
) -> LoadShardedStrategy:
    """The strategy to load a checkpoint with; a (backend, version) stands for its strategy."""
    config = maybe_load_config(checkpoint_dir)
    if config is None:
        raise CheckpointingException(
            f"directory {checkpoint_dir} does not exist or is not a distributed checkpoint: there "
            "is no metadata.json, which is written last; look for another checkpoint, or for the "
            "cause of an unfinished save"
        )
    check_common_strategy(common_strategy, config)
    if sharded_strategy is None:
        sharded_strategy = (config.sharded_backend, config.sharded_backend_version)
    if isinstance(sharded_strategy, tuple):
        sharded_strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *sharded_strategy)
    sharded_strategy.check_backend_compatibility(config.sharded_backend)
    sharded_strategy.check_version_compatibility(config.sharded_backend_version)
    return sharded_strategy  # type: ignore[no-any-return]


def check_common_strategy(strategy: Any, config: CheckpointingConfig) -> None:
    """Refuse a strategy for common state that is not the one of the checkpoint."""
    if strategy not in (None, (config.common_backend, config.common_backend_version)):
        raise CheckpointingException(
            f"common_strategy={strategy}: with {config.sharded_backend} the common state is stored "
            f"as {config.common_backend!r}; leave the argument out"
        )
