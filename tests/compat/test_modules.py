"""Modules that describe their shards in the words of a drop-in, which remesh saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remesh
from remesh.compat import flex_checkpoint, megatron
from remesh.errors import StateError
from remesh.exchange import Exchange
from tests.support import run_ranks

Describe = Callable[["Cut", str], dict[str, Any]]


class Cut(nn.Linear):
    """A rank's rows of a linear layer of 12 outputs, described as a test says."""

    def __init__(self, describe: Describe, exchange: Exchange) -> None:
        super().__init__(4, 12 // exchange.world_size)
        self.describe, self.exchange = describe, exchange

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return self.describe(self, prefix)


def by_flex(layer: Cut, prefix: str) -> dict[str, Any]:
    return flex_checkpoint.build_sharded_state_dict(
        layer.state_dict(), {"weight": 0, "bias": 0}, prefix, group=layer.exchange
    )


def flattened_by_flex(layer: Cut, prefix: str) -> dict[str, Any]:
    weights = by_flex(layer, prefix)
    for weight in weights.values():
        weight.local_tensor = weight.local_tensor.view(-1)
        weight.is_flattened, weight.flattened_range = True, slice(0, weight.local_tensor.numel())
    return weights


def by_megatron(layer: Cut, prefix: str) -> dict[str, Any]:
    rows = (0, layer.exchange.rank, layer.exchange.world_size)
    return {
        prefix + name: megatron.ShardedTensor.from_rank_offsets(prefix + name, tensor, rows)
        for name, tensor in layer.state_dict().items()
    }


def by_factory(layer: Cut, prefix: str) -> dict[str, Any]:
    """The halves of a rank's rows lie apart, as those of Megatron's gated layers."""
    rank, world_size = layer.exchange.rank, layer.exchange.world_size

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        del flattened_range
        return [
            megatron.ShardedTensor.from_rank_offsets(
                key, half, (0, rank + number * world_size, 2 * world_size), replica_id=replica_id
            )
            for number, half in enumerate(tensor.chunk(2))
        ]

    return {
        prefix + name: megatron.ShardedTensorFactory(prefix + name, tensor, build, torch.cat)
        for name, tensor in layer.state_dict().items()
    }


def trained(describe: Describe, exchange: Exchange) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Cut(describe, exchange))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_by_rank(exchange: Exchange, path: Path, describe: Describe) -> None:
    model, optimizer = trained(describe, exchange)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(exchange.rank)
            optimizer.state[parameter]["exp_avg"].fill_(exchange.rank + 10)
    remesh.save({"model": model, "optimizer": optimizer}, path, group=exchange)


def save_again(exchange: Exchange, path: Path, other: Path, describe: Describe) -> None:
    model, optimizer = trained(describe, exchange)
    remesh.load({"model": model, "optimizer": optimizer}, path, group=exchange)
    remesh.save({"model": model, "optimizer": optimizer}, other, group=exchange)


@pytest.mark.parametrize(
    ("describe", "ranks"),
    [
        (by_flex, [0, 1]),
        (flattened_by_flex, [0, 1]),
        (by_megatron, [0, 1]),
        (by_factory, [0, 1, 0, 1]),
    ],
)
def test_a_described_module_moves_to_another_layout(
    tmp_path: Path, describe: Describe, ranks: list[int]
) -> None:
    run_ranks(2, save_by_rank, tmp_path / "2", describe)
    run_ranks(3, save_again, tmp_path / "2", tmp_path / "3", describe)
    checkpoints = [remesh.Checkpoint(tmp_path / name) for name in ("2", "3")]
    rows = [rank for rank in ranks for _ in range(12 // len(ranks))]
    for checkpoint in checkpoints:
        assert checkpoint.read("model.0.weight")[:, 0].tolist() == rows
        assert checkpoint.read("optimizer.state.0.bias.exp_avg").tolist() == [r + 10 for r in rows]
    first, second = checkpoints
    assert sorted(first.index) == sorted(second.index)
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.index)


def test_what_is_no_description_of_one_tensor_is_refused(tmp_path: Path) -> None:
    def build(key: str, tensor: Any, *_: Any) -> Any:
        halves = zip(("upper", "lower"), tensor.chunk(2), strict=True)
        return {n: megatron.ShardedTensor.from_rank_offsets(f"{key}.{n}", t) for n, t in halves}

    def several(layer: Cut, prefix: str) -> dict[str, Any]:
        described = by_megatron(layer, prefix)
        weight = described[f"{prefix}weight"]
        factory = megatron.ShardedTensorFactory(weight.key, weight.data, build, torch.cat)
        return {**described, f"{prefix}weight": factory}

    def empty(layer: Cut, prefix: str) -> dict[str, Any]:
        return {key: one.without_data() for key, one in by_megatron(layer, prefix).items()}

    with pytest.raises(StateError, match="other things than shards of one tensor"):
        run_ranks(1, save_by_rank, tmp_path, several)
    with pytest.raises(StateError, match=r"0\.weight: there is no data"):
        run_ranks(1, save_by_rank, tmp_path, empty)
