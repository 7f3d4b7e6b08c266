"""Hugging Face Accelerate with remesh instead of `save_state` and `load_state`.

    python examples/accelerate_loop.py
    accelerate launch --num_processes 2 examples/accelerate_loop.py

What `accelerator.prepare` returns goes into the state as it is. The data loader is not prepared:
its batch sampler deals the samples to the processes, and knows where it is on any number of them.
Neither is the scheduler, which Accelerate would step once for each process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import remesh
from remesh.training import ResumableBatchSampler, ResumableSampler

OnStep = Callable[[int, list[int]], None]
"""Told of each finished step: its number, and the samples of this process."""


def train(args: argparse.Namespace, on_step: OnStep = lambda _step, _samples: None) -> nn.Module:
    """Train, from the newest checkpoint on if there is one."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(1)
    data = TensorDataset(torch.arange(64), torch.randn(64, 8))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    sampler = ResumableSampler(
        data, seed=1, rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    batches = ResumableBatchSampler(sampler, args.global_batch_size // accelerator.num_processes)
    # A loader draws from torch's generator when an iteration begins, and one begins at each resume.
    # With a generator of its own it leaves the model's random numbers alone.
    loader = DataLoader(data, batch_sampler=batches, generator=torch.Generator())

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    with remesh.Manager(args.directory, every=args.every, keep=3) as manager:
        resumed = manager.resume(state)
        step = resumed.step if resumed else 0
        for epoch in range(sampler.epoch, args.epochs):
            batches.set_epoch(epoch)
            for samples, numbers in loader:
                target = numbers.sum(1, keepdim=True).to(accelerator.device)
                loss = nn.functional.mse_loss(model(numbers.to(accelerator.device)), target)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                batches.advance()
                step += 1
                manager.step(step, state, metrics={"loss": loss.item()})
                on_step(step, samples.tolist())
                if manager.should_stop:
                    return model
    return model


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model with Accelerate.")
    parser.add_argument("--directory", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="steps from save to save")
    parser.add_argument("--global-batch-size", type=int, default=8)
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse_args())
    print("finished")
