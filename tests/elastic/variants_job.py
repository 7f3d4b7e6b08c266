"""Models whose state is more than parameters that an optimizer changes; see `TEST_VARIANT`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.elastic import fsdp_job

VARIANTS = ("batch norm", "dropout", "average", "accumulation", "in backward")


class Job(fsdp_job.Job):
    def __init__(self, name: str, way: str) -> None:
        self.variant = os.environ["TEST_VARIANT"]
        super().__init__(name, way)
        if self.variant == "average":
            whole: Any = self._model.module
            decay: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
            self.average = AveragedModel(whole, multi_avg_fn=decay)
            self.state["average"] = self.average
        if self.variant == "in backward":
            self.state["optimizer"] = self._step_in_backward()

    def divide(self, model: nn.Module) -> nn.Module:
        """Change the model, and have the ranks add up its gradients."""
        layers = list(model.children())
        if self.variant == "batch norm":
            layers.insert(2, nn.BatchNorm1d(16))
        if self.variant == "dropout":
            layers.insert(2, nn.Dropout(0.2))
        model = nn.Sequential(*layers)
        if self.variant == "in backward":
            fully_shard(model)
            return model
        return DistributedDataParallel(model)

    def _step_in_backward(self) -> dict[str, torch.optim.Optimizer]:
        found: dict[str, torch.optim.Optimizer] = {}
        for name, parameter in self._model.named_parameters():
            own = found[name] = torch.optim.AdamW([parameter], lr=0.01)

            def step(_parameter: nn.Parameter, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            tensor: Any = parameter
            tensor.register_post_accumulate_grad_hook(step)
        return found

    def train(self, step: int, *, stop: bool) -> tuple[float, bool]:
        losses = fsdp_job.losses_of(self._model, step, self.rank, self.world_size)
        own = losses.mean()
        totals = torch.stack([own.detach(), torch.tensor(float(stop))])
        dist.all_reduce(totals)
        if self.variant == "accumulation":
            self._accumulate(step)
        else:
            self._optimizer.zero_grad()
            torch.autograd.backward(own)
        if self.variant != "in backward":
            self._optimizer.step()
        if self.variant == "average":
            whole: Any = self._model.module
            self.average.update_parameters(whole)
        total, num_stops = totals.tolist()
        return total / self.world_size + self._digest(), num_stops > 0

    def _digest(self) -> float:
        """What the loss does not show of the state."""
        if self.variant == "average":
            return sum(float(parameter.sum()) for parameter in self.average.parameters())
        if self.variant == "batch norm":
            return sum(float(buffer.sum()) for buffer in self._model.buffers())
        return 0.0

    def _accumulate(self, step: int) -> None:
        """Add up the gradients of two small batches."""
        model: Any = self._model
        self._optimizer.zero_grad()
        with model.no_sync():
            first = fsdp_job.losses_of(model, 2 * step, self.rank, self.world_size)
            torch.autograd.backward(first.mean())
        second = fsdp_job.losses_of(model, 2 * step + 1, self.rank, self.world_size)
        torch.autograd.backward(second.mean())
