"""Single files of torch.save, read without torch.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import remesh


def test_views_strides_and_shared_storages(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state: dict[str | int, Any] = {
        "base": base,
        "view": base[1:3, 2:5],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "pair": [torch.zeros(1), (torch.ones(2), "text")],
        7: {"lr": 0.1, "empty": {}},
    }
    torch.save(state, tmp_path / "model.pt")
    checkpoint = remesh.Checkpoint(tmp_path / "model.pt")
    assert checkpoint.format == "torch_file"
    for name in ("base", "view", "transposed", "parameter"):
        found = checkpoint.read(name)
        assert torch.equal(found, state[name]), name
        assert found.dtype == state[name].dtype
    assert checkpoint.read("pair.1.0").tolist() == [1, 1]
    assert checkpoint.values["pair.1.1"] == "text"
    assert checkpoint.values["7.lr"] == 0.1

    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "linear.pth")
    other = torch.nn.Linear(3, 2)
    remesh.load(other, tmp_path / "linear.pth")
    assert torch.equal(other.weight, model.weight)


def test_what_is_not_such_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for damaged in (whole[:2000], whole[:-10], b"PK", b""):
        path.write_bytes(damaged)
        with pytest.raises(remesh.CorruptCheckpointError, match="not an archive"):
            remesh.Checkpoint(path)
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(remesh.errors.FormatVersionError, match=r"1\.6"):
        remesh.Checkpoint(path)
    path.unlink()
    with pytest.raises(remesh.CheckpointNotFoundError, match=r"model\.pt"):
        remesh.Checkpoint(path)
