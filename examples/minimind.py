"""Fine-tuning a small language model that can be interrupted and resumed on other ranks.

The script keeps the habits of small training projects: two files per run, one for inference and one
for resuming, one function for both, and a sampler that skips the batches that are done.

    python examples/minimind.py
    torchrun --nproc-per-node 4 examples/minimind.py --from-resume

`checkpoints/full_sft_512.pth` are the weights in half precision, which `torch.load` reads.
`checkpoints/full_sft_512_resume.pth` is a remesh checkpoint: a directory with everything that
resuming takes, in full precision. Every rank calls `lm_checkpoint`, and each writes its part.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import remesh
from remesh.training import SkipBatchSampler, convert_step, export_weights, run_id_of

log = logging.getLogger("minimind")


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


def lm_checkpoint(  # noqa: PLR0917 - scripts call it like this
    lm_config: LMConfig,
    weight: str = "full_sft",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epoch: int = 0,
    step: int = 0,
    wandb: Any = None,
    save_dir: str = "checkpoints",
    **extras: Any,
) -> dict[str, Any] | None:
    """Save a run if there is a model, else load it. Every rank calls it.

    Args:
        lm_config: Its sizes are in the names of the files.
        weight: How their names begin.
        model: What to save; None loads.
        optimizer: Saved with the model.
        epoch: The epoch that is under way.
        step: Finished steps of this epoch.
        wandb: The tracker's module or run, on the rank that logs.
        save_dir: Where the files are.
        **extras: Whatever else is to be resumed: a scaler, a scheduler, plain values.

    Returns:
        None after saving, or if there is nothing to load; else everything that was saved, with the
        step converted to this world size.
    """
    name = f"{weight}_{lm_config.hidden_size}{'_moe' if lm_config.use_moe else ''}"
    resume_path = f"{save_dir}/{name}_resume.pth"
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if model is None:
        return load_run(resume_path, world_size)
    assert optimizer is not None, "a run is saved with its optimizer"
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "step": step,
        "world_size": world_size,
        **{key: value for key, value in extras.items() if value is not None},
    }
    run = run_id_of(wandb)
    if run is not None:
        state["wandb_id"] = run.run_id
    remesh.save(state, resume_path, overwrite=True)
    export_weights(model, save_dir, dtype="float16", format="pth", name=name)
    return None


def load_run(resume_path: str, world_size: int) -> dict[str, Any] | None:
    """What was saved, as tensors and plain values; None if nothing was."""
    try:
        data: dict[str, Any] = remesh.Checkpoint(resume_path).state()
    except remesh.CheckpointNotFoundError:
        return None
    data.setdefault("wandb_id", None)
    if data["world_size"] != world_size:
        step = convert_step(data["step"], data["world_size"], world_size)
        log.info("%d ranks, now %d: step %d", data["world_size"], world_size, step)
        data["step"] = step
    return data


# ---------------------------------------------------------------------------------------------
# Model and data: small stand-ins
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LMConfig:
    """Sizes of the model."""

    hidden_size: int = 512
    use_moe: bool = False
    vocab_size: int = 64


class Block(nn.Module):
    """A feed-forward layer, or two that a router chooses from."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.router = nn.Linear(size, 2) if config.use_moe else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))
            for _ in range(2 if config.use_moe else 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layer says."""
        outputs = [expert(x) for expert in self.experts]
        if self.router is None:
            return x + outputs[0]
        shares = self.router(x).softmax(-1)
        return x + sum(shares[..., n : n + 1] * output for n, output in enumerate(outputs))


class LanguageModel(nn.Module):
    """Says from each token what the next one is."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.block = Block(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of guessing each next token."""
        logits = self.lm_head(self.block(self.embed_tokens(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Sentences(Dataset[tuple[int, torch.Tensor]]):
    """Sentences to learn: numbered, each a row of tokens that counts up from somewhere."""

    def __init__(self, num_samples: int, vocab_size: int) -> None:
        self.num_samples = num_samples
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, (torch.arange(6) + index) % self.vocab_size


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------

OnStep = Callable[[int, int, list[int]], None]
"""Told of each finished step of this rank: epoch, step, and the samples it was trained on."""


def ignore_step(_epoch: int, _step: int, _samples: list[int]) -> None:
    """Look at nothing."""


def train(args: argparse.Namespace, on_step: OnStep = ignore_step, wandb: Any = None) -> None:
    lm_config = LMConfig(args.hidden_size, args.use_moe)
    torch.manual_seed(42)
    model: nn.Module = LanguageModel(lm_config)
    train_ds = Sentences(args.num_samples, lm_config.vocab_size)
    train_sampler: Any = range(len(train_ds))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        train_sampler = DistributedSampler(train_ds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    ckp_data = None
    if args.from_resume:
        ckp_data = lm_checkpoint(lm_config, weight=args.save_weight, save_dir=args.save_dir)
    start_epoch = start_step = 0
    if ckp_data:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.load_state_dict(ckp_data["model"])
        optimizer.load_state_dict(ckp_data["optimizer"])
        scaler.load_state_dict(ckp_data["scaler"])
        start_epoch, start_step = ckp_data["epoch"], ckp_data["step"]

    for epoch in range(start_epoch, args.epochs):
        if isinstance(train_sampler, DistributedSampler):
            train_sampler.set_epoch(epoch)
        # Steps are counted from 1, so step n has finished n batches: skip n, not n + 1.
        skip = start_step if epoch == start_epoch else 0
        batch_sampler = SkipBatchSampler(train_sampler, args.batch_size, skip)
        loader = DataLoader(train_ds, batch_sampler=batch_sampler, num_workers=args.num_workers)
        iters = len(loader) + skip
        for step, (samples, tokens) in enumerate(loader, start=skip + 1):
            progress = (epoch * iters + step) / (args.epochs * iters)
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
            loss = model(tokens)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            on_step(epoch, step, samples.tolist())
            if step % args.save_interval == 0 or step == iters:
                log.info("epoch %d, step %d/%d, loss %.3f", epoch + 1, step, iters, loss.item())
                lm_checkpoint(
                    lm_config,
                    weight=args.save_weight,
                    model=model,
                    optimizer=optimizer,
                    epoch=epoch,
                    step=step,
                    wandb=wandb,
                    save_dir=args.save_dir,
                    scaler=scaler,
                )


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a small language model.")
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--save-weight", default="full_sft")
    parser.add_argument("--save-interval", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--num-samples", type=int, default=12_800)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--use-moe", action="store_true")
    parser.add_argument("--from-resume", action="store_true", help="go on if there is a run")
    return parser.parse_args(words)


def main() -> None:
    args = parse_args()
    is_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING)
    if is_job:
        dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        if is_job:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
