"""Training steps whose losses do not depend on the layout, beyond float rounding.

The loss of a step is the exact mean over the global batch. With FSDP2 every rank takes the mean
over its slice, slices are equal, and FSDP averages the gradients over the ranks. With tensor
parallelism every rank computes the loss of the whole batch and the gradients need no averaging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from remesh.demo.config import Layout, TrainConfig
from remesh.demo.data import global_batch, slice_of
from remesh.demo.layouts import apply_layout
from remesh.demo.model import Transformer


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """What is trained and saved: a model in some layout, its optimizer and its scheduler."""

    layout: Layout
    model: Transformer
    optimizer: AdamW
    scheduler: LambdaLR


def build(config: TrainConfig, layout: Layout) -> Trainee:
    """A fresh model in the given layout over torch.distributed's default group."""
    torch.manual_seed(config.seed)
    model = Transformer(config.model)
    apply_layout(model, layout)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        eps=config.adam_eps,
    )
    return Trainee(layout, model, optimizer, LambdaLR(optimizer, config.rate_factor))


def train_step(trainee: Trainee, config: TrainConfig, tokens: Tensor, step: int) -> float:
    """One step, numbered from 0; returns the mean loss over the global batch before the update."""
    batch = global_batch(
        tokens,
        seed=config.seed,
        step=step,
        num_sequences=config.num_sequences,
        seq_len=config.seq_len,
    )
    num_parts = trainee.layout.num_data_parts
    part = dist.get_rank() if num_parts > 1 else 0
    own = slice_of(batch, part, num_parts)
    logits = trainee.model(own.inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), own.targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    # Before the optimizer: from there to the end of the step no rank waits for another.
    mean = _mean_over_parts(loss.detach(), num_parts)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.scheduler.step()
    return mean


def _mean_over_parts(loss: Tensor, num_parts: int) -> float:
    if num_parts == 1:
        return float(loss)
    total = loss.double()
    dist.all_reduce(total)
    return float(total) / num_parts
