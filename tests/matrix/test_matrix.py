"""Training states that other libraries wrote load whole, with their optimizers, into any layout.

Parameters, moments and step counters are what was saved, bit for bit, and the next three losses are
those of the run that was not interrupted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import remesh
from remesh.exchange import Exchange
from tests.matrix.model import Model, optimizer_of, steps
from tests.matrix.writers import DEEPSPEED, RECORDED, WRITERS
from tests.support import run_processes
from tests.support.torch_versions import needs

# Lightning says so where Slurm is installed.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning")

NEXT = range(2, 5)
Expected = dict[str, dict[str, Any]]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state by name, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        state = optimizer.state[parameter]
        found.update({f"{name}/{key}": value for key, value in state.items()})
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in found.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each program saves, and how it goes on in `expected.pt`."""
    root = tmp_path_factory.mktemp("matrix")
    expected: Expected = {}
    for name, (file, write) in WRITERS.items():
        model, optimizer = write(root / file)
        state = state_of(model, optimizer)
        groups = [group["weight_decay"] for group in optimizer.param_groups]
        losses = steps(model, optimizer, NEXT)
        expected[name] = {"state": state, "losses": losses, "groups": groups}
    recorded = torch.load(DEEPSPEED / "expected.pt")
    for name, kind in RECORDED.items():
        shutil.copytree(DEEPSPEED / kind, root / kind)
        expected[name] = recorded[kind]
        names = [key for key in recorded[kind]["state"] if "/" not in key]
        expected[name]["state"] |= {f"{key}/step": torch.tensor(2.0) for key in names}
    torch.save(expected, root / "expected.pt")
    return root


def target_of(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if name == "DCP Stateful":
        return {"app": {"model": model, "optimizer": optimizer}}
    if name == "Lightning":
        holder = nn.Module()
        holder.model = model
        return {"state_dict": holder, "optimizer_states": [optimizer], "global_step": 0}
    if name == "Lightning sharded":
        return {"state_dict": model, "optimizer_0": optimizer, "global_step": 0}
    if name == "Accelerate sharded":
        return {"model": model, "optimizer": optimizer, "scheduler": {"last_epoch": 0}}
    return {"model": model, "optimizer": optimizer}


def load_all(_exchange: Exchange, root: Path, layout: str, size: int) -> None:
    """Load what each program saved, and go on."""
    expected: Expected = torch.load(root / "expected.pt")
    mesh = init_device_mesh("cpu", (size,))
    files = {name: file for name, (file, _) in WRITERS.items()}
    for name, file in (files | RECORDED).items():
        model = Model(seed=1)
        if layout == "tp":
            parallelize_module(model.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            fully_shard(model.net[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model)
        remesh.load(target_of(name, model, optimizer), root / file)
        wanted = expected[name]
        found = state_of(model, optimizer)
        assert found.keys() == wanted["state"].keys(), name
        for key, tensor in wanted["state"].items():
            assert torch.equal(found[key], tensor), (name, key)
        assert [g["weight_decay"] for g in optimizer.param_groups] == wanted["groups"], name
        losses = steps(model, optimizer, NEXT)
        torch.testing.assert_close(losses, wanted["losses"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param("fsdp", 3, marks=needs("gloo averages")),
        pytest.param("tp", 2, marks=pytest.mark.slow),
    ],
)
def test_they_go_on_where_they_were_saved(layout: str, size: int, saved: Path) -> None:
    run_processes(size, load_all, saved, layout, size)
