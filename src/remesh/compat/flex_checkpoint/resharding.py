"""`reshard_sharded_state_dict`: the checks of Flex Checkpoint, then `remesh.reshard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remesh.checkpoint.local import exchange_of
from remesh.compat.flex_checkpoint.options import check_coordinator, transform_of
from remesh.compat.flex_checkpoint.shards import (
    check_dst_state_dict_validity,
    check_src_dst_state_dict_validity,
    check_src_state_dict_validity,
    engine_state,
    gather_shard_infos,
)
from remesh.compat.flex_checkpoint.weights import ShardedWeight
from remesh.resharding import reshard


def reshard_sharded_state_dict(
    src_sharded_state_dict: Mapping[str, ShardedWeight],
    dst_sharded_state_dict: Mapping[str, ShardedWeight],
    process_group: Any = None,
    coordinator_rank: int | None = 0,
    offload: bool | None = False,
    aoa_config: Mapping[str, Any] | None = None,
) -> None:
    """Fill sharded tensors from others that are cut in another way. Collective.

    Every rank of the group passes what it has of both; a rank that has nothing of one passes an
    empty dict. Only the bytes that are needed travel, and nothing is changed unless all fits. The
    target, which is filled in place, must not share memory with the source. `offload` makes no
    difference: what moves between ranks always goes through host memory, in bounded pieces. The
    other arguments are those of `load_state_dict`.

    Raises:
        CoverageError: If a part of a source tensor is in no shard.
        MismatchError: If the source lacks tensors of the target, or their shapes or dtypes differ.
    """
    del offload
    exchange = exchange_of(process_group)
    check_coordinator(exchange, coordinator_rank)
    transform = transform_of(aoa_config)
    sources = gather_shard_infos(exchange, src_sharded_state_dict)
    check_src_state_dict_validity(sources)
    targets = gather_shard_infos(exchange, dst_sharded_state_dict)
    check_dst_state_dict_validity(targets)
    if transform is None:
        check_src_dst_state_dict_validity(sources, targets)
    reshard(
        engine_state(src_sharded_state_dict),
        engine_state(dst_sharded_state_dict),
        transform=transform,
        group=exchange,
    )
