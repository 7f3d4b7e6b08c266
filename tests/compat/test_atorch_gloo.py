"""Saved by two ranks, loaded by more, in FSDP1 and FSDP2, and trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from remesh.checkpoint.local import describe_local
from remesh.compat.atorch import (
    ShardOptim,
    init_empty_weights_with_disk_offload,
    save_fsdp_flat_param,
    save_fsdp_optim_param,
)
from remesh.errors import StateError
from remesh.exchange import Exchange
from tests.support import run_processes
from tests.support.torch_versions import needs


class Scale(nn.Module):
    """A module with a parameter of its own and no `reset_parameters`."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(5))
        self.register_buffer("offset", torch.arange(5.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.factor + self.offset
        return result


class Net(nn.Module):
    """Odd sizes, so that ranges end inside of rows and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), Scale()) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.register_buffer("seen", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        result: torch.Tensor = self.head(x)
        return result


def fsdp1(model: Net, ranks: dist.ProcessGroup, use_orig_params: bool = True) -> nn.Module:
    wrap = functools.partial(
        FullyShardedDataParallel,
        process_group=ranks,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return wrap(model)


def fsdp2(model: Net, ranks: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(ranks, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu")
        modules: Iterator[Any] = model.modules()
        for module in modules:
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                module.reset_parameters()
    return model


Wrap = Callable[[Net, dist.ProcessGroup], nn.Module]
WRAPS: dict[str, Wrap] = {"fsdp1": fsdp1, "fsdp2": fsdp2}
SAVED: dict[str, Wrap] = {**WRAPS, "flat": functools.partial(fsdp1, use_orig_params=False)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step, the same on every rank, so that the mean of gradients is that of one rank."""
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What an unsharded model has learnt after one step."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer, seed=2)
    return model, optimizer


def check(model: nn.Module, optimizer: torch.optim.Optimizer, *, exact: bool = True) -> None:
    """Compare what this rank holds with the unsharded model, state by state."""
    full, full_optimizer = trained()
    if not exact:
        train(full, full_optimizer, seed=3)
    expected = {
        entry.name: torch.as_tensor(entry.parts[0].data)
        for entry in describe_local({"model": full, "optimizer": full_optimizer}).tensors
    }
    found = describe_local({"model": model, "optimizer": optimizer}).tensors
    held = {entry.name for entry in found if any(part.box.size for part in entry.parts)}
    assert any(name.startswith("optimizer.state.") for name in held)
    for entry in found:
        for part in entry.parts:
            wanted = expected[entry.name][part.box.slices]
            torch.testing.assert_close(
                part.data, wanted, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
            )


def _job(exchange: Exchange, path: Path, pairs: list[tuple[str, str]]) -> None:
    two, everybody = dist.new_group([0, 1]), dist.group.WORLD
    assert everybody is not None
    for name, wrap in SAVED.items():
        if exchange.rank < 2:
            torch.manual_seed(1)
            model = wrap(Net(), two)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
            train(model, optimizer, seed=2)
            check(model, optimizer)
            save_fsdp_flat_param(model, path / name, group=two)
            save_fsdp_optim_param(model, optimizer, path / name, group=two)
        dist.barrier()
    for saved, wanted in pairs:
        with init_empty_weights_with_disk_offload(path / saved):
            empty = Net()
        assert all(parameter.is_meta for parameter in empty.parameters())
        model = WRAPS[wanted](empty, everybody)
        assert not any("reset_parameters" in vars(module) for module in model.modules())
        buffers = [buffer.tolist() for buffer in model.buffers()]
        assert buffers == [3, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(ShardOptim(path / saved).reshard_optim_state_dict(model))
        assert optimizer.param_groups[0]["lr"] == 0.01
        check(model, optimizer)
        train(model, optimizer, seed=3)
        check(model, optimizer, exact=False)
    _replicas_are_refused(exchange, path / "replicas")


def _replicas_are_refused(exchange: Exchange, path: Path) -> None:
    with pytest.raises(StateError, match="in the order of ranks"):
        save_fsdp_flat_param(Net(), path, group=exchange)
    assert not (path / "ckpt_meta").exists()


FILES = [
    "buffers",
    "ckpt_meta",
    "flat_meta.00000-00002",
    "flat_meta.00001-00002",
    "flat_param.00000-00002",
    "flat_param.00001-00002",
    "optim_meta",
    "optim_param.00000-00002",
    "optim_param.00001-00002",
]


@needs("gloo averages")
def test_two_ranks_to_three(tmp_path: Path) -> None:
    # What is stored is the same for all three, so each is loaded once.
    pairs = [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1"), ("flat", "fsdp2")]
    run_processes(3, _job, tmp_path, pairs)
    for name in SAVED:
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == FILES
