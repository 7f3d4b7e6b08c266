"""Single files of torch.save, read without torch.load."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import remesh
from remesh.errors import MismatchError


def state_of_views() -> dict[str | int, Any]:
    """Tensors that share a storage, and what else lies beside them."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "view": base[1:3, 2:5],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "pair": [torch.zeros(1), (torch.ones(2), "text")],
        7: {"lr": 0.1, "empty": {}, "dtype": torch.int8, "scalar": np.float64(3)},
        "names": {1, 2},
    }


def test_views_strides_and_shared_storages(tmp_path: Path) -> None:
    state = state_of_views()
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
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(remesh.errors.FormatVersionError, match=r"1\.6"):
        remesh.Checkpoint(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\x80\x02N.")
    with pytest.raises(remesh.errors.FormatVersionError, match="TorchScript"):
        remesh.Checkpoint(path)
    path.unlink()
    with pytest.raises(remesh.CheckpointNotFoundError, match=r"model\.pt"):
        remesh.Checkpoint(path)
    with pytest.raises(remesh.CheckpointNotFoundError, match="0 files"):
        remesh.Checkpoint(tmp_path, format="torch_file")


def test_one_of_several_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text("lr: 0.1")
    torch.save({"w": torch.zeros(2)}, tmp_path / "last.ckpt")
    assert remesh.Checkpoint(tmp_path, format="torch_file")["w"].tolist() == [0, 0]
    (tmp_path / "last.ckpt").unlink()
    for epoch in (1, 2):
        torch.save({"w": torch.full((2,), epoch)}, tmp_path / f"epoch_{epoch}.pt")
    with pytest.raises(remesh.CheckpointNotFoundError, match="2 files"):
        remesh.Checkpoint(tmp_path, format="torch_file")
    assert remesh.Checkpoint(tmp_path / "epoch_2.pt")["w"].tolist() == [2, 2]
    remesh.save({"w": torch.full((2,), 3)}, tmp_path, format="torch_file")
    assert remesh.Checkpoint(tmp_path, format="torch_file")["w"].tolist() == [3, 3]


def training_state(seed: int) -> dict[str, Any]:
    """What a training script keeps: schedulers of all kinds, a scaler, averaged weights."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    schedulers = {
        "multi": lr_scheduler.MultiStepLR(optimizer, [2 + seed, 80]),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, 10 + seed),
        "sequence": lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 3 + seed)],
            [2 + seed],
        ),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer, patience=seed),
        "one": lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10 + seed),
    }
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2 - 2 * seed):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        schedulers["multi"].step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + seed))
    objects = {"model": model, "optimizer": optimizer, "ema": averaged, "scaler": scaler}
    return {**objects, **schedulers, "epoch": 3 - seed, "more": {"seen": Counter("aab"), 7: "x"}}


def test_whole_training_states(tmp_path: Path) -> None:
    saved, live = training_state(0), training_state(1)
    packed = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in saved.items()
    }
    torch.save(packed, tmp_path / "state.pt")
    with pytest.raises(MismatchError, match=r"checkpoint: .*/state\.pt\n"):
        remesh.load({"other": torch.ones(3)}, tmp_path / "state.pt")
    remesh.load(live, tmp_path / "state.pt", unexpected="error")
    for key, value in live.items():
        if key in {"model", "ema", "optimizer"}:
            continue
        found = value.state_dict() if hasattr(value, "state_dict") else value
        assert found == packed[key], key
    assert type(live["multi"].milestones) is Counter
    for key in ("model", "ema"):
        pairs = zip(live[key].parameters(), saved[key].parameters(), strict=True)
        assert all(torch.equal(found, expected) for found, expected in pairs)
    assert live["ema"].n_averaged == saved["ema"].n_averaged
    assert live["optimizer"].param_groups[0]["lr"] == saved["optimizer"].param_groups[0]["lr"]


def test_torch_load_reads_what_is_written(tmp_path: Path) -> None:
    """A training state, nested as it was; a tied weight is one storage."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    sum(layer(torch.ones(4)).sum() for layer in model.values()).backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "step": 7,
        "pair": [torch.ones(3, dtype=torch.bfloat16), ("text", None)],
        "wide": torch.tensor([0, 1, 2], dtype=torch.uint16),
    }
    remesh.save(state, tmp_path / "saved", format="torch_file")
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["state.pt"]
    found = torch.load(tmp_path / "saved" / "state.pt", weights_only=True)
    assert found["step"] == 7
    assert torch.equal(found["pair"][0], torch.ones(3, dtype=torch.bfloat16))
    assert tuple(found["pair"][1]) == ("text", None)
    assert found["wide"].tolist() == [0, 1, 2]
    assert found["model"].keys() == model.state_dict().keys()
    assert all(torch.equal(found["model"][name], t) for name, t in model.state_dict().items())
    assert found["model"]["a.weight"].data_ptr() == found["model"]["b.weight"].data_ptr()
    moments = optimizer.state[next(iter(model.parameters()))]
    stored = found["optimizer"]["state"]["a.weight"]
    assert torch.equal(stored["exp_avg"], moments["exp_avg"])

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    remesh.load(state, tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
