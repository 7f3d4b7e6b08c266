"""Megatron's zarr checkpoints, written and read by us and by zarr itself."""

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


def test_zarr_reads_what_is_written(tmp_path: Path) -> None:
    weight = torch.arange(35.0).reshape(7, 5)

    def save(exchange: Exchange) -> None:
        rows = weight.chunk(3)[exchange.rank]  # 3, 3 and 1 rows
        tensor = remesh.ShardedTensor.at_offset("w", rows, (7, 5), (3 * exchange.rank, 0))
        state = {"w": tensor, "b": torch.ones(3, dtype=torch.bfloat16), "step": 4}
        remesh.save(state, tmp_path, format="zarr", group=exchange)

    run_ranks(3, save)
    found: Any = zarr.open(str(tmp_path / "w"), mode="r")
    assert found.chunks == (3, 5)
    np.testing.assert_array_equal(found[...], weight.numpy())
    assert json.loads((tmp_path / "b" / ".zarray").read_text())["dtype"] == "bfloat16"
    assert torch.load(tmp_path / "common.pt") == {"step": 4}
    checkpoint = remesh.Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("w"), weight)
    assert checkpoint.read("b").dtype == torch.bfloat16
    with pytest.raises(remesh.errors.StateError, match="cannot be replaced"):
        remesh.save({"w": weight}, tmp_path, format="zarr", overwrite=True)


def test_shards_that_no_regular_grid_holds(tmp_path: Path) -> None:
    tensor = torch.arange(7.0)
    parts = [
        remesh.ShardedTensor.at_offset("w", tensor[a:b], (7,), (a,))
        for a, b in ((0, 4), (4, 6), (6, 7))
    ]
    remesh.save({"parts": parts}, tmp_path, format="zarr")
    assert sorted(path.name for path in (tmp_path / "w").glob("[0-9]*")) == ["0", "1", "2", "3"]
    assert torch.equal(remesh.Checkpoint(tmp_path).read("w"), tensor)


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
