"""Pipeline stages, virtual stages and experts: local names, global names, and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remesh
from remesh.adapters import (
    NamedModule,
    Split,
    describe_leaf,
    rename_shards,
    shard_weight,
)
from remesh.core.sharded import LocalNonpersistentObject, ShardedTensor
from remesh.core.state import describe
from remesh.errors import NameCollisionError, StateError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.adapters.stored import SHAPE, optimizer_with_state, randomise, transformer
from tests.conversions.model import Layer, Place
from tests.support import run_ranks

State = dict[str, Any]


def stage(rank: int) -> State:
    """Two layers on the first stage; one, the extra one and a copy of the embedding on the last."""
    names = {"layers.0": "layers.2", "head": "embedding"} if rank else {}
    if rank == 0:
        model = transformer(has_head=False)
    else:
        model = transformer(layers=1, has_embedding=False)
        model.mtp = Layer(SHAPE, Place())
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": NamedModule(model, names), "optimizer": optimizer}


def test_names_of_stages() -> None:
    state = stage(1)
    names = {entry.name for entry in describe(state, describe_leaf).tensors}
    assert {name.split(".")[1] for name in names} == {"layers", "norm", "embedding", "mtp"}
    assert {"model.layers.2.mixture.experts.3.down.weight", "model.embedding.weight"} <= names
    state["model"] = LocalNonpersistentObject(state["model"])
    [params] = describe(state, describe_leaf).merged_lists.values()
    assert {"layers.2.norm.weight", "embedding.weight"} <= set(params)


@pytest.mark.parametrize(
    ("names", "old", "new"),
    [
        ({"layers.1": "layers.7"}, "layers.1.weight", "layers.7.weight"),
        ({"layers.1": "layers.7"}, "layers.10.weight", "layers.10.weight"),
        ({"layers.1.": "layers.7."}, "layers.1.weight", "layers.7.weight"),
        ({"a": "b", "a.c": "d"}, "a.c.x", "d.x"),
        ({"a": "b", "a.c": "d"}, "a.x", "b.x"),
        ({"a": ""}, "a.x", "x"),
        ({"": "model"}, "a.x", "model.a.x"),
        ({"a.x": "y"}, "a.x", "y"),
        (str.upper, "a.x", "A.X"),
    ],
)
def test_new_names(names: Any, old: str, new: str) -> None:
    shards = rename_shards({"key": ShardedTensor.whole(old, torch.zeros(1))}, names)
    assert shards["key"].name == new


def test_a_named_module_may_have_a_function_of_names() -> None:
    leaf = NamedModule(nn.Linear(2, 2), str.upper)
    assert [entry.name for entry in describe(leaf, describe_leaf).tensors] == ["WEIGHT", "BIAS"]


def test_two_entries_of_one_new_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(NameCollisionError, match=r"(?s)'0\.weight' and '1\.weight' .* 'a\.weight'"):
        describe({"m": NamedModule(model, {"0": "a", "1": "a"})}, describe_leaf)


class GroupedExperts(nn.Module):
    """Experts in one tensor of three dims: expert, output, input; the inner dim is cut too."""

    def __init__(self, ep: tuple[int, int], tp: tuple[int, int]) -> None:
        super().__init__()
        self.ep, self.tp = ep, tp
        self.weight = nn.Parameter(torch.zeros(SHAPE.num_experts // ep[1], 3, 8 // tp[1]))

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        name = f"{prefix}weight"
        splits = Split(0, *self.ep), Split(2, *self.tp)
        return {name: shard_weight(name, self.weight.detach(), *splits)}


class SeparateExperts(nn.Module):
    """The same as a parameter for each expert, stored as slices of one tensor."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        count = SHAPE.num_experts // num_ranks
        self.numbers = range(rank * count, (rank + 1) * count)
        self.experts = nn.ParameterList(torch.zeros(3, 8) for _ in self.numbers)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        return {
            f"{prefix}experts.{local}": ShardedTensor.from_rank_offsets(
                f"{prefix}weight",
                self.experts[local].detach(),
                (0, number, SHAPE.num_experts),
                prepend_axis_num=1,
                replica_id=None,
            )
            for local, number in enumerate(self.numbers)
        }


def test_grouped_experts_and_separate_ones() -> None:
    grouped = GroupedExperts((0, 1), (0, 1))
    randomise(grouped, 4)
    optimizer = optimizer_with_state(grouped, 5)
    moment = optimizer.state[grouped.weight]["exp_avg"]
    storages = [MemoryStorage() for _ in range(3)]
    remesh.save({"m": {"moe": grouped}, "o": optimizer}, storages[0])

    def four(exchange: Exchange) -> None:
        ep, tp = divmod(exchange.rank, 2)
        module = GroupedExperts((ep, 2), (tp, 2))
        fresh = torch.optim.AdamW(module.parameters())
        state = {"m": {"moe": module}, "o": fresh}
        remesh.load(state, storages[0], group=exchange)
        own = (slice(2 * ep, 2 * ep + 2), slice(None), slice(4 * tp, 4 * tp + 4))
        assert torch.equal(module.weight, grouped.weight[own])
        assert torch.equal(fresh.state[module.weight]["exp_avg"], moment[own])
        remesh.save(state, storages[1], group=exchange)

    def two(exchange: Exchange) -> None:
        module = SeparateExperts(exchange.rank, 2)
        fresh = torch.optim.AdamW(module.parameters())
        state = {"m": {"moe": module}, "o": fresh}
        remesh.load(state, storages[1], group=exchange)
        for number, expert in zip(module.numbers, module.experts, strict=True):
            assert torch.equal(expert, grouped.weight[number])
            assert torch.equal(fresh.state[expert]["exp_avg"], moment[number])
            assert fresh.state[expert]["step"].item() == 2
        remesh.save(state, storages[2], group=exchange)
        fresh.state[module.experts[0]]["step"] += 1
        with pytest.raises(StateError, match=r"o\.state\.weight\.step: two shards"):
            describe(state, describe_leaf)

    run_ranks(4, four)
    run_ranks(2, two)
    again = GroupedExperts((0, 1), (0, 1))
    fresh = torch.optim.AdamW(again.parameters())
    remesh.load({"m": {"moe": again}, "o": fresh}, storages[2], unexpected="error")
    assert torch.equal(again.weight, grouped.weight)
    assert torch.equal(fresh.state[again.weight]["exp_avg"], moment)
