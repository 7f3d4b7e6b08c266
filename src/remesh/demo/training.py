"""The training of the demo: text, layouts, and steps whose losses do not depend on the layout.

The text is Python's own help topics, which ship with the interpreter: real English, nothing to
download. It is read as bytes, with an extra token after each topic. The batch of a step is a pure
function of its number. A data-parallel rank takes its slice of it, a tensor-parallel rank all of
it, and so every layout trains on the same sequence of batches, wherever it starts.

The loss of a step is the mean over the whole batch: slices are equal, and FSDP and DDP average the
gradients over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from remesh.demo.model import ModelConfig, Transformer

END_OF_TOPIC = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The numbers that decide the sequence of losses."""

    model: ModelConfig = field(default_factory=ModelConfig)
    num_sequences: int = 16
    seq_len: int = 48
    learning_rate: float = 1e-3
    num_warmup_steps: int = 5
    num_steps: int = 40
    seed: int = 7

    def rate_factor(self, step: int) -> float:
        """The learning rate of a step, as a fraction of the peak: a rise, then a straight fall."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps)
        return max(1 - 0.9 * done, 0.1)


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A model in some layout, its optimizer and its scheduler."""

    config: TrainConfig
    num_slices: int  # of the batch, one for each rank that trains on its own part
    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR

    @property
    def parts(self) -> dict[str, Any]:
        """Everything that a checkpoint needs of it."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def read_tokens() -> Tensor:
    """The whole text as int64 token numbers, one dim."""
    tokens: list[int] = []
    for name in sorted(topics):
        tokens.extend(topics[name].encode())
        tokens.append(END_OF_TOPIC)
    return torch.tensor(tokens)


def batch_of(tokens: Tensor, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, each (num_sequences, seq_len); targets are one token ahead."""
    starts = np.random.default_rng((config.seed, step)).integers(
        0, len(tokens) - config.seq_len, size=config.num_sequences
    )
    windows = torch.stack([tokens[start : start + config.seq_len + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def build(config: TrainConfig, layout: str) -> Trainee:
    """A fresh model as FSDP2, tensor parallel or DDP, over the default process group."""
    torch.manual_seed(config.seed)
    model = Transformer(config.model)
    num_ranks = dist.get_world_size()
    spread: nn.Module = model
    if layout == "DDP":
        spread = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (num_ranks,))
        _shard(model, mesh) if layout == "FSDP2" else _parallelize(model, mesh)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # As large an epsilon as for Llama 2: a smaller one turns the rounding of tiny gradients into
    # visible steps.
    optimizer = AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-5)
    num_slices = 1 if layout == "tensor parallel" else num_ranks
    return Trainee(config, num_slices, spread, optimizer, LambdaLR(optimizer, config.rate_factor))


def _shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Each rank holds a slice of the first dim of every parameter."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the matrices of a block, the first by their output, the last by their input.

    Between them the residual stream is cut along the sequence, so the norms, whose weights every
    rank holds whole, work on a part of it.
    """
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: Mapping[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": whole,
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": whole,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, dict(plan))
    around = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, around)
    if model.config.tied_embeddings:
        # Cutting the two modules made two parameters of the one that they shared.
        model.output.weight = model.embedding.weight


def train_step(trainee: Trainee, tokens: Tensor, step: int) -> float:
    """One step, numbered from 0; returns the mean loss over the whole batch before the update."""
    inputs, targets = batch_of(tokens, trainee.config, step)
    if trainee.num_slices > 1:
        own = slice(dist.get_rank(), None, trainee.num_slices)
        inputs, targets = inputs[own], targets[own]
    loss = F.cross_entropy(trainee.model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    # Before the optimizer: from there to the end of the step no rank waits for another.
    mean = loss.detach().double()
    if trainee.num_slices > 1:
        dist.all_reduce(mean)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.scheduler.step()
    return float(mean) / trainee.num_slices
