"""A Lightning module, saved and resumed by remesh.

    python examples/lightning_callback.py
    torchrun --nproc-per-node 2 examples/lightning_callback.py
    torchrun --nproc-per-node 2 examples/lightning_callback.py --shard
    remesh run --nproc-per-node 2 examples/lightning_callback.py

Interrupt it and run it again: it goes on after the newest checkpoint in `run`, with as many
processes as there are then, sharded or not. Under `remesh run` the processes that live go on when
another dies, without losing a step. The model has dropout; the data are made up.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from remesh.elastic import TrainingJob, run
from remesh.training import ResumableBatchSampler, ResumableSampler
from remesh.training.integrations.lightning import EpochLoader, RemeshCallback


class Regression(pl.LightningModule):
    """Learns to add numbers up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))

    def configure_model(self) -> None:
        """Shard the model by FSDP2, where Lightning has a mesh for that."""
        if self.device_mesh is not None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        (numbers,) = batch
        loss = nn.functional.mse_loss(self.layers(numbers), numbers.sum(1, keepdim=True))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """A learning rate that halves with each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def train(
    args: argparse.Namespace, *callbacks: pl.Callback, job: TrainingJob | None = None
) -> Regression:
    """Train, from the newest checkpoint on if there is one."""
    pl.seed_everything(1, verbose=False)
    model = Regression()
    data = TensorDataset(torch.randn(32, 8))
    # Lightning begins the process group later.
    rank = int(os.environ.get("RANK", "0"))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sampler = ResumableSampler(data, seed=1, rank=rank, world_size=num_ranks)
    batches = ResumableBatchSampler(sampler, batch_size=4)
    loader = EpochLoader(data, batches)
    keeping = RemeshCallback(args.directory, loader, every=args.every, keep=3, job=job)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        strategy=ModelParallelStrategy(num_ranks, 1) if args.shard else "auto",
        devices=num_ranks,
        use_distributed_sampler=False,  # the batch sampler deals the samples to the ranks
        enable_checkpointing=False,  # remesh saves
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.directory,
        callbacks=[keeping, *callbacks],
    )
    trainer.fit(model, loader)
    return model


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Lightning module.")
    parser.add_argument("--directory", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="steps from save to save")
    parser.add_argument("--shard", action="store_true", help="shard the model by FSDP2")
    return parser.parse_args(words)


if __name__ == "__main__":
    trained = run(lambda job: train(parse_args(), job=job))
    print(f"finished step {trained.trainer.global_step}")
