"""Megatron's zarr checkpoints, written by zarr itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import remesh
from remesh.exchange import Exchange
from tests.support import run_ranks
from tests.support.zarr_files import write_bfloat16, write_zarr


def test_ranks_load_other_boxes_than_the_chunks(tmp_path: Path) -> None:
    weight = torch.arange(35.0).reshape(7, 5)
    write_zarr({"w": weight.numpy()}, tmp_path, {"step": 4, "rng/shard_1_2": {"seed": 3}})
    write_bfloat16("b", torch.arange(3).to(torch.bfloat16), tmp_path)

    def load(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, int, Any]:
        rows, half = torch.zeros(3, 5), torch.zeros(3, dtype=torch.bfloat16)
        state: dict[str, Any] = {
            "w": remesh.ShardedTensor.at_offset("w", rows, (7, 5), (2 * exchange.rank, 0)),
            "b": half,
            "step": 0,
            "rng": remesh.sharding.ShardedObject("rng", None, (2,), (1,)),
        }
        remesh.load(state, tmp_path, group=exchange)
        return rows, half, state["step"], state["rng"].data

    for rank, (rows, half, step, rng) in enumerate(run_ranks(2, load)):
        assert torch.equal(rows, weight[2 * rank :][:3])
        assert half.tolist() == [0, 1, 2]
        assert (step, rng) == (4, {"seed": 3})


@pytest.mark.parametrize(
    ("options", "says"),
    [({"compressors": "auto"}, "compressed"), ({"order": "F"}, "column order")],
)
def test_what_cannot_be_read_in_place(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    options = {"compressors": None, **options}
    made = zarr.create_array(
        store=str(tmp_path / "w"), shape=(2, 3), dtype="f8", zarr_format=2, **options
    )
    made[...] = np.arange(6.0).reshape(2, 3)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(remesh.errors.FormatVersionError, match=says):
        remesh.Checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    with pytest.raises(remesh.CheckpointNotFoundError, match="sharded_backend zarr"):
        remesh.Checkpoint(tmp_path, format="zarr")
