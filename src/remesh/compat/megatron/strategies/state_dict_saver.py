"""A save of torch.distributed.checkpoint in three steps: plan, write, finish.

Planning and finishing are collective; writing runs beside the training. The callers are those of
`filesystem_async`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from remesh.compat.megatron.strategies.filesystem_async import FileSystemWriterAsync

Planned = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]


def save_state_dict_async_plan(
    state_dict: Any,
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    **_caches: Any,
) -> Planned:
    """Decide which rank writes what; every save is planned anew. Collective.

    Returns the arguments of `save_state_dict_async_finalize`.
    """
    ranks = _DistWrapper(process_group, True, coordinator_rank)
    chosen = planner or DefaultSavePlanner()
    made: list[Metadata] = []

    def local_step() -> SavePlan:
        chosen.set_up_planner(state_dict, is_coordinator=ranks.is_coordinator)
        storage_writer.set_up_storage_writer(ranks.is_coordinator)
        return storage_writer.prepare_local_plan(chosen.create_local_plan())

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = chosen.create_global_plan(plans)
        made.append(metadata)
        return storage_writer.prepare_global_plan(plans)

    plan = ranks.reduce_scatter("plan", local_step, global_step)
    storage_writer.prepare_write_data(chosen.finish_plan(plan), chosen)
    return storage_writer, made[0] if made else None, ranks


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Make the checkpoint exist, once every rank has written. Collective."""
    results: list[Any] = dist_wrapper.all_gather_object(storage_writer.retrieve_write_results())
    failed = {rank: one for rank, one in enumerate(results) if _is_wrapped_exception(one)}
    if failed:
        raise CheckpointException("write", failed)

    def finish() -> None:
        assert global_metadata is not None
        storage_writer.finish(replace(global_metadata), results)

    dist_wrapper.broadcast("finish", finish)
