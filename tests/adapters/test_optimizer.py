from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from remesh.adapters import describe_leaf
from remesh.core.sharded import LocalNonpersistentObject
from remesh.core.state import Description, describe
from remesh.errors import StateError
from tests.adapters.fake_checkpoint import FakeCheckpoint, Restored, capture, restore

Make = Callable[[Any], Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, betas=(0.8, 0.99)),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        (module(torch.linspace(-1, 1, 6).reshape(2, 3) + step) ** 2).sum().backward()
        optimizer.step()


def names_of(description: Description) -> set[str]:
    tensors = {entry.name for entry in description.tensors}
    return tensors | description.values.keys() | description.merged_lists.keys()


def transfer(source: Any, target: Any) -> Restored:
    return restore(target, FakeCheckpoint([capture(source)]))


def flat_state(optimizer: Optimizer) -> list[tuple[Any, Any, Any]]:
    """Everything in an optimizer's state dict, with tensors as lists and dtypes."""
    result = []
    packed = optimizer.state_dict()
    for number, entries in packed["state"].items():
        for key, value in entries.items():
            shown = (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value
            result.append((number, key, shown))
    return result


@pytest.mark.parametrize("stepped_before", [False, True])
def test_quantised_state_of_bitsandbytes_goes_on(stepped_before: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def job() -> tuple[nn.Module, Optimizer]:
        module = model()
        return module, bitsandbytes.optim.AdamW8bit(module.parameters(), min_8bit_size=8)

    (source, optimizer), (target, fresh) = job(), job()
    train(source, optimizer)
    if stepped_before:
        train(target, fresh, steps=1)
    result = transfer({"model": source, "opt": optimizer}, {"opt": fresh, "model": target})
    assert result.missing == result.unexpected == set()
    assert fresh.state[next(target.parameters())]["state1"].dtype == torch.uint8
    train(source, optimizer)
    train(target, fresh)
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def torch_names(module: nn.Module, optimizer: Optimizer) -> set[str]:
    """The names that torch gives, in the form of stored names."""
    state: Any = get_optimizer_state_dict(module, optimizer, options=StateDictOptions())
    names = {f"state.{fqn}.{key}" for fqn, entries in state["state"].items() for key in entries}
    for number, group in enumerate(state["param_groups"]):
        names |= {f"param_groups.{number}.{option}" for option in group}
    return names


def tied_and_frozen() -> nn.Module:
    module = nn.ModuleDict({"embed": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    module["head"].weight = module["embed"].weight
    module["embed"].bias.requires_grad_(False)
    return nn.Sequential(checkpoint_wrapper(nn.Sequential(module["embed"], module["head"])))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make_model", [model, tied_and_frozen])
def test_names_are_those_of_torch(name: str, make_model: Callable[[], nn.Module]) -> None:
    module = make_model()
    optimizer = OPTIMIZERS[name](module.parameters())
    train(module, optimizer)
    state = {"model": LocalNonpersistentObject(module), "optim": optimizer}
    names = names_of(describe(state, describe_leaf))
    assert names == {f"optim.{of_torch}" for of_torch in torch_names(module, optimizer)}


def test_tied_and_frozen_parameters() -> None:
    module = tied_and_frozen()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer)
    description = describe({"model": module, "optim": optimizer}, describe_leaf)
    assert description.merged_lists == {
        "optim.param_groups.0.params": ["0.0.weight", "0.0.bias", "0.1.bias"]
    }
    states = {p[2] for p in description.paths.values() if p[:2] == ("optim", "state")}
    assert states == {"0.0.weight", "0.1.bias"}
    target = tied_and_frozen()
    fresh = torch.optim.AdamW(target.parameters())
    result = transfer({"model": module, "optim": optimizer}, {"model": target, "optim": fresh})
    assert result.missing == result.unexpected == set()
    assert len(fresh.state) == 2


def test_groups_are_matched_by_names_and_keep_their_identity() -> None:
    source, target = model(), model()
    weights = [p for p in source.parameters() if p.ndim == 2]
    biases = [p for p in source.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": 0.5}, {"params": biases, "lr": 0.25, "weight_decay": 0.0}]
    )
    train(source, optimizer)
    fresh = torch.optim.AdamW(
        [
            {"params": [target[2].bias]},
            {"params": [target[2].weight, target[0].weight]},
            {"params": [target[0].bias]},
        ],
        betas=(0.1, 0.2),
    )
    groups, whole = list(fresh.param_groups), fresh.param_groups
    result = transfer({"model": source, "optim": optimizer}, {"model": target, "optim": fresh})
    assert fresh.param_groups is whole
    assert all(now is before for now, before in zip(whole, groups, strict=True))
    assert result.missing == result.unexpected == set()
    assert [g["lr"] for g in groups] == [0.25, 0.5, 0.25]
    assert [g["weight_decay"] for g in groups] == [0.0, 0.01, 0.0]
    assert [g["betas"] for g in groups] == [(0.9, 0.999)] * 3
    assert [p.shape for p in groups[1]["params"]] == [(2, 4), (4, 3)]
    moment = fresh.state[target[2].weight]["exp_avg"]  # type: ignore[index]
    assert torch.equal(moment, optimizer.state[source[2].weight]["exp_avg"])  # type: ignore[index]


def test_a_group_over_two_stored_groups_is_refused() -> None:
    source, target = model(), model()
    optimizer = torch.optim.SGD([{"params": [p]} for p in source.parameters()], lr=0.1)
    fresh = torch.optim.SGD(target.parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"(?s)opt: .*group 0 .*2\.bias in stored group 3"):
        transfer({"m": source, "opt": optimizer}, {"m": target, "opt": fresh})


def test_pipeline_ranks_know_their_part_of_each_group() -> None:
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.125)
    train(whole, optimizer)

    class Stage(nn.Module):
        """A layer of the whole model under the name that it has there."""

        def __init__(self, layers: nn.Sequential, number: int) -> None:
            super().__init__()
            self.add_module(str(number), layers[number])

    def stage_state(layers: nn.Sequential, number: int) -> dict[str, Any]:
        stage = Stage(layers, number)
        return {"model": stage, "optim": torch.optim.AdamW(stage.parameters())}

    checkpoint = FakeCheckpoint([capture({"model": whole, "optim": optimizer})])
    stages = [stage_state(model(), number) for number in (0, 2)]
    for state in stages:
        assert restore(state, checkpoint).missing == set()
    merged = FakeCheckpoint([capture(state) for state in stages])
    assert merged.names() == checkpoint.names()
    assert merged.lists == checkpoint.lists
    assert merged.values == checkpoint.values
    for name, tensor in checkpoint.tensors.items():
        assert merged.tensors[name].data.tolist() == tensor.data.tolist()
    target = model()
    fresh = torch.optim.AdamW(target.parameters())
    restore({"model": target, "optim": fresh}, merged)
    assert flat_state(fresh) == flat_state(optimizer)


def test_options_the_checkpoint_does_not_know_stay() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    checkpoint = FakeCheckpoint([capture({"m": module, "o": optimizer})])
    optimizer.param_groups[0]["new"] = {"warmup": [1, torch.tensor(2.0)]}
    optimizer.param_groups[0]["lr"] = 0.75
    result = restore({"m": module, "o": optimizer}, checkpoint)
    assert result.missing == set()
    assert optimizer.param_groups[0]["new"] == {"warmup": [1, torch.tensor(2.0)]}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_how_to_compute_stays_with_the_machine() -> None:
    source, target = model(), model()
    optimizer = torch.optim.AdamW(source.parameters(), fused=True)
    train(source, optimizer)
    fresh = torch.optim.AdamW(target.parameters(), foreach=True)
    transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"]) == (None, True)
    train(target, fresh)


@pytest.mark.parametrize("saved", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("live", [0.25, torch.tensor(0.25)])
def test_learning_rates_keep_their_kind(saved: Any, live: Any) -> None:
    source, target = model(), model()
    optimizer = torch.optim.AdamW(source.parameters(), lr=saved)
    LambdaLR(optimizer, lambda _step: 1.0)
    rate = copy.deepcopy(live)
    fresh = torch.optim.AdamW(target.parameters(), lr=rate)
    transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    group = fresh.param_groups[0]
    assert float(group["lr"]) == float(group["initial_lr"]) == 0.5
    if isinstance(live, torch.Tensor):
        assert group["lr"] is rate
    else:
        assert type(group["lr"]) is type(group["initial_lr"]) is float


def test_modules_with_the_same_names_get_prefixes() -> None:
    def job() -> dict[str, Any]:
        nets = {"generator": nn.Linear(2, 2), "critics": [nn.Linear(2, 1)]}
        parameters = [*nets["generator"].parameters(), *nets["critics"][0].parameters()]  # type: ignore[attr-defined, index]
        return {**nets, "optim": torch.optim.AdamW(parameters)}

    source, target = job(), job()
    for parameter in source["optim"].param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.5)
    source["optim"].step()
    result = transfer(source, target)
    assert result.missing == result.unexpected == set()
    assert result.description.merged_lists["optim.param_groups.0.params"] == [
        "generator.weight",
        "generator.bias",
        "critics.0.weight",
        "critics.0.bias",
    ]
    assert flat_state(target["optim"]) == flat_state(source["optim"])


def test_live_state_that_is_not_stored_is_missing() -> None:
    source, target = model(), model()
    optimizer = torch.optim.AdamW(list(source[0].parameters())[:1])
    source[0].weight.grad = torch.ones(4, 3)
    optimizer.step()
    checkpoint = FakeCheckpoint([capture({"model": source, "optim": optimizer})])
    fresh = torch.optim.AdamW(target.parameters())
    result = restore({"model": target, "optim": fresh}, checkpoint)
    assert result.missing == set()
    assert len(fresh.state) == 1
    train(target, fresh)
    kept = fresh.state[target[2].weight]["exp_avg"].clone()  # type: ignore[index]
    result = restore({"model": target, "optim": fresh}, checkpoint)
    assert result.missing == {
        f"optim.state.{name}.{key}"
        for name in ("0.bias", "2.weight", "2.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert torch.equal(fresh.state[target[2].weight]["exp_avg"], kept)  # type: ignore[index]


def test_a_new_group_keeps_its_options() -> None:
    source, target = model(), model()
    optimizer = torch.optim.SGD(source[0].parameters(), lr=0.5)
    fresh = torch.optim.SGD(
        [
            {"params": list(target[2].parameters()), "lr": 0.125},
            {"params": list(target[0].parameters()), "lr": 0.25},
        ]
    )
    result = transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    assert [group["lr"] for group in fresh.param_groups] == [0.125, 0.5]
    assert result.missing == {"o.param_groups.1.params"}


def test_existing_state_is_filled_in_place_and_other_dtypes_are_kept() -> None:
    source, target = model().bfloat16(), model().bfloat16()
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (source, target))
    for module, optim in ((source, optimizer), (target, fresh)):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optim.step()
    weight = optimizer.state[source[0].weight]  # type: ignore[index]
    weight["exp_avg"] = torch.randn(4, 3)
    live = fresh.state[target[0].weight]  # type: ignore[index]
    before = dict(live)
    transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    assert live["exp_avg_sq"] is before["exp_avg_sq"]
    assert torch.equal(live["exp_avg_sq"], weight["exp_avg_sq"])
    assert live["exp_avg"].dtype == torch.float32
    assert torch.equal(live["exp_avg"], weight["exp_avg"])


class Nested(torch.optim.SGD):
    """Keeps nested state, state of its own, and something more in its state dict."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            factors = [torch.rand(3), torch.rand(2, 2)][: parameter.ndim]
            self.state[parameter] = {"shampoo": {"factors": factors, "kind": "root"}}
        self.state["seen"] = {"batches": torch.tensor(7)}  # type: ignore[index]
        self.calls += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "history": {"norm": torch.ones(2)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]
        assert state_dict["history"]["norm"].tolist() == [1, 1]


def test_optimizers_that_keep_more_than_torch_asks_for() -> None:
    source, target = model(), model()
    optimizer, fresh = Nested(source.parameters(), lr=0.5), Nested(target.parameters(), lr=0.25)
    optimizer.step()
    fresh.state["seen"] = {"batches": torch.tensor(0)}  # type: ignore[index]
    groups = fresh.param_groups
    result = transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    assert result.missing == result.unexpected == set()
    assert (fresh.calls, fresh.param_groups[0]["lr"]) == (1, 0.5)
    assert fresh.param_groups is groups
    assert fresh.state["seen"]["batches"] == 7  # type: ignore[index]
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert str(fresh.state[mine]) == str(optimizer.state[theirs])


def test_older_torch_kept_steps_as_numbers() -> None:
    source, target = model(), model()
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (source, target))
    train(source, optimizer)
    for entries in optimizer.state.values():
        entries["step"] = 2
    transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    assert torch.equal(fresh.state[target[0].weight]["step"], torch.tensor(2.0))  # type: ignore[index]
    train(target, fresh)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_steps_lie_where_the_optimizer_needs_them(options: dict[str, Any]) -> None:
    source, target = model(), model().cuda()
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer)
    fresh = torch.optim.AdamW(target.parameters(), **options)
    transfer({"m": source, "o": optimizer}, {"m": target, "o": fresh})
    entries = next(iter(fresh.state.values()))
    assert entries["step"].is_cuda == bool(options)
    assert entries["exp_avg"].is_cuda
    for parameter in target.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
    assert int(entries["step"]) == 3
