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
from remesh.core.index import Index
from remesh.exchange import Exchange
from remesh.storage import LocalStorage, Storage
from tests.support import run_ranks
from tests.support.format_conformance import Arrays, FormatConformance


def write_config(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def write_array(folder: Path, name: str, array: np.ndarray[Any, Any], **options: Any) -> None:
    made = zarr.create_array(
        store=str(folder / name),
        shape=array.shape,
        dtype=array.dtype,
        zarr_format=2,
        **{"compressors": None, "chunks": tuple(max(n // 2, 1) for n in array.shape), **options},
        config={"write_empty_chunks": True},
    )
    made[...] = array


class TestReadingWhatZarrWrote(FormatConformance):
    def write(self, arrays: Arrays, folder: Path) -> None:
        for name, array in arrays.items():
            write_array(folder, name, array)
        write_config(folder)

    def open(self, folder: Path) -> tuple[Storage, Index]:
        checkpoint = remesh.Checkpoint(folder)
        assert checkpoint.format == "zarr"
        return LocalStorage(folder), checkpoint.index


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
    write_array(tmp_path, "w", np.arange(6.0).reshape(2, 3), **options)
    write_config(tmp_path)
    with pytest.raises(remesh.errors.FormatVersionError, match=says):
        remesh.Checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short", "description"])
def test_damage(damage: str, tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(6.0)}, tmp_path, format="zarr")
    chunk = tmp_path / "w" / "0"
    if damage == "missing":
        chunk.unlink()
    elif damage == "short":
        chunk.write_bytes(chunk.read_bytes()[:-1])
    else:
        (tmp_path / "w" / ".zarray").write_text('{"shape": [-1]}')
    with pytest.raises(remesh.CorruptCheckpointError, match="w"):
        remesh.Checkpoint(tmp_path)
