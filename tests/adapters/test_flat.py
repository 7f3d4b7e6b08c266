"""Optimizers that keep slices of flattened parameters, against ordinary ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import remesh
from remesh.adapters import DescribedOptimizer, FlatSpan, Split, flat_partition
from remesh.core.sharded import LocalNonpersistentObject
from remesh.errors import DivergedReplicaError, MismatchError, StateError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.adapters.stored import optimizer_with_state, randomise, saved, transfer
from tests.support import run_ranks

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(SHAPES, st.integers(0, 3)), min_size=1, max_size=5), st.integers(1, 5))
def test_slices_of_all_ranks_are_the_parameters(
    sizes: list[tuple[tuple[int, ...], int]], num_ranks: int
) -> None:
    spans, end = [], 0
    for number, (shape, gap) in enumerate(sizes):
        spans.append(FlatSpan(f"p{number}", shape, end + gap))
        end += gap + math.prod(shape)
    per_rank = -(-end // num_ranks)
    buffer = torch.arange(per_rank * num_ranks)
    found = {span.name: np.full(span.shape, -1) for span in spans}
    for rank in range(num_ranks):
        own = buffer[rank * per_rank : (rank + 1) * per_rank]
        for shards in flat_partition(reversed(spans), own, start=rank * per_rank):
            for part in shards.parts:
                assert (found[shards.name][part.box.slices] == -1).all()
                found[shards.name][part.box.slices] = part.data
    for span in spans:
        expected = np.arange(span.offset, span.offset + math.prod(span.shape))
        assert found[span.name].tolist() == expected.reshape(span.shape).tolist()


def test_what_is_no_partition_is_refused() -> None:
    spans = [FlatSpan("a", (2, 2), 0), FlatSpan("b", (3,), 3)]
    with pytest.raises(StateError, match=r"(?s)a and b overlap .* a ends at 4 and b begins at 3"):
        flat_partition(spans, torch.zeros(7), start=0)
    with pytest.raises(StateError, match=r"one dim, not shape \(7, 1\)"):
        flat_partition(spans[:1], torch.zeros(7, 1), start=0)


def test_a_slice_of_a_shard_is_a_slice_of_its_global_tensor() -> None:
    span = FlatSpan("w", (2, 3), 1, (Split(0, 1, 2),))
    (shards,) = flat_partition([span], torch.arange(2, 6), start=3)
    assert shards.global_shape == (4, 3)
    assert [(str(p.box), p.data.reshape((-1,)).tolist()) for p in shards.parts] == [
        ("[2:3, 2:3]", [2]),
        ("[3:4, 0:3]", [3, 4, 5]),
    ]


# ---------------------------------------------------------------------------------------------
# Layouts of a job
# ---------------------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False), nn.LayerNorm(2))


def flat_slices(module: nn.Module, rank: int, num_ranks: int) -> Any:
    """One buffer, aligned and padded, of which every rank has a slice in fp32."""
    spans, end = [], 0
    for name, parameter in module.named_parameters():
        spans.append(FlatSpan(name, tuple(parameter.shape), end))
        end += -(-parameter.numel() // 4) * 4
    per_rank = -(-end // num_ranks) + 1
    flat = nn.Parameter(torch.zeros(per_rank))
    described = flat_partition(spans, flat, start=rank * per_rank)
    return DescribedOptimizer(torch.optim.AdamW([flat], lr=0.5), {flat: described})


def test_copies_of_parameters_in_an_optimizer_of_their_own() -> None:
    """fp32 copies, each on one rank: whole master weights by parameter."""

    def build(rank: int, num_ranks: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        module = model().to(torch.bfloat16)
        named = list(module.named_parameters())[rank::num_ranks]
        copies = {name: torch.zeros(p.shape) for name, p in named}
        optimizer = torch.optim.AdamW(copies.values())
        stands_for = {copies[name]: p for name, p in named}
        leaf = DescribedOptimizer(optimizer, stands_for, own_key="master")
        return {"model": LocalNonpersistentObject(module), "optimizer": leaf}, copies

    state, copies = build(0, 1)
    for number, copy in enumerate(copies.values()):
        copy.fill_(number + 1.0)
        moments = {"step": torch.tensor(1.0), "exp_avg": copy + 0.5, "exp_avg_sq": copy + 0.25}
        state["optimizer"].optimizer.state[copy] = moments
    storage = saved(state)
    assert "optimizer.state.2.bias.master" in remesh.Checkpoint(storage).index

    def on_two(exchange: Exchange) -> int:
        state, own = build(exchange.rank, 2)
        remesh.load(state, storage, group=exchange)
        for name, copy in own.items():
            assert torch.equal(copy, copies[name])
            moment = state["optimizer"].optimizer.state[copy]["exp_avg"]
            assert torch.equal(moment, copies[name] + 0.5)
        return len(own)

    assert sum(run_ranks(2, on_two)) == len(copies)


def test_state_that_some_parameters_lack_is_named() -> None:
    module = model()
    optimizer = optimizer_with_state(module, 2)
    del optimizer.state[module.get_parameter("1.weight")]
    source = {"model": module, "optimizer": optimizer}
    target = {"model": module, "optimizer": flat_slices(module, 0, 1)}
    with pytest.raises(MismatchError, match="2 names are not stored") as caught:
        transfer(source, target)
    prefix = "optimizer.state.1.weight"
    assert set(caught.value.missing) == {f"{prefix}.exp_avg", f"{prefix}.exp_avg_sq"}
    transfer(source, target, missing="keep")


def test_a_buffer_misses_what_another_optimizer_did_not_keep() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    target = {"model": module, "optimizer": flat_slices(module, 0, 1)}
    with pytest.raises(MismatchError, match="it kept momentum_buffer") as caught:
        transfer({"model": module, "optimizer": optimizer}, target)
    names = [f"optimizer.state.{name}" for name, _ in module.named_parameters()]
    moments = {f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    assert set(caught.value.missing) == moments | {f"{names[0]}.step"}  # the buffer has one step


def test_steps_that_differ_do_not_fit_one_buffer() -> None:
    module = model()
    optimizer = optimizer_with_state(module, 2)
    optimizer.state[module.get_parameter("1.weight")]["step"] += 1
    source = {"model": module, "optimizer": optimizer}
    with pytest.raises(MismatchError, match=r"(?s)step .*are tied .*different values"):
        transfer(source, {"model": module, "optimizer": flat_slices(module, 0, 1)})


def test_numbers_of_a_buffer_are_one_for_all_its_parameters() -> None:
    """A parameter of no dims beside others, and state that is a tensor or a number for each."""

    def build(value: float) -> tuple[dict[str, Any], Any]:
        spans = [FlatSpan("scale", (), 0), FlatSpan("weight", (2, 2), 1)]
        flat = nn.Parameter(torch.zeros(6))
        optimizer = torch.optim.SGD([flat], lr=0.1)
        leaf = DescribedOptimizer(optimizer, {flat: flat_partition(spans, flat, start=0)})
        if value:
            moment = torch.arange(6.0) + value
            product = torch.tensor(value)
            optimizer.state[flat] = {"exp_avg": moment, "product": product, "steps": int(value)}
        return {"o": leaf}, optimizer.state[flat]

    for before in (0.0, 8.0):
        state, own = build(before)
        transfer(build(7.0)[0], state)
        assert own["product"].shape == ()
        assert own["product"].item() == own["steps"] == 7
        assert own["exp_avg"].tolist()[:5] == [7, 8, 9, 10, 11]
    state, _ = build(0.0)
    per_parameter = {
        "scale": {"exp_avg": torch.zeros(()), "steps": 1},
        "weight": {"exp_avg": torch.zeros(2, 2), "steps": 2},
    }
    other = {"o": {"state": per_parameter, "param_groups": [{"lr": 0.1}]}}
    with pytest.raises(StateError, match=r"(?s)o\.state\.scale\.steps: .* for 2 parameters"):
        transfer(other, state, missing="keep", unexpected="ignore")


def test_slices_on_copies_must_be_equal() -> None:
    def save(exchange: Exchange) -> None:
        module = model()
        randomise(module, 0)
        leaf = flat_slices(module, exchange.rank % 2, 2)
        (flat,) = leaf.stands_for
        leaf.optimizer.state[flat] = {"exp_avg": torch.full(flat.shape, float(exchange.rank // 2))}
        with pytest.raises(DivergedReplicaError, match=r"exp_avg"):
            remesh.save({"model": module, "optimizer": leaf}, storage, group=exchange)

    storage = MemoryStorage()
    run_ranks(4, save)


def test_state_on_another_device_than_the_parameter() -> None:
    """The parameters have no memory here at all, as far as the optimizer's state is concerned."""

    def build(value: float) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        with torch.device("meta"):
            module = model()
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            moment = torch.full(parameter.shape, value)
            optimizer.state[parameter] = {"step": torch.tensor(value), "exp_avg": moment}
        return {"model": LocalNonpersistentObject(module), "optimizer": optimizer}, optimizer

    state, optimizer = build(4.0)
    transfer(build(3.0)[0], state)
    for own in optimizer.state.values():
        assert own["exp_avg"].device.type == "cpu"
        assert own["exp_avg"].unique().tolist() == [3]
        assert own["step"].item() == 3


def test_state_that_some_parameters_lack_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    optimizer = optimizer_with_state(module, 2)
    saved({"model": module, "optimizer": optimizer})
    del optimizer.state[module.get_parameter("1.weight")]
    module.get_parameter("2.bias").requires_grad_(False)
    del optimizer.state[module.get_parameter("2.bias")]
    assert "no state" not in caplog.text
    storage = saved({"model": module, "optimizer": optimizer})
    assert "optimizer: 1 parameters have no state in the optimizer, others do" in caplog.text
    assert caplog.text.count("1.weight") == 1
    full = optimizer_with_state(module, 2)
    with pytest.raises(MismatchError, match="6 names are not stored"):
        remesh.load({"model": module, "optimizer": full}, storage)
