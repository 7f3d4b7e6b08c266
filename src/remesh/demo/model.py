"""A small Llama-style transformer over bytes, plain torch.

Each block is attention and an MLP, each behind an RMSNorm and added to the residual stream.
Attention is causal and has grouped queries: several query heads share one key-value head. Positions
are not encoded. The MLP is SwiGLU, `down(silu(gate(x)) * up(x))`.

Nothing here knows of parallelism. Attention infers its number of heads from the width that its
projections return, so the same code runs on the heads of one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer: `dim` is cut evenly among heads, which share key-value heads."""

    vocab_size: int = 257
    dim: int = 256
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    hidden_dim: int = 640
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            projected.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same shape."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Block(nn.Module):
    """Attention and MLP with their norms and residual connections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Transformer(nn.Module):
    """The whole model: tokens to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._initialise()
        if config.tied_embeddings:
            self.output.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Draw all matrices from the default generator; what writes to the residual is smaller."""
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) of token numbers to (batch, seq, vocab_size) of logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits
