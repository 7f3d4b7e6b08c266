"""Flex Checkpoint's functions in real processes with torch's own process groups."""

from __future__ import annotations

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
    make_replicated_sharded_weight,
    reshard_sharded_state_dict,
    save_state_dict,
)
from remesh.errors import CorruptCheckpointError, StateError
from remesh.exchange import Exchange
from tests.compat.flex_layouts import Weights, cut, emptied, flat, numbers
from tests.support import run_processes


def _layer(rank: int) -> Weights:
    """A column-parallel layer of 2 tensor-parallel ranks, with 2 copies of each shard."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shard = rank % 2
    layer = {"weight": numbers((6, 8)).chunk(2, 1)[shard].clone(), "scale": torch.ones(3)}
    return build_sharded_state_dict(layer, {"weight": 1}, "up.", group=groups[rank // 2])


def _moments(rank: int) -> Weights:
    """The optimizer's state of the layer, flattened and cut into four uneven ranges."""
    whole = make_replicated_sharded_weight("up.weight.moment1_0", numbers((6, 8), 100))
    start, stop = [(0, 5), (5, 17), (17, 47), (47, 48)][rank]
    return {whole.key: flat(whole, start, stop)}


def _wanted(rank: int) -> Weights:
    """The same in columns of four ranks."""
    return {
        "up.weight": cut("up.weight", numbers((6, 8)), 1, rank, 4),
        "up.scale": make_replicated_sharded_weight("up.scale", torch.ones(3)),
        "up.weight.moment1_0": cut("up.weight.moment1_0", numbers((6, 8), 100), 1, rank, 4),
    }


def _check(target: Weights, wanted: Weights) -> None:
    for key, weight in wanted.items():
        assert torch.equal(target[key].local_tensor, weight.local_tensor), key


def _emptied(wanted: Weights) -> Weights:
    return {key: emptied(weight) for key, weight in wanted.items()}


def _between_groups(rank: int, path: Path) -> None:
    """Saved by a group of two, with numbers by itself, and loaded by that group alone."""
    group = dist.new_group([1, 3])
    if rank in {1, 3}:
        place = rank // 2
        save_state_dict({"w": cut("w", numbers((4, 2)), 0, place, 2)}, path, group)
        wanted = {"w": cut("w", numbers((4, 2)), 1, place, 2)}
        target = _emptied(wanted)
        load_state_dict(target, path, group, coordinator_rank=1)
        _check(target, wanted)
        with pytest.raises(StateError, match="coordinator_rank=3 is not a rank of a group of 2"):
            load_state_dict(target, path, group, coordinator_rank=3)


def _documented_files(rank: int) -> None:
    """Eight files of which each rank needs two, as the documentation lists them."""
    metadata = Metadata(
        {}, {LocalTensorIndex(f"w{n // 2}", (n % 2,)): f"{n}_0.distcp" for n in range(8)}
    )
    own = [f"{n}_0.distcp" for n in range(2 * rank, 2 * rank + 2)]
    found = get_rank_to_files([metadata], own, {f"w{rank}": None}, dist.group.WORLD, True)
    assert found == (
        {
            0: ["0_0.distcp", "1_0.distcp"],
            1: ["2_0.distcp", "3_0.distcp"],
            2: ["4_0.distcp", "5_0.distcp"],
            3: ["6_0.distcp", "7_0.distcp"],
        },
        set(),
        {},
    )
    with pytest.raises(CorruptCheckpointError, match=r"no rank can open 4_0\.distcp, 5_0\.distcp"):
        get_rank_to_files(
            [metadata], own if rank != 2 else [], {f"w{rank}": None}, None, use_dist=True
        )


def _job(exchange: Exchange, path: Path) -> None:
    rank = exchange.rank
    source, wanted = {**_layer(rank), **_moments(rank)}, _wanted(rank)
    target = _emptied(wanted)
    reshard_sharded_state_dict(source, target)
    _check(target, wanted)
    save_state_dict(source, path / "all")
    for weight in source.values():
        weight.local_tensor.add_(1000)
    save_state_dict(source, path / "all", async_save=True)
    for weight in source.values():
        weight.local_tensor.zero_()
    clear_async_save_task_queue()
    load_state_dict(target, path / "all", unique_id=0)
    _check(target, wanted)
    load_state_dict(target, path / "all")
    for weight in wanted.values():
        weight.local_tensor.add_(1000)
    _check(target, wanted)
    _between_groups(rank, path / "two")
    _documented_files(rank)


def test_four_processes(tmp_path: Path) -> None:
    run_processes(4, _job, tmp_path)
