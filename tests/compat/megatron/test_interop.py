"""Checkpoints that pass between the drop-in and plain PyTorch, and of older Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from remesh.compat.megatron import CheckpointingConfig, remove_sharded_tensors, save
from remesh.compat.megatron.core import save_config
from tests.compat.megatron.layouts import flat_shards, row_shards


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
