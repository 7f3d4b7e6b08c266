"""Flex Checkpoint's functions in real processes with torch's own process groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from remesh.compat.flex_checkpoint import (
    LocalTensorIndex,
    Metadata,
    build_sharded_state_dict,
    clear_async_save_task_queue,
    get_rank_to_files,
    load_state_dict,
    reshard_sharded_state_dict,
    save_state_dict,
)
from remesh.errors import CorruptCheckpointError
from remesh.exchange import Exchange
from tests.compat.flex_layouts import Weights, cut, filled, flat, numbers, whole
from tests.support import run_processes

MOMENT = "up.weight.moment1_0"


def _layer(rank: int) -> Weights:
    """A column-parallel layer of two ranks, each twice, and its state as four uneven ranges."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = {"weight": numbers((6, 8)).chunk(2, 1)[rank % 2].clone(), "scale": torch.ones(3)}
    weights = build_sharded_state_dict(layer, {"weight": 1}, "up.", group=groups[rank // 2])
    start, stop = [(0, 5), (5, 17), (17, 47), (47, 48)][rank]
    moment = whole({MOMENT: numbers((6, 8), 100)})[MOMENT]
    return {**weights, MOMENT: flat(moment, start, stop)}


def _wanted(rank: int) -> Weights:
    """The same in columns of four ranks."""
    return {
        "up.weight": cut("up.weight", numbers((6, 8)), 1, rank, 4),
        **whole({"up.scale": torch.ones(3)}),
        MOMENT: cut(MOMENT, numbers((6, 8), 100), 1, rank, 4),
    }


def _between_groups(rank: int, path: Path) -> None:
    """Saved by a group of two, with numbers by itself, and loaded by that group alone."""
    group = dist.new_group([1, 3])
    if rank in {1, 3}:
        place = rank // 2
        save_state_dict({"w": cut("w", numbers((4, 2)), 0, place, 2)}, path, group)
        load = partial(load_state_dict, path=path, process_group=group)
        filled(partial(load, coordinator_rank=1), {"w": cut("w", numbers((4, 2)), 1, place, 2)})


def _documented_files(rank: int) -> None:
    """Eight files of which each rank needs two, as the documentation lists them."""
    metadata = Metadata(
        {}, {LocalTensorIndex(f"w{n // 2}", (n % 2,)): f"{n}_0.distcp" for n in range(8)}
    )
    own = [f"{n}_0.distcp" for n in range(2 * rank, 2 * rank + 2)]
    found = get_rank_to_files([metadata], own, {f"w{rank}": None}, dist.group.WORLD, True)
    files = {n: [f"{2 * n}_0.distcp", f"{2 * n + 1}_0.distcp"] for n in range(4)}
    assert found == (files, set(), {})
    with pytest.raises(CorruptCheckpointError, match=r"no rank can open 4_0\.distcp, 5_0\.distcp"):
        get_rank_to_files(
            [metadata], own if rank != 2 else [], {f"w{rank}": None}, None, use_dist=True
        )


def _job(exchange: Exchange, path: Path) -> None:
    rank = exchange.rank
    source, wanted = _layer(rank), _wanted(rank)
    filled(partial(reshard_sharded_state_dict, source), wanted)
    save_state_dict(source, path / "all")
    for weight in source.values():
        weight.local_tensor.add_(1000)
    save_state_dict(source, path / "all", async_save=True)
    for weight in source.values():
        weight.local_tensor.zero_()
    clear_async_save_task_queue()
    filled(partial(load_state_dict, path=path / "all", unique_id=0), wanted)
    for weight in wanted.values():
        weight.local_tensor.add_(1000)
    filled(partial(load_state_dict, path=path / "all"), wanted)
    _between_groups(rank, path / "two")
    _documented_files(rank)


def test_four_processes(tmp_path: Path) -> None:
    run_processes(4, _job, tmp_path)
