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
from remesh.errors import CoverageError, DivergedReplicaError, NameCollisionError, StateError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.adapters.parallel_transformer import (
    NUM_EXPERTS,
    Layer,
    Tp,
    Transformer,
    optimizer_with_state,
    randomise,
)
from tests.support import run_ranks

NUM_LAYERS = 3
ALL = range(NUM_EXPERTS)

State = dict[str, Any]


def with_optimizer(module: nn.Module, names: dict[str, str]) -> State:
    leaf = NamedModule(module, names) if names else module
    return {"model": leaf, "optimizer": torch.optim.AdamW(module.parameters())}


def whole(_rank: int = 0, experts: range = ALL) -> State:
    """The embedding tied to the head, three layers, and one that predicts a further token."""
    model = Transformer(layers=NUM_LAYERS, head="tied", experts=experts)
    model.mtp = Layer(Tp(), experts)
    return with_optimizer(model, {})


def stage(rank: int) -> State:
    """Two layers on the first stage; one, the extra one and a copy of the embedding on the last."""
    if rank == 0:
        return with_optimizer(Transformer(layers=2, head="none"), {})
    model = Transformer(layers=1, embedding=False, head="tied")
    model.mtp = Layer(Tp(), ALL)
    return with_optimizer(model, {"layers.0": "layers.2", "head": "embedding"})


def fill(state: State) -> None:
    randomise(state["model"], 11)
    state["optimizer"] = optimizer_with_state(state["model"], 12)


def tensors_by_stored_name(state: State) -> dict[str, torch.Tensor]:
    return {e.name: e.parts[0].data for e in describe(state, describe_leaf).tensors}  # type: ignore[misc]


def test_names_of_stages() -> None:
    names = set(tensors_by_stored_name(stage(1)))
    assert {n.split(".")[1] for n in names} == {"layers", "embedding", "mtp"}
    assert "model.layers.2.mlp.experts.3.down.weight" in names
    assert "model.embedding.weight" in names
    state = stage(1)
    state["model"] = LocalNonpersistentObject(state["model"])
    fill_state = describe(state, describe_leaf)
    params = fill_state.merged_lists["optimizer.param_groups.0.params"]
    assert "layers.2.norm.weight" in params
    assert "embedding.weight" in params


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
    buffer = nn.Module()
    inner = buffer
    *path, last = old.split(".")
    for part in path:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.register_buffer(last, torch.zeros(1))
    assert [e.name for e in describe(NamedModule(buffer, names), describe_leaf).tensors] == [new]


def test_two_entries_of_one_new_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(NameCollisionError, match=r"(?s)'0\.weight' and '1\.weight' .* 'a\.weight'"):
        describe({"m": NamedModule(model, {"0": "a", "1": "a"})}, describe_leaf)


def test_copies_on_two_stages_must_be_equal() -> None:
    def save(exchange: Exchange) -> None:
        state = stage(exchange.rank)
        randomise(state["model"].module if exchange.rank else state["model"], exchange.rank)
        with pytest.raises(DivergedReplicaError, match=r"model\.embedding\.weight"):
            remesh.save({"model": state["model"]}, storage, group=exchange)

    storage = MemoryStorage()
    run_ranks(2, save)


class GroupedExperts(nn.Module):
    """Experts in one tensor of three dims: expert, output, input; the inner dim is cut too."""

    def __init__(self, ep: tuple[int, int], tp: tuple[int, int]) -> None:
        super().__init__()
        self.ep, self.tp = ep, tp
        self.weight = nn.Parameter(torch.zeros(NUM_EXPERTS // ep[1], 3, 8 // tp[1]))

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        name = f"{prefix}weight"
        splits = Split(0, *self.ep), Split(2, *self.tp)
        return {name: shard_weight(name, self.weight.detach(), *splits)}


class SeparateExperts(nn.Module):
    """The same as a parameter for each expert, stored as slices of one tensor."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        count = NUM_EXPERTS // num_ranks
        self.numbers = range(rank * count, (rank + 1) * count)
        self.experts = nn.ParameterList(torch.zeros(3, 8) for _ in self.numbers)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        return {
            f"{prefix}experts.{local}": ShardedTensor.from_rank_offsets(
                f"{prefix}weight",
                self.experts[local].detach(),
                (0, number, NUM_EXPERTS),
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


def test_a_missing_expert_is_found() -> None:
    class Told(GroupedExperts):
        def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
            name = f"{prefix}weight"
            return {name: shard_weight(name, self.weight.detach(), Split(0, self.ep[0], 3))}

    def save(exchange: Exchange) -> None:
        module = Told((exchange.rank, 2), (0, 1))
        with pytest.raises(CoverageError, match=r"no rank holds \[4:6"):
            remesh.save({"m": module}, storage, group=exchange)

    storage = MemoryStorage()
    run_ranks(2, save)
