"""A small mixture-of-experts transformer, cut by hand, that trains where it is whole.

Grouped-query attention with a packed query, key and value projection, experts with packed gate and
up projections behind a router with a bias that no gradient moves, an odd number of layers and,
behind them, a layer that predicts the token after the next one. The head shares the weight of the
embedding unless it is `untied`.

A `Chunk` is what a pipeline stage holds: all of the model, or some of its layers. It is built for
one tensor-parallel rank and some of the experts, and says what it holds by `sharded_state_dict`.
Only a chunk that is the whole model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from remesh.adapters import (
    Block,
    Split,
    build_sharded_state_dict,
    default_sharded_state_dict,
    rename_shards,
)
from remesh.core.sharded import ShardedTensor


@dataclass(frozen=True)
class Shape:
    """The model; `num_layers` without the one that predicts further ahead."""

    num_layers: int = 3
    predicts_ahead: bool = True
    bias: bool = True
    tied: bool = True
    hidden: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 2
    inner: int = 4
    num_experts: int = 4
    num_chosen: int = 2
    vocabulary: int = 13

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.predicts_ahead


@dataclass(frozen=True)
class Place:
    """Which part of the model a chunk is."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    layers: range = range(0)
    has_embedding: bool = True
    has_head: bool = True

    def split(self, dim: int, *blocks: Block) -> Split:
        return Split(dim, self.tp_rank, self.tp_size, blocks)


class Cut(nn.Module):
    """A weight and perhaps a bias, of which this rank has the shard that `splits` say."""

    def __init__(
        self, rows: int, columns: int, splits: Mapping[str, Split], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.splits = splits
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        return build_sharded_state_dict(
            self.state_dict(), self.splits, prefix, shard=0, num_shards=1
        )


class Attention(nn.Module):
    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.size = shape.head_size
        self.num_heads = shape.num_heads // place.tp_size
        self.num_kv_heads = max(shape.num_kv_heads // place.tp_size, 1)
        kv = Block(shape.num_kv_heads * self.size, num_units=shape.num_kv_heads)
        packed = place.split(0, Block(shape.num_heads * self.size), kv, kv)
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.size
        both = {"weight": packed, "bias": packed}
        self.qkv = Cut(rows, shape.hidden, both, bias=shape.bias)
        columns = self.num_heads * self.size
        self.out = Cut(shape.hidden, columns, {"weight": place.split(1)}, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        repeats = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        scores = (q @ k.mT / self.size**0.5).masked_fill(~seen, -torch.inf)
        mixed: torch.Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        result: torch.Tensor = self.out(mixed)
        return result


class Expert(nn.Module):
    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        packed = place.split(0, Block(shape.inner), Block(shape.inner))
        both = {"weight": packed, "bias": packed}
        self.gate_up = Cut(2 * shape.inner // place.tp_size, shape.hidden, both, bias=shape.bias)
        columns = shape.inner // place.tp_size
        self.down = Cut(shape.hidden, columns, {"weight": place.split(1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: torch.Tensor = self.down(functional.silu(gate) * up)
        return result


class Mixture(nn.Module):
    """Some of the experts."""

    router_bias: torch.Tensor
    num_tokens: torch.Tensor

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.shape = shape
        self.first = place.ep_rank * shape.num_experts // place.ep_size
        self.router = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.register_buffer("router_bias", torch.zeros(shape.num_experts))
        self.experts = nn.ModuleList(
            Expert(shape, place) for _ in range(shape.num_experts // place.ep_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best = (scores.detach() + self.router_bias).topk(self.shape.num_chosen).indices
        chosen = torch.zeros_like(scores.detach()).scatter(1, best, 1.0)
        self.num_tokens = chosen.sum(0)
        weights, result = scores * chosen, torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            result = result + weights[:, number, None] * expert(tokens)
        return result.view(x.shape)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        base = f"{prefix}experts."
        names = {f"{base}{n}": f"{base}{self.first + n}" for n in range(len(self.experts))}
        return rename_shards(default_sharded_state_dict(self, prefix), names)


class Layer(nn.Module):
    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.attention = Attention(shape, place)
        self.mixture_norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.mixture = Mixture(shape, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        result: torch.Tensor = x + self.mixture(self.mixture_norm(x))
        return result


class Chunk(nn.Module):
    """Some layers, numbered from 0, with the embedding before or the head behind them."""

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.shape, self.place = shape, place
        self.layers = nn.ModuleList(Layer(shape, place) for _ in place.layers)
        rows = -(-shape.vocabulary // place.tp_size)
        words = {"weight": place.split(0, Block(shape.vocabulary))}
        self.embeds = place.has_embedding or (place.has_head and shape.predicts_ahead)
        if self.embeds:
            self.embedding = Cut(rows, shape.hidden, words)
        if place.has_head:
            self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
            self.head = Cut(rows, shape.hidden, words)
            if shape.tied and self.embeds:
                self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The mean loss of the whole model."""
        x = functional.embedding(words, self.embedding.weight)
        for layer in self.layers[: self.shape.num_layers]:
            x = layer(x)
        loss = self._loss(x[:, :-1], words[:, 1:])
        if self.shape.predicts_ahead:
            ahead = functional.embedding(words[:, 1:-1], self.embedding.weight)
            further = self.layers[-1](x[:, :-2] + ahead)
            loss = loss + 0.25 * self._loss(further, words[:, 2:])
        return loss

    def _loss(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(x))[..., : self.shape.vocabulary]
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())
