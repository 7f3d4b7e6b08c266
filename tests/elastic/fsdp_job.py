"""The same for torch: a tiny model, divided among the ranks in several ways."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""With `cuda` NCCL takes each process for a machine of its own: so all may have the same GPU."""

BATCH = 12
"""Divides among 1, 2, 3 and 4 ranks."""


def losses_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    device = next(model.parameters()).device
    batch = torch.randn(2, BATCH, 8, generator=generator).to(device)
    inputs, targets = batch[:, rank::world_size]
    # No model can predict the targets: a loss that came near to 0 could not be compared any more.
    result: torch.Tensor = (model(inputs) - targets).square().mean(1)
    return result


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def uninterrupted(num_steps: int, device: str = "cpu") -> list[float]:
    """The loss of every step in one process."""
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        loss = losses_of(model, step, 0, 1).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return losses


class Optimizer(torch.optim.AdamW):
    """Says when it has changed a part of the parameters."""

    def __init__(self, model: nn.Module, reach: Callable[[str], None]) -> None:
        self._reach = reach
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter in model.parameters():
            groups[parameter.ndim == 1].append(parameter)
        super().__init__([{"params": group} for group in groups], lr=0.01)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:  # called for one by one
        if group is self.param_groups[-1]:
            self._reach("optimizer")
        return bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]


class Job:
    """See `numpy_job.Job`; `reach` is told what of a step is being done."""

    group = None

    def __init__(self, _name: str, way: str) -> None:
        self._way = way
        if DEVICE == "cuda":
            os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[DEVICE])
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.reach: Callable[[str], None] = lambda _phase: None
        model = make_model().to(DEVICE)
        model[2].register_forward_pre_hook(lambda *_: self._reach("forward"))
        model[1].register_full_backward_hook(lambda *_: self._reach("backward"))
        self._model = self.divide(model)
        self._optimizer = Optimizer(self._model, self._reach)
        self.state: dict[str, Any] = {
            "model": self._model,
            "optimizer": self._optimizer,
            "step": 0,
        }

    def _reach(self, phase: str) -> None:
        self.reach(phase)

    def divide(self, model: nn.Module) -> nn.Module:
        if self._way == "ddp":  # each has all of it, and there are several collectives at a time
            return DistributedDataParallel(model, bucket_cap_mb=1e-4)
        mesh = None
        if self._way == "hsdp":  # between two, and copied to the other pairs
            shape = dist.get_world_size() // 2, 2
            mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("copy", "shard"))
        fully_shard(model, mesh=mesh)
        return model

    def train(self, step: int, *, stop: bool) -> tuple[float, bool]:
        own = losses_of(self._model, step, self.rank, self.world_size).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(own)
        totals = torch.stack([own.detach(), torch.tensor(float(stop), device=DEVICE)])
        dist.all_reduce(totals)
        self._optimizer.step()
        total, num_stops = totals.tolist()
        return total / self.world_size, num_stops > 0

    def close(self) -> None:
        dist.destroy_process_group()
