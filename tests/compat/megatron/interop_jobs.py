"""What ranks do in the tests against Megatron itself; one state for both packages."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from remesh.exchange import Exchange

WORLD_SIZES = (1, 2, 4)
NUM_OBJECTS = 4


def weight() -> torch.Tensor:
    return torch.arange(96).reshape(8, 12)


def merge_halves(found: Any) -> torch.Tensor:
    return torch.cat([found["gate"], found["up"]])


def state(package: ModuleType, rank: int, world_size: int, *, values: bool) -> dict[str, Any]:
    """One of each kind that both packages know, as a job of some size holds it."""
    mapping = package.mapping
    sharded = mapping.ShardedTensor.from_rank_offsets

    def ten(data: torch.Tensor) -> torch.Tensor:
        return data.clone() if values else torch.zeros_like(data)

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        # The halves of a fused tensor, each cut by ranks: the layout of a gated MLP.
        gate, up = data.chunk(2)
        return {
            "gate": sharded(key, gate, (0, rank, 2 * world_size), replica_id=replica_id),
            "up": sharded(key, up, (0, world_size + rank, 2 * world_size), replica_id=replica_id),
        }

    rows = weight().chunk(world_size)[rank]
    columns = weight().chunk(world_size, dim=1)[rank]
    fused = torch.cat([part.chunk(world_size)[rank] for part in torch.arange(16.0).chunk(2)])
    layers = range(rank, 4, world_size)
    objects = range(rank, NUM_OBJECTS, world_size)
    return {
        "rows": sharded("rows", ten(rows), (0, rank, world_size)),
        "columns": sharded("columns", ten(columns.contiguous()), (1, rank, world_size)),
        "copy": sharded("copy", ten(torch.arange(5).bfloat16()), replica_id=rank),
        "layers": {
            layer: sharded(
                "layers", ten(torch.full((2, 3), float(layer))), (0, layer, 4), prepend_axis_num=1
            )
            for layer in layers
        },
        "fused": mapping.ShardedTensorFactory("fused", ten(fused), build, merge_halves),
        "objects": {
            number: mapping.ShardedObject(
                "objects",
                {"number": number, "rng": torch.full((2,), number)} if values else None,
                (NUM_OBJECTS,),
                (number,),
            )
            for number in objects
        },
        "local": mapping.LocalNonpersistentObject(rank),
        "common": {"step": 7, "rng": torch.arange(3), "nested": [{"lr": 0.1}]} if values else {},
    }


def check(package: ModuleType, loaded: dict[str, Any], rank: int, world_size: int) -> None:
    """Compare what was loaded with what was saved."""
    wanted = state(package, rank, world_size, values=True)
    for key in ("rows", "columns", "copy"):
        assert torch.equal(loaded[key], wanted[key].data), key
        assert loaded[key].dtype == wanted[key].dtype
    for layer, item in wanted["layers"].items():
        assert torch.equal(loaded["layers"][layer], item.data)
    assert torch.equal(loaded["fused"], wanted["fused"].data)
    for number in wanted["objects"]:
        assert loaded["objects"][number]["number"] == number
        assert loaded["objects"][number]["rng"].tolist() == [number, number]
    assert loaded["local"] == rank
    assert loaded["common"]["step"] == 7
    assert loaded["common"]["rng"].tolist() == [0, 1, 2]
    assert loaded["common"]["nested"] == [{"lr": 0.1}]


def here() -> ModuleType:
    from remesh.compat import megatron

    return megatron


def megatron_on_cpu() -> ModuleType:
    """Megatron's package, with the two calls of CUDA that a save on the CPU trips over."""
    # Each save starts a manager process, and the ranks of `run_processes` are daemons.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    return importlib.import_module("megatron.core.dist_checkpointing")


def save_here(exchange: Exchange, folder: Path) -> None:
    package, rank, world_size = here(), exchange.rank, exchange.world_size
    package.save(state(package, rank, world_size, values=True), folder, ("torch_dist", 1))


def load_here(exchange: Exchange, folders: list[Path]) -> None:
    package, rank, world_size = here(), exchange.rank, exchange.world_size
    for folder in folders:
        wanted = state(package, rank, world_size, values=False)
        loaded, missing, unexpected = package.load(wanted, folder, strict="return_all")
        assert (missing, unexpected) == (set(), set())
        check(package, loaded, rank, world_size)


def save_and_load_there(exchange: Exchange, folder: Path, folders: list[Path]) -> None:
    package, rank, world_size = megatron_on_cpu(), exchange.rank, exchange.world_size
    folder.mkdir(exist_ok=True)
    dist.barrier()
    package.save(state(package, rank, world_size, values=True), str(folder))
    for other in folders:
        wanted = state(package, rank, world_size, values=False)
        loaded, missing, unexpected = package.load(wanted, str(other), strict="return_all")
        assert (missing, unexpected) == (set(), set())
        check(package, loaded, rank, world_size)
