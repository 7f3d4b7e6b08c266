"""Tensors of one name on device meshes beside each other, on gloo processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import remesh
from remesh.errors import DivergedReplicaError
from remesh.exchange import Exchange
from remesh.planner.saving import joined_by_meshes
from tests.adapters.parallel_models import (
    CPU,
    LAYOUTS,
    Model,
    State,
    fsdp1,
    job,
    set_moments,
    train,
)
from tests.adapters.stored import check_equal
from tests.support import run_processes

REFUSED = {
    "weight": "model.weight",
    "in DDP": "model.weight",
    "in FSDP1": "model.weight",
    "moment": "optimizer.state.bias.exp_avg",
    "slices of one mesh": "model.weight",
}
"""What differs between the meshes, or how these are made: the tensor that is refused."""


def jobs_on_meshes(exchange: Exchange, folder: Path) -> dict[str, str]:
    """Two modules with the same names, each with its optimizer, on two ranks each; save twice."""
    job_number = exchange.rank // 2
    sliced = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "dp"))["dp"]
    own_mesh = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][job_number]
    told = {}
    for how in (*REFUSED, "equal", "own names"):
        torch.manual_seed(0)
        module: nn.Module = nn.Linear(6, 4)
        if how == "in DDP":
            module = DistributedDataParallel(module, process_group=own_mesh.get_group())
        elif how == "in FSDP1":
            module = FullyShardedDataParallel(
                module, own_mesh.get_group(), device_id=CPU, use_orig_params=True
            )
        else:
            fully_shard(module, mesh=sliced if how == "slices of one mesh" else own_mesh)
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state: dict[str, Any] = {"model": module, "optimizer": optimizer}
        if how == "own names":
            state = {f"job {job_number}": state}
        with remesh.Saver() as saver:
            saver.save(state, folder / how / "first")
            with torch.no_grad():
                if how == "moment":
                    optimizer.state[[*module.parameters()][1]]["exp_avg"] += job_number
                elif how != "equal":
                    next(module.parameters()).add_(job_number)
            try:
                saver.save(state, folder / how / "second")
                told[how] = "saved"
            except DivergedReplicaError as error:
                told[how] = str(error)
    return told


def test_what_differs_between_meshes_is_not_stored_under_one_name(tmp_path: Path) -> None:
    for told in run_processes(4, jobs_on_meshes, tmp_path):
        assert told.pop("equal") == told.pop("own names") == "saved"
        for how, name in REFUSED.items():
            message = told[how]
            assert re.match(rf"{name}: ranks [01] and [23] hold different values", message), how
            assert "different device meshes" in message
            assert "remesh.sharding.NamedModule" in message
    saved = {folder.name for folder in tmp_path.iterdir() if (folder / "second").exists()}
    assert saved == {"equal", "own names"}


def trained(seed: int, group: Any, *, original: bool) -> State:
    """A job in FSDP1 on a process group, after some steps, with known moments."""
    model = Model(seed)
    wrapped = fsdp1(model, process_group=group, use_orig_params=original)
    state = job(wrapped)
    train(state)
    set_moments(state["optimizer"])
    return state


def actor_and_critic(exchange: Exchange, folder: Path) -> None:
    """Two jobs in FSDP1, each on a process group of its own; then on the other; then on all."""
    own = exchange.rank // 2
    group = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][own].get_group()
    roles = ("actor", "critic")
    layouts = {
        "own": {roles[own]: trained(own, group, original=True)},
        "other": {roles[1 - own]: trained(5, group, original=False)},
        "all": {role: trained(7, None, original=role == "actor") for role in roles},
    }
    source = folder / "whole"
    for name, state in layouts.items():
        remesh.load(state, source)
        source = folder / name
        remesh.save(state, source)


def test_fsdp1_on_groups_beside_each_other(tmp_path: Path) -> None:
    whole = {role: job(Model(seed)) for seed, role in enumerate(("actor", "critic"))}
    for state in whole.values():
        train(state)
    remesh.save(whole, tmp_path / "whole")
    run_processes(4, actor_and_critic, tmp_path)
    for name in ("own", "other", "all"):
        check_equal(tmp_path / name, tmp_path / "whole")


def joined_by_tensor_parallelism(exchange: Exchange, folder: Path) -> None:
    """What tensor parallelism does not cut is on one mesh axis; the other joins its copies."""
    state = job(LAYOUTS["fsdp2 over tensor parallel"](Model(1)))
    with remesh.Saver() as saver:
        saver.save(state, folder / "first")
        with torch.no_grad():
            state["model"].blocks[0].norm.weight += exchange.rank
        saver.save(state, folder / "second")


def test_copies_on_meshes_that_another_one_joins_are_not_compared_again(tmp_path: Path) -> None:
    run_processes(4, joined_by_tensor_parallelism, tmp_path)


@pytest.mark.parametrize(
    ("meshes", "joined"),
    [
        ([[0], [0], [2], [2]], "0011"),
        ([[0], [1], [0], [1]], "0101"),
        ([[0, 1], [1], [0], [3]], "0001"),
        ([[0], [1], [2], [0, 1, 2]], "0000"),
        ([[], [0], [], [0]], "0101"),
    ],
)
def test_meshes_join_ranks(meshes: list[list[int]], joined: str) -> None:
    found = joined_by_meshes(meshes).tolist()
    order = list(dict.fromkeys(found))
    assert "".join(str(order.index(number)) for number in found) == joined
