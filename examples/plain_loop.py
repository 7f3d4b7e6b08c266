"""A training loop of one's own, saved and resumed by remesh.

    python examples/plain_loop.py
    torchrun --nproc-per-node 4 examples/plain_loop.py
    remesh run --nproc-per-node 4 examples/plain_loop.py

On several ranks the model is sharded by FSDP2. Kill it and run it again, on any number of ranks: it
goes on after the newest checkpoint in `run`, and every sample of an epoch is seen exactly once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import remesh
from remesh.training import KeepEvery, KeepLast, ResumableBatchSampler, ResumableSampler

OnStep = Callable[[int, list[int], float], None]
"""Told of each finished step: its number, and this rank's samples and loss."""


def ignore_step(_step: int, _samples: list[int], _loss: float) -> None:
    """Look at nothing."""


def train(args: argparse.Namespace, on_step: OnStep = ignore_step) -> nn.Module:
    """Train, from the newest checkpoint on if there is one."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1)
    numbers = torch.randn(args.num_samples, 8)
    data = TensorDataset(torch.arange(args.num_samples), numbers)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    if num_ranks > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    batches = ResumableBatchSampler(ResumableSampler(data, seed=1), args.batch_size // num_ranks)
    loader = DataLoader(data, batch_sampler=batches)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}
    keep = [KeepLast(2), KeepEvery(100)]
    with remesh.Manager(args.directory, every=args.every, keep=keep) as manager:
        resumed = manager.resume(state)
        step = resumed.step if resumed else 0
        for epoch in range(batches.sampler.epoch, args.epochs):
            batches.set_epoch(epoch)
            for samples, inputs in loader:
                loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                batches.advance()
                step += 1
                on_step(step, samples.tolist(), loss.item())
                manager.step(step, state, metrics={"loss": loss.item()})
                if manager.should_stop:
                    return model
        if step % args.every:
            manager.save(step, state)
    return model


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model.")
    parser.add_argument("--directory", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="steps from save to save")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8, help="on all ranks together")
    return parser.parse_args(words)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group()
    train(parse_args(), lambda step, _samples, loss: print(f"step {step}: loss {loss:.3f}"))
    if dist.is_initialized():
        dist.destroy_process_group()
