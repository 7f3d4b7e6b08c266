"""A small mixture-of-experts transformer, whole or cut by hand, that only holds parameters.

`Transformer` is built for a tensor-parallel rank, a range of layers and a range of experts. All of
them say what they hold by `sharded_state_dict`; the whole one is that of one rank of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from remesh.adapters import (
    Block,
    Split,
    build_sharded_state_dict,
    default_sharded_state_dict,
    rename_shards,
)
from remesh.core.sharded import ShardedTensor

HIDDEN, HEAD, NUM_HEADS, NUM_KV, INNER, VOCABULARY, NUM_EXPERTS = 4, 2, 4, 2, 8, 13, 4


@dataclass(frozen=True)
class Tp:
    rank: int = 0
    size: int = 1

    def blocks(self, *blocks: Block) -> Split:
        return Split(0, self.rank, self.size, blocks)


class Cut(nn.Module):
    """A weight and perhaps a bias, cut as said."""

    def __init__(
        self,
        tp: Tp,
        shape: tuple[int, ...],
        splits: Mapping[str, int | Split | Sequence[Split]],
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.splits = tp, splits
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape[0])) if bias else None

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        return build_sharded_state_dict(
            self.state_dict(), self.splits, prefix, shard=self.tp.rank, num_shards=self.tp.size
        )


class Attention(nn.Module):
    def __init__(self, tp: Tp) -> None:
        super().__init__()
        kv_heads = max(NUM_KV // tp.size, 1)
        rows = (NUM_HEADS // tp.size + 2 * kv_heads) * HEAD
        fused = tp.blocks(
            Block(NUM_HEADS * HEAD),
            Block(NUM_KV * HEAD, num_units=NUM_KV),
            Block(NUM_KV * HEAD, num_units=NUM_KV),
        )
        both = {"weight": fused, "bias": fused}
        self.qkv = Cut(tp, (rows, HIDDEN), both, bias=True)
        self.out = Cut(tp, (HIDDEN, NUM_HEADS * HEAD // tp.size), {"weight": 1}, bias=True)


class Mlp(nn.Module):
    def __init__(self, tp: Tp) -> None:
        super().__init__()
        fused = tp.blocks(Block(INNER), Block(INNER))
        self.gate_up = Cut(tp, (2 * INNER // tp.size, HIDDEN), {"weight": fused, "bias": fused})
        self.down = Cut(tp, (HIDDEN, INNER // tp.size), {"weight": 1})


class Experts(nn.Module):
    """Some of the experts, under the numbers that they have among all."""

    def __init__(self, tp: Tp, numbers: range) -> None:
        super().__init__()
        self.first = numbers.start
        self.experts = nn.ModuleList(Mlp(tp) for _ in numbers)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        base = f"{prefix}experts."
        names = {f"{base}{n}": f"{base}{self.first + n}" for n in range(len(self.experts))}
        return rename_shards(default_sharded_state_dict(self, prefix), names)


class Layer(nn.Module):
    def __init__(self, tp: Tp, experts: range) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(tp)
        self.mlp = Experts(tp, experts)
        self.register_buffer("router_bias", torch.zeros(NUM_EXPERTS))


class Transformer(nn.Module):
    def __init__(
        self,
        tp: Tp = Tp(),
        *,
        layers: int = 2,
        experts: range = range(NUM_EXPERTS),
        embedding: bool = True,
        head: str = "transposed",
    ) -> None:
        super().__init__()
        rows = -(-VOCABULARY // tp.size)
        vocabulary = tp.blocks(Block(VOCABULARY))
        if embedding:
            self.embedding = Cut(tp, (rows, HIDDEN), {"weight": vocabulary})
        self.layers = nn.ModuleList(Layer(tp, experts) for _ in range(layers))
        if head == "transposed":
            columns = Split(1, tp.rank, tp.size, (Block(VOCABULARY),))
            self.head = Cut(tp, (HIDDEN, rows), {"weight": columns})
        elif head == "tied":
            self.head = Cut(tp, (rows, HIDDEN), {"weight": vocabulary})
            if embedding:
                self.head.weight = self.embedding.weight


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def optimizer_with_state(module: nn.Module, seed: int) -> torch.optim.AdamW:
    """An optimizer whose moments are random and whose third step is the next."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25)
    for parameter in module.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
    return optimizer
