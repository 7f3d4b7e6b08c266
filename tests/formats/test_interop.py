"""Real torch.distributed.checkpoint and real Megatron on one side, remesh on the other.

Each test saves with one number of ranks and loads with another, FSDP2 and hand-made shards, in
both directions.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import remesh
from remesh.exchange import Exchange
from tests.engine.bits import bits_of
from tests.support import run_processes, run_ranks

Contents = dict[str, Any]


def bits(tensor: torch.Tensor) -> Any:
    return bits_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


# ---------------------------------------------------------------------------------------------
# torch.distributed.checkpoint
# ---------------------------------------------------------------------------------------------


def make_dcp_state(exchange: Exchange, seed: int) -> dict[str, Any]:
    """FSDP2 in uneven shards, a DTensor cut by columns (strided shards), bf16, plain values."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (exchange.world_size,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    columns = torch.randn(6, 10).to(torch.bfloat16)
    return {
        "model": dict(model.state_dict()),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "plain": torch.randn(4),
        "step": seed,
        "nested": {"list": [1, 2], "betas": (0.9, seed)},
    }


def contents(state: dict[str, Any]) -> Contents:
    tensors = {**state["model"], "columns": state["columns"], "plain": state["plain"]}
    return {name: bits(tensor) for name, tensor in tensors.items()}


VALUES = (1, {"list": [1, 2], "betas": (0.9, 1)})


def save_both(exchange: Exchange, theirs: Path, ours: Path) -> Contents:
    state = make_dcp_state(exchange, 1)
    dcp.state_dict_saver.save(state, checkpoint_id=theirs)
    remesh.save(state, ours, format="torch_dcp")
    return contents(state)


def load_both(exchange: Exchange, theirs: Path, ours: Path) -> list[tuple[Contents, Any]]:
    by_remesh, by_dcp = (make_dcp_state(exchange, 2) for _ in range(2))
    remesh.load(by_remesh, theirs)
    dcp.state_dict_loader.load(by_dcp, checkpoint_id=ours)
    return [(contents(one), (one["step"], one["nested"])) for one in (by_remesh, by_dcp)]


@pytest.mark.parametrize(
    ("num_savers", "num_loaders"),
    [
        pytest.param(2, 4),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_torch_and_remesh_load_what_the_other_saved(
    num_savers: int, num_loaders: int, tmp_path: Path
) -> None:
    places = tmp_path / "theirs", tmp_path / "ours"
    saved, *_ = run_processes(num_savers, save_both, *places)
    for loaded in run_processes(num_loaders, load_both, *places):
        assert loaded == [(saved, VALUES)] * 2


# ---------------------------------------------------------------------------------------------
# Megatron
# ---------------------------------------------------------------------------------------------


def megatron() -> Any:
    """Megatron's module; ranks that do not need it are spared seconds of imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it would like to have installed
        return importlib.import_module("megatron.core.dist_checkpointing")


RNG = {"state": torch.arange(4, dtype=torch.uint8), "numpy": ("MT", [1.5])}
OURS = SimpleNamespace(ShardedTensor=remesh.ShardedTensor, mapping=remesh.sharding)
ROWS, COLUMNS = 12, 6
COMMON = {
    "iteration": 7,
    "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
    "nested": {"list": [1, {"a": 2}], 5: "five"},
}


def whole_tensors() -> dict[str, torch.Tensor]:
    # Of its own, since ranks that are threads share torch's.
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(ROWS, COLUMNS, generator=generator),
        "layers.bias": torch.randn(4, COLUMNS, generator=generator).to(torch.bfloat16),
    }


def state_of(package: Any, exchange: Exchange, *, empty: bool) -> dict[str, Any]:
    """This rank's part, described by the classes of a package: both have the same names."""
    rank, num_ranks = exchange.rank, exchange.world_size
    rows, layers = (whole.chunk(num_ranks)[rank].clone() for whole in whole_tensors().values())
    if empty:
        rows.zero_()
        layers.zero_()
    made = package.ShardedTensor.from_rank_offsets
    rng = None if empty else RNG
    state: dict[str, Any] = {
        "weight": made("weight", rows, (0, rank, num_ranks)),
        "layers": {
            f"{number}": made(
                "layers.bias", layer, (0, rank * len(layers) + number, 4), prepend_axis_num=1
            )
            for number, layer in enumerate(layers)
        },
        "rng": package.mapping.ShardedObject("rng", rng, (1,), (0,), replica_id=rank),
    }
    return state if empty else {**state, **COMMON}


def on_the_cpu() -> None:
    """What Megatron asks of CUDA, and of child processes, on a machine without it."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")


def contents_of(weight: Any, layers: dict[Any, Any], rng: Any) -> Any:
    stacked = torch.stack([layers[key] for key in sorted(layers)])
    return bits(weight), bits(stacked), (rng["state"].tolist(), rng["numpy"])


def expected_of(rank: int, num_ranks: int) -> Any:
    weight, layers = (whole.chunk(num_ranks)[rank] for whole in whole_tensors().values())
    return contents_of(weight, dict(enumerate(layers)), RNG)


def load_from_megatron(exchange: Exchange, folder: Path) -> Any:
    state = state_of(OURS, exchange, empty=True) | {"iteration": 0}
    remesh.load(state, folder, group=exchange)
    assert state["iteration"] == 7
    weight, *layers = [
        tensor.parts[0].data for tensor in (state["weight"], *state["layers"].values())
    ]
    return contents_of(
        weight, {f"{n}": layer[0] for n, layer in enumerate(layers)}, state["rng"].data
    )


def save_for_megatron(exchange: Exchange, folder: Path) -> None:
    state = state_of(OURS, exchange, empty=False)
    remesh.save(state, folder, format="torch_dist", group=exchange)


def megatron_save_and_load(exchange: Exchange, theirs: Path, ours: Path) -> Any:
    on_the_cpu()
    megatron().save(state_of(megatron(), exchange, empty=False), str(theirs))
    found = megatron().load(state_of(megatron(), exchange, empty=True), str(ours))
    assert {name: found[name] for name in COMMON} == COMMON
    return contents_of(found["weight"], found["layers"], found["rng"])


@pytest.mark.parametrize(
    ("num_theirs", "num_ours"), [(2, 4), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_megatron_and_remesh_load_what_the_other_saved(
    num_theirs: int, num_ours: int, tmp_path: Path
) -> None:
    """In one job of Megatron's, whose ranks import it for seconds."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    run_ranks(num_ours, save_for_megatron, ours)
    for rank, loaded in enumerate(run_processes(num_theirs, megatron_save_and_load, theirs, ours)):
        assert loaded == expected_of(rank, num_theirs)
    for rank, loaded in enumerate(run_ranks(num_ours, load_from_megatron, theirs)):
        assert loaded == expected_of(rank, num_ours)
    found = remesh.Checkpoint(theirs)
    assert found.state()["nested"] == COMMON["nested"]
    assert found.values["args"] == COMMON["args"]
