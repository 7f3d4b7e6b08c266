"""Writes the checkpoints of a version of remesh beside it, with each option that `save` has.

python -m tests.data.native.make

A folder that was released is never written again: a new version that writes something else gets a
folder of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim import AdamW

import remesh
from remesh.catalog import pin
from remesh.checkpoint import unchanged
from remesh.core.geometry import Box, boxes_of_flat_range
from remesh.core.sharded import Part
from remesh.exchange import Exchange
from remesh.maintenance.repair import repair
from remesh.sharding import ShardedObject
from tests.adapters.test_wrapper_subclasses import Scaled
from tests.data.native import states
from tests.support import run_processes, run_ranks


def save_shards(exchange: Exchange, path: Path) -> None:
    """Four ranks, each with quarters of a grid, a part of a flat buffer, a copy, and a value."""
    rank, found = exchange.rank, states.sharded()
    row, column = divmod(rank, 2)
    boxes = {
        "grid": [Box((3 * row, 5 * column), (3, 5))],
        "flat": boxes_of_flat_range((5, 7), 9 * rank, min(35, 9 * rank + 9)),
        "copied": [Box.whole((3,))],
    }
    state: dict[str, Any] = {
        name: remesh.ShardedTensor(
            name,
            tuple(tensor.shape),
            tuple(Part(box, tensor[box.slices]) for box in boxes[name]),
            replica_id=rank if name == "copied" else 0,
        )
        for name, tensor in found.items()
    }
    state["random"] = ShardedObject(
        "random", states.objects()[f"random/shard_{rank}_4"], (4,), (rank,)
    )
    # Names of which each rank knows some, as those of pipeline stages.
    stage = torch.nn.ModuleDict({f"{rank}": torch.nn.Linear(2, 1, bias=False)})
    stage.load_state_dict({f"{rank}.weight": states.counted(1, 2, start=rank)})
    state |= {"model": stage, "optimizer": AdamW(stage.parameters())}
    remesh.save(state, path, group=exchange)


def model_on(rank: int) -> tuple[states.Model, AdamW]:
    """The model on two ranks of FSDP2, with the buffers of this rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    expected = states.training()
    model = states.Model()
    model.load_state_dict(expected["model"])
    model.norm.running_mean.add_(rank)  # type: ignore[union-attr]
    fully_shard(model)
    trained = dict(model.named_parameters())
    del trained["base.weight"]
    optimizer = AdamW(trained.values(), lr=0.01)
    for name, parameter in trained.items():
        state = dict(expected["moments"][name])
        assert isinstance(parameter, DTensor)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = distribute_tensor(
                state[moment], parameter.device_mesh, parameter.placements
            )
        optimizer.state[parameter] = state
    return model, optimizer


def save_training(exchange: Exchange, folder: str) -> None:
    """A run of two steps by the manager, in the background; files that do not change are shared."""
    model, optimizer = model_on(exchange.rank)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    with (
        mock.patch.object(unchanged, "MIN_BYTES", 1 << 10),
        remesh.Manager(f"{folder}/run", every=1, buffers="per_rank") as manager,
    ):
        for step in (1, 2):
            manager.step(step, state, metrics={"loss": 1.0 / step})
            manager.wait()
    remesh.save(model, f"{folder}/compressed", buffers="rank0", compress="zstd")


def main(folder: Path) -> None:
    """Write all of them."""
    metadata = {"git": "2f0c1d7", "nested": {"lr": 0.1, "note": "naïve"}}
    remesh.save(states.dtypes(), folder / "dtypes", metadata=metadata)
    remesh.save(states.dtypes(), folder / "dtypes_compressed", compress="zstd")
    remesh.save(states.values(), folder / "values")
    inner = states.quantised()
    remesh.save({"weight": Scaled(inner["codes"], inner["scale"], (3,))}, folder / "quantised")
    run_ranks(4, save_shards, folder / "sharded")
    run_processes(2, save_training, str(folder))
    pin(folder / "run" / "step_00000001")
    shutil.copytree(folder / "sharded", folder / "lost")
    (folder / "lost" / "remesh.json").unlink()
    repair(folder / "lost", folder / "repaired", keep_unchecked=True)
    shutil.rmtree(folder / "lost")


if __name__ == "__main__":
    target = Path(__file__).parent / remesh.__version__
    if target.exists():
        sys.exit(f"{target} exists")
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
        shutil.copytree(made, target)
