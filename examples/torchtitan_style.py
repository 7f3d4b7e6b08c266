"""A trainer in the style of torchtitan, with its `CheckpointManager` by the same method names.

    python examples/torchtitan_style.py
    torchrun --nproc-per-node 2 examples/torchtitan_style.py

On several ranks the model is sharded by FSDP2. Interrupt it and run it again, on any number of
ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from remesh.training import ResumableBatchSampler, ResumableSampler
from remesh.training.integrations.torchtitan_style import CheckpointManager


class Trainer:
    """Model, optimizer, schedule, data and step, as torchtitan's trainer has them."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.args = args
        self.step = 0
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        num_ranks = 1
        if dist.is_initialized():
            num_ranks = dist.get_world_size()
            fully_shard(model)
        self.model_parts = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
        self.lr_schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizers[0], 5)]
        data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
        self.batches = ResumableBatchSampler(ResumableSampler(data, seed=1), 8 // num_ranks)
        self.loader = DataLoader(data, batch_sampler=self.batches)
        self.checkpointer = CheckpointManager(
            args.directory,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            dataloader=self.batches,
            states={"train_state": self},
            interval=args.interval,
            keep_latest_k=3,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the trainer itself keeps."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.step = state_dict["step"]

    def train(self, on_step: Callable[[int, float], None] = lambda _step, _loss: None) -> None:
        """Train to the last step, from the newest checkpoint on if there is one."""
        self.checkpointer.load(step=self.args.load_step)
        while self.step < self.args.steps:
            for (numbers,) in self.loader:
                self.step += 1
                self.checkpointer.maybe_wait_for_staging()
                loss = self.train_step(numbers)
                on_step(self.step, loss)
                self.checkpointer.save(self.step, last_step=self.step == self.args.steps)
                if self.step == self.args.steps:
                    break
            else:
                self.batches.set_epoch(self.batches.sampler.epoch + 1)
        self.checkpointer.close()

    def train_step(self, numbers: torch.Tensor) -> float:
        """One step on this rank's share of the batch; its loss."""
        (model,) = self.model_parts
        loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.batches.advance()
        return loss.item()


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model as torchtitan would.")
    parser.add_argument("--directory", default="run")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--interval", type=int, default=4, help="steps from save to save")
    parser.add_argument("--load-step", type=int, default=-1, help="-1 for the newest checkpoint")
    return parser.parse_args(words)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group()
    Trainer(parse_args()).train(lambda step, loss: print(f"step {step}: loss {loss:.3f}"))
    if dist.is_initialized():
        dist.destroy_process_group()
