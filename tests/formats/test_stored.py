"""Checkpoints that released versions wrote are read for ever, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW

import remesh
from remesh.catalog import list_checkpoints
from remesh.storage import LocalStorage
from tests.data.native import states

VERSIONS = sorted((Path(__file__).parent.parent / "data" / "native").glob("[0-9]*"))
"""The folder of each version, which `tests/data/native/make.py` of that version has written."""

pytestmark = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)


def shown(value: Any) -> Any:
    """A value in a form that is equal only if it is the same to the last bit."""
    if isinstance(value, torch.Tensor):
        rows = value.detach().reshape(1) if value.ndim == 0 else value.detach()
        return str(value.dtype), tuple(value.shape), rows.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {repr(key): shown(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value), [shown(item) for item in value]
    return repr(value)


def state_of(path: Path) -> Any:
    """What a checkpoint holds, all of whose bytes have the digests that they were written with."""
    checkpoint = remesh.Checkpoint(path)
    assert checkpoint.verify().damages == ()
    return checkpoint.state()


@pytest.mark.parametrize("name", ["dtypes", "dtypes_compressed"])
def test_each_element_type(version: Path, name: str) -> None:
    assert shown(state_of(version / name)) == shown(states.dtypes())
    metadata = remesh.Checkpoint(version / "dtypes").metadata
    assert metadata == {"git": "2f0c1d7", "nested": {"lr": 0.1, "note": "naïve"}}


def test_plain_values(version: Path) -> None:
    assert shown(state_of(version / "values")) == shown(states.values())


def test_tensors_made_of_tensors(version: Path) -> None:
    found = state_of(version / "quantised")["weight"]
    assert found.pop("__tensor_flatten__")["context"] == [3]
    assert shown(found) == shown(states.quantised())


@pytest.mark.parametrize("name", ["sharded", "repaired"])
def test_shards_of_four_ranks(version: Path, name: str) -> None:
    found = state_of(version / name)
    model, optimizer = found.pop("model"), found.pop("optimizer")
    assert shown(found) == shown(states.sharded() | states.objects())
    weights = {f"{rank}.weight": states.counted(1, 2, start=rank) for rank in range(4)}
    assert shown(model) == shown(weights)
    assert optimizer["param_groups"][0]["params"] == list(weights)
    assert bool(remesh.Checkpoint(version / name).verify().unchecked) == (name == "repaired")


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_goes_on_in_another_layout(version: Path, step: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(version / "run", root)
    assert [info.is_pinned for info in list_checkpoints(LocalStorage(root))] == [True, False]
    if step == 1:
        shutil.rmtree(root / "step_00000002")
    expected, model = states.training(), states.Model()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = AdamW(trained)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with remesh.Manager(root, every=1, save_at_end=False) as manager:
        resumed = manager.resume(state)
    assert resumed is not None
    assert (resumed.step, state["step"]) == (step, 1)
    assert shown(dict(model.state_dict())) == shown(expected["model"])
    moments = {
        name: optimizer.state[each] for name, each in model.named_parameters() if each.requires_grad
    }
    assert shown(moments) == shown(expected["moments"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    own = state_of(root / f"step_{step:08d}")["model.norm.running_mean@rank_00001"]
    assert shown(own) == shown(expected["model"]["norm.running_mean"] + 1)


def test_shards_in_compressed_files(version: Path) -> None:
    assert shown(state_of(version / "compressed")) == shown(states.training()["model"])
