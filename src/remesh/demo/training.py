"""The training of the demo: model, text, layouts, and steps of the same losses in any layout.

The model is a small Llama-style transformer over bytes, plain torch. Each block is attention and an
MLP, each behind an RMSNorm and added to the residual stream. Attention is causal and has grouped
queries; positions are not encoded; the MLP is SwiGLU. Nothing in it knows of parallelism: attention
infers its number of heads from the width that its projections return.

The text is Python's own help topics, which ship with the interpreter: real English, nothing to
download. It is read as bytes, with an extra token after each topic. The batch of a step is a pure
function of its number. A data-parallel rank takes its slice of it, a tensor-parallel rank all of
it, and so every layout trains on the same sequence of batches, wherever it starts.

The loss of a step is the mean over the whole batch: slices are equal, and FSDP and DDP average the
gradients over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

END_OF_TOPIC = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer: `dim` is cut evenly among heads, which share key-value heads."""

    vocab_size: int = 257
    dim: int = 256
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    hidden_dim: int = 640


class Block(nn.Module):
    """Causal attention with grouped queries, and a SwiGLU MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            projected.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected

    def transform(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.transform(self.mlp_norm(x))


class Transformer(nn.Module):
    """The whole model: tokens to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) of token numbers to (batch, seq, vocab_size) of logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


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
        """The learning rate of a step, as a fraction of the peak, to which it rises."""
        return min((step + 1) / self.num_warmup_steps, 1.0)


class Trainee(NamedTuple):
    """A model in some layout, its optimizer and its scheduler."""

    config: TrainConfig
    num_slices: int  # of the batch, one for each rank that trains on its own part
    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR


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
        if layout == "FSDP2":
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        else:
            _parallelize(model, mesh)
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


def _parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the matrices, the first of a block by their output, the last by their input."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("o_proj", "down_proj"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


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
