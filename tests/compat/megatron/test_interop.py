"""Checkpoints that pass between the drop-in, Megatron itself and plain PyTorch."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from remesh.compat.megatron import (
    CheckpointingConfig,
    ShardedTensor,
    load,
    remove_sharded_tensors,
    save,
)
from remesh.compat.megatron.core import save_config
from tests.compat.megatron.interop_jobs import (
    WORLD_SIZES,
    load_here,
    save_and_load_there,
    save_here,
)
from tests.compat.megatron.layouts import flat_shards, row_shards
from tests.support import run_processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_megatron_and_the_drop_in_load_what_the_other_saved(tmp_path: Path) -> None:
    """Every pair of world sizes, both ways; each process imports Megatron once."""
    ours = [tmp_path / f"here {world_size}" for world_size in WORLD_SIZES]
    theirs = [tmp_path / f"there {world_size}" for world_size in WORLD_SIZES]
    for world_size, folder in zip(WORLD_SIZES, ours, strict=True):
        run_processes(world_size, save_here, folder)
    for world_size, folder in zip(WORLD_SIZES, theirs, strict=True):
        run_processes(world_size, save_and_load_there, folder, ours, timeout=280)
    for world_size in WORLD_SIZES:
        run_processes(world_size, load_here, theirs)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_plain_pytorch_loads_what_the_drop_in_saves(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(2, 6)
    state = {**row_shards(4, values=True), "flat": flat_shards(whole, 2, 3, values=True)}
    save({**state, "step": 3}, tmp_path, ("torch_dist", 1))
    # Flattened ranges are stored as Megatron has them: by column of the grid, then flat.
    columns = torch.stack([part.reshape(-1) for part in whole.chunk(2, dim=1)])[None]
    plain = {"weight": torch.zeros(128, dtype=torch.int64), "moment": torch.zeros_like(columns)}
    load_with_torch(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["weight"], torch.arange(128))
    assert torch.equal(plain["moment"], columns)
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"step": 3}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_tensors_are_removed_from_what_torch_has_saved(tmp_path: Path) -> None:
    state = {"optimizer": {"a": torch.ones(2)}, "model": {"a": torch.arange(3)}, "step": 3}
    save_with_torch(state, checkpoint_id=tmp_path)
    save_config(CheckpointingConfig("torch_dist"), tmp_path)
    before = FileSystemReader(tmp_path).read_metadata()
    remove_sharded_tensors(tmp_path, "optimizer.")
    after = FileSystemReader(tmp_path).read_metadata()
    assert set(after.state_dict_metadata) == {"model.a", "step"}
    assert after.planner_data == {"model.a": ("model", "a"), "step": ("step",)}
    for name in ("save_id", "checkpoint_id"):
        assert getattr(after.storage_meta, name) == getattr(before.storage_meta, name)
    kept = {"model": {"a": torch.zeros(3, dtype=torch.int64)}, "step": 0}
    load_with_torch(kept, checkpoint_id=tmp_path)
    assert (kept["model"]["a"].tolist(), kept["step"]) == ([0, 1, 2], 3)  # type: ignore[index]


def old_flattened_checkpoint(folder: Path, whole: torch.Tensor) -> None:
    """Flattened ranges as Megatron Core up to 0.15 stored them, which later ones refuse to write.

    A tensor of shape (2, 6) in two columns becomes one of shape (1, 2, 6): the place of the shard
    in each axis of the grid, then the flattened shard. The true shape is in an attribute.
    """
    chunks, places, data = [], {}, io.BytesIO()
    for item in flat_shards(whole, 2, 3, values=True).values():
        column, part = item.local_chunk_offset_in_global()[1], item.flattened_range
        offset, size = torch.Size((0, column, part.start)), torch.Size((1, 1, len(item.data)))
        begin = data.tell()
        archive = io.BytesIO()
        torch.save(item.data.reshape(size), archive)
        data.write(archive.getvalue())
        chunks.append(dcp_metadata.ChunkStorageMetadata(offset, size))
        index = dcp_metadata.MetadataIndex("moment", offset)
        places[index] = _StorageInfo("__0_0.distcp", begin, data.tell() - begin)
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    entry = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(dtype=whole.dtype), torch.Size((1, 2, 6)), chunks
    )
    stored = dcp_metadata.Metadata({"moment": entry}, storage_data=places)
    stored.mcore_data = {  # type: ignore[attr-defined]
        "moment": {"nd_reformulated_orig_global_shape": tuple(whole.shape)}
    }
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    torch.save({"step": 1}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist"), folder)


def test_flattened_ranges_of_older_megatron_load_in_any_cut(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(2, 6)
    old_flattened_checkpoint(tmp_path, whole)
    loaded = load(flat_shards(whole, 3, 2, values=False), tmp_path)
    for rank, item in flat_shards(whole, 3, 2, values=True).items():
        assert torch.equal(loaded[rank], item.data)
    whole_again = ShardedTensor.from_rank_offsets("moment", torch.zeros(2, 6))
    found = load({"moment": whole_again}, tmp_path)
    assert torch.equal(found["moment"], whole)
    assert found["step"] == 1
