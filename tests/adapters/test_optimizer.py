from __future__ import annotations

import contextlib
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

import remesh
from remesh.adapters import DescribedOptimizer, NamedModule, describe_leaf
from remesh.core.sharded import LocalNonpersistentObject
from remesh.core.state import describe
from remesh.errors import MismatchError, StateError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.adapters.stored import check_equal, saved, transfer, transformer
from tests.support import run_ranks

Make = Callable[..., Optimizer]
State = dict[str, Any]

OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, betas=(0.8, 0.99)),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(state: State, steps: int = 2) -> None:
    for step in range(steps):
        state["optim"].zero_grad()
        (state["model"](torch.linspace(-1, 1, 6).reshape(2, 3) + step) ** 2).sum().backward()
        state["optim"].step()


def job(steps: int = 0, make: Make = torch.optim.AdamW, **options: Any) -> State:
    module = model()
    state = {"model": module, "optim": make(module.parameters(), **options)}
    train(state, steps)
    return state


def of(state: State, name: str) -> Any:
    """What the optimizer keeps for a parameter."""
    return state["optim"].state[state["model"].get_parameter(name)]


def check_states_equal(one: State, other: State) -> None:
    """Check that the optimizers of two jobs keep the same, to the last bit."""
    packed = [state["optim"].state_dict()["state"] for state in (one, other)]
    assert packed[0].keys() == packed[1].keys()
    for number, entries in packed[0].items():
        assert entries.keys() == packed[1][number].keys()
        for key, value in entries.items():
            assert torch.equal(value, packed[1][number][key])
            assert value.dtype == packed[1][number][key].dtype


@pytest.mark.parametrize("steps_before", [0, 1])
def test_quantised_state_of_bitsandbytes_goes_on(steps_before: int) -> None:
    make = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    source, target = job(2, make, min_8bit_size=8), job(steps_before, make, min_8bit_size=8)
    transfer(source, target)
    assert of(target, "0.weight")["state1"].dtype == torch.uint8
    train(source)
    train(target)
    for mine, theirs in zip(
        target["model"].parameters(), source["model"].parameters(), strict=True
    ):
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
    train({"model": module, "optim": optimizer})
    state = {"model": LocalNonpersistentObject(module), "optim": optimizer}
    checkpoint = remesh.Checkpoint(saved(state))
    names = {*checkpoint.index, *checkpoint.values, *checkpoint.lists}
    assert names == {f"optim.{of_torch}" for of_torch in torch_names(module, optimizer)}


def test_tied_and_frozen_parameters() -> None:
    def build(steps: int) -> State:
        module = tied_and_frozen()
        state = {"model": module, "optim": torch.optim.AdamW(module.parameters())}
        train(state, steps)
        return state

    source, target = build(2), build(0)
    lists = remesh.Checkpoint(saved(source)).lists
    assert lists == {"optim.param_groups.0.params": ["0.0.weight", "0.0.bias", "0.1.bias"]}
    transfer(source, target)
    check_states_equal(source, target)
    assert len(target["optim"].state) == 2


def test_groups_are_matched_by_names_and_keep_their_identity() -> None:
    first, second = model(), model()
    weights, biases = ([p for p in first.parameters() if p.ndim == ndim] for ndim in (2, 1))
    source = {
        "model": first,
        "optim": torch.optim.AdamW(
            [{"params": weights, "lr": 0.5}, {"params": biases, "lr": 0.25, "weight_decay": 0.0}]
        ),
    }
    train(source)
    fresh = torch.optim.AdamW(
        [
            {"params": [second[2].bias]},
            {"params": [second[2].weight, second[0].weight]},
            {"params": [second[0].bias]},
        ],
        betas=(0.1, 0.2),
    )
    target = {"model": second, "optim": fresh}
    groups, whole = list(fresh.param_groups), fresh.param_groups
    transfer(source, target)
    assert fresh.param_groups is whole
    assert all(now is before for now, before in zip(whole, groups, strict=True))
    assert [g["lr"] for g in groups] == [0.25, 0.5, 0.25]
    assert [g["weight_decay"] for g in groups] == [0.0, 0.01, 0.0]
    assert [g["betas"] for g in groups] == [(0.9, 0.999)] * 3
    assert [p.shape for p in groups[1]["params"]] == [(2, 4), (4, 3)]
    assert torch.equal(of(target, "2.weight")["exp_avg"], of(source, "2.weight")["exp_avg"])


def test_a_group_over_two_stored_groups_is_refused() -> None:
    source = job()
    groups = [{"params": [p]} for p in source["model"].parameters()]
    source["optim"] = torch.optim.AdamW(groups)
    with pytest.raises(StateError, match=r"(?s)optim: .*group 0 .*2\.bias in stored group 3"):
        transfer(source, job())


def test_pipeline_ranks_know_their_part_of_each_group() -> None:
    whole, again = job(2, lr=0.125), MemoryStorage()
    storage = saved(whole)

    def one_layer(exchange: Exchange) -> None:
        """A layer of the whole model under the name that it has there."""
        stage, number = nn.Module(), 2 * exchange.rank
        stage.add_module(str(number), model()[number])
        state = {"model": stage, "optim": torch.optim.AdamW(stage.parameters())}
        remesh.load(state, storage, unexpected="error", group=exchange)
        remesh.save(state, again, group=exchange)

    run_ranks(2, one_layer)
    check_equal(again, storage)
    assert remesh.Checkpoint(again).lists == remesh.Checkpoint(storage).lists
    target = job()
    remesh.load(target, again, unexpected="error")
    check_states_equal(target, whole)


def test_options_the_checkpoint_does_not_know_stay() -> None:
    state = job(lr=0.5)
    storage = saved(state)
    [group] = state["optim"].param_groups
    group |= {"new": {"warmup": [1, torch.tensor(2.0)]}, "lr": 0.75}
    remesh.load(state, storage)
    assert group["new"] == {"warmup": [1, torch.tensor(2.0)]}
    assert group["lr"] == 0.5


def test_how_to_compute_stays_with_the_machine() -> None:
    target = job(foreach=True)
    transfer(job(2, fused=True), target)
    [group] = target["optim"].param_groups
    assert (group["fused"], group["foreach"]) == (None, True)
    train(target)


@pytest.mark.parametrize("stored", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("live", [0.25, torch.tensor(0.25)])
def test_learning_rates_keep_their_kind(stored: Any, live: Any) -> None:
    rate = copy.deepcopy(live)
    source, target = job(lr=stored), job(lr=rate)
    LambdaLR(source["optim"], lambda _step: 1.0)
    transfer(source, target)
    [group] = target["optim"].param_groups
    assert float(group["lr"]) == float(group["initial_lr"]) == 0.5
    if isinstance(live, torch.Tensor):
        assert group["lr"] is rate
    else:
        assert type(group["lr"]) is type(group["initial_lr"]) is float


def test_groups_that_share_a_default_get_tensors_of_their_own() -> None:
    def of_groups(*rates: float, default: Any = 1.0) -> State:
        module = model()
        groups = [
            {"params": list(module[n].parameters()), **({"lr": lr} if lr else {})}
            for n, lr in zip((0, 2), rates, strict=True)
        ]
        return {"model": module, "optim": torch.optim.AdamW(groups, lr=default)}

    target = of_groups(0, 0, default=torch.tensor(1.0))
    transfer(of_groups(0.5, 0.25), target)
    assert [float(group["lr"]) for group in target["optim"].param_groups] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("stored", "live", "expected"),
    [
        (0.1, torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)),
        (torch.tensor(0.5), torch.tensor(0), torch.tensor(0.5)),
        (torch.tensor(0.5), torch.zeros(3), torch.tensor(0.5)),
        (torch.arange(3.0), torch.tensor(0.0), torch.arange(3.0)),
        (torch.tensor([3.0]), None, torch.tensor([3.0])),
        (None, torch.tensor(0.0), None),
        (0.5, torch.tensor(0), 0.5),
        (3, torch.tensor(0), torch.tensor(3)),
        (3, torch.tensor(False), 3),
        (torch.tensor(7), 0, 7),
    ],
)
def test_options_are_those_that_are_stored(stored: Any, live: Any, expected: Any) -> None:
    source, target = job(), job()
    source["optim"].param_groups[0]["decay"] = stored
    target["optim"].param_groups[0]["decay"] = copy.deepcopy(live)
    transfer(source, target)
    found = target["optim"].param_groups[0]["decay"]
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_lbfgs_over_parameters_in_another_order_is_refused() -> None:
    def build(sign: int) -> State:
        module = model()
        parameters = [*module.parameters()][::sign]
        return {"model": module, "optim": torch.optim.LBFGS(parameters)}

    source = build(1)
    with pytest.raises(
        StateError, match=r"(?s)optim: .* this LBFGS.* 0\.weight, 0\.bias, 2\.weight"
    ):
        transfer(source, build(-1))
    transfer(source, build(1))


def test_lbfgs_over_parts_of_parameters_is_refused() -> None:
    module = transformer(0, 2, layers=1)
    state = {"model": module, "optim": torch.optim.LBFGS(module.parameters())}
    with pytest.raises(StateError, match=r"(?s)optim: LBFGS over parts.*Use Distributed"):
        describe(state, describe_leaf)


def test_modules_with_the_same_names_get_prefixes() -> None:
    def build() -> State:
        generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizer = torch.optim.AdamW([*generator.parameters(), *critic.parameters()])
        return {"generator": generator, "critics": [critic], "optim": optimizer}

    source, target = build(), build()
    for parameter in source["optim"].param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.5)
    source["optim"].step()
    assert remesh.Checkpoint(saved(source)).lists["optim.param_groups.0.params"] == [
        "generator.weight",
        "generator.bias",
        "critics.0.weight",
        "critics.0.bias",
    ]
    transfer(source, target)
    check_states_equal(target, source)


def pipeline_stage(stage: int, num_stages: int) -> dict[str, Any]:
    """Four layers in stages, and beside the first a model whose layer has the name of another."""
    first, size = stage * 4 // num_stages, 4 // num_stages
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(size)))
    names = {str(number): f"layers.{first + number}" for number in range(size)}
    state: dict[str, Any] = {"model": NamedModule(layers, names)}
    if stage == 0:
        state["aux"] = NamedModule(nn.Sequential(nn.Linear(2, 2)), {"0": "layers.0"})
    parameters = [p for leaf in state.values() for p in leaf.module.parameters()]
    state["optimizer"] = torch.optim.AdamW(parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 10.0 * stage + number)
    state["optimizer"].step()
    return state


def test_names_may_depend_on_the_modules_of_a_rank() -> None:
    """The first stage has to tell two layers apart, the second does not."""
    storage, again = MemoryStorage(), MemoryStorage()

    def save(exchange: Exchange) -> None:
        remesh.save(pipeline_stage(exchange.rank, 2), storage, group=exchange)

    def load(exchange: Exchange) -> None:
        state = pipeline_stage(exchange.rank, 2)
        remesh.load(state, again, unexpected="error", group=exchange)
        remesh.save(state, storage, overwrite=True, group=exchange)

    run_ranks(2, save)
    before = remesh.Checkpoint(storage)
    moments = {name: before.read(name) for name in before.index}
    whole = pipeline_stage(0, 1)
    remesh.load(whole, storage, unexpected="error")
    remesh.save(whole, again)
    run_ranks(2, load)
    after = remesh.Checkpoint(storage)
    assert {*after.index} == {*moments}
    for name, tensor in moments.items():
        assert torch.equal(after.read(name), tensor), name


def test_live_state_that_is_not_stored_is_missing() -> None:
    source, target = job(), job()
    source["optim"] = torch.optim.AdamW([source["model"][0].weight])
    train(source)
    storage = saved(source)
    new = {f"optim.param_groups.0.params ({n})" for n in ("0.bias", "2.weight", "2.bias")}
    assert set(remesh.load(target, storage, missing="keep").missing) == new
    assert len(target["optim"].state) == 1
    train(target)
    kept = of(target, "2.weight")["exp_avg"].clone()
    assert set(remesh.load(target, storage, missing="keep").missing) - new == {
        f"optim.state.{name}.{key}"
        for name in ("0.bias", "2.weight", "2.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert torch.equal(of(target, "2.weight")["exp_avg"], kept)


def test_a_new_group_keeps_its_options() -> None:
    source, target = job(), job()
    source["optim"] = torch.optim.SGD(source["model"][0].parameters(), lr=0.5)
    target["optim"] = torch.optim.SGD(
        [
            {"params": list(target["model"][2].parameters()), "lr": 0.125},
            {"params": list(target["model"][0].parameters()), "lr": 0.25},
        ]
    )
    report = transfer(source, target, missing="keep")
    assert [group["lr"] for group in target["optim"].param_groups] == [0.125, 0.5]
    assert report.missing == ("optim.param_groups.1.params",)


def test_existing_state_is_filled_in_place_and_other_dtypes_are_kept() -> None:
    source, target = job(), job()
    for state in (source, target):
        state["model"].bfloat16()
        for parameter in state["model"].parameters():
            parameter.grad = torch.randn_like(parameter)
        state["optim"].step()
    stored, live = of(source, "0.weight"), of(target, "0.weight")
    stored["exp_avg"] = torch.randn(4, 3)
    before = dict(live)
    transfer(source, target)
    assert live["exp_avg_sq"] is before["exp_avg_sq"]
    assert torch.equal(live["exp_avg_sq"], stored["exp_avg_sq"])
    assert live["exp_avg"].dtype == torch.float32
    assert torch.equal(live["exp_avg"], stored["exp_avg"])


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam])
@pytest.mark.parametrize("widens", [True, False])
def test_state_is_cast_as_its_parameter_is(make: Make, widens: bool, steps_before: int) -> None:
    narrow, wide = job(), job()
    narrow["model"].bfloat16()
    for one in (narrow, wide):
        one["optim"] = make(one["model"].parameters())
    source, target = (narrow, wide) if widens else (wide, narrow)
    for one, steps in ((source, 2), (target, steps_before)):
        for _ in range(steps):
            for parameter in one["model"].parameters():
                parameter.grad = torch.randn_like(parameter)
            one["optim"].step()
    storage = MemoryStorage()
    remesh.save(source, storage)
    with pytest.raises(remesh.MismatchError, match=r"0\.weight: dtype .* \(cast=True converts\)"):
        remesh.load(target, storage)
    remesh.load(target, storage, cast=True)
    for name, parameter in target["model"].named_parameters():
        stored, loaded = of(source, name), of(target, name)
        assert stored.keys() == loaded.keys()
        for key, value in stored.items():
            dtype = parameter.dtype if value.ndim else value.dtype
            assert loaded[key].dtype == dtype
            assert torch.equal(loaded[key], value.to(dtype))
        parameter.grad = torch.randn_like(parameter)
    target["optim"].step()


class InFloat32(torch.optim.SGD):
    """Keeps moments in float32, whatever dtype the parameters have, and a table of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
            state.setdefault("table", torch.linspace(0, 1, 7))
            state["moment"] += parameter.grad


def test_state_in_float32_of_another_optimizer_gets_no_narrower_dtype() -> None:
    source, target = job(), job()
    target["model"].bfloat16()
    for one in (source, target):
        one["optim"] = InFloat32(one["model"].parameters())
    for parameter in source["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    source["optim"].step()
    storage = MemoryStorage()
    remesh.save(source, storage)
    remesh.load(target, storage, cast=True)
    for name, _ in target["model"].named_parameters():
        for key, value in of(source, name).items():
            loaded = of(target, name)[key]
            assert loaded.dtype == torch.float32
            assert torch.equal(loaded, value)


class Wrapper(Optimizer):
    """Hands on to another optimizer and has no hooks, like AcceleratedOptimizer of accelerate."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults

    state = property(lambda self: self.inner.state, lambda self, new: None)
    param_groups = property(
        lambda self: self.inner.param_groups,
        lambda self, new: setattr(self.inner, "param_groups", new),
    )

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class LoadsLikeTorch(Wrapper):
    """Hands on all but the load of torch, whose last step alone it takes part in."""

    load_state_dict = Optimizer.load_state_dict

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner.__setstate__(state)


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        lambda inner: Wrapper(Wrapper(inner)),
        lambda inner: DescribedOptimizer(Wrapper(inner), {}),
        LoadsLikeTorch,
    ],
    ids=["once", "twice", "described", "like torch"],
)
def test_an_optimizer_that_wraps_another_is_loaded(wrap: Callable[[Optimizer], Any]) -> None:
    source, target = job(), job()
    for one, steps in ((source, 2), (target, 0)):
        one["model"].bfloat16()
        inner = torch.optim.AdamW(one["model"].parameters())
        for _ in range(steps):
            for parameter in one["model"].parameters():
                parameter.grad = torch.randn_like(parameter)
            inner.step()
        for state in inner.state.values():
            state["exp_avg"] = state["exp_avg"].float() + 1e-5  # that torch's load would cast
        groups = inner.param_groups
        one["optim"] = wrap(inner)
    storage = MemoryStorage()
    remesh.save(source, storage)
    remesh.load(target, storage)
    assert inner.param_groups is groups
    for mine, theirs in zip(
        target["model"].parameters(), source["model"].parameters(), strict=True
    ):
        wrapped: Any = getattr(source["optim"], "optimizer", source["optim"])
        stored = wrapped.state[theirs]
        for key, value in stored.items():
            loaded = inner.state[mine][key]
            assert loaded.dtype == value.dtype
            assert torch.equal(loaded, value)


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
    source, target = job(1, Nested, lr=0.5), job(0, Nested, lr=0.25)
    fresh = target["optim"]
    groups = fresh.param_groups
    transfer(source, target)
    assert (fresh.calls, fresh.param_groups[0]["lr"]) == (1, 0.5)
    assert fresh.param_groups is groups
    assert fresh.state["seen"]["batches"] == 7
    for name, _ in target["model"].named_parameters():
        assert str(of(target, name)) == str(of(source, name))


class Watched(torch.optim.Adam):
    """Adam, with a look at what torch makes before a step."""

    def _init_group(self, group: Any, *lists: Any) -> bool:
        return bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]


CLASSES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "watched": Watched,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "rmsprop": torch.optim.RMSprop,
    "centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
}


def of_torch(saved_job: State, make: Make) -> State:
    """What torch makes of a job with an optimizer that has those saved options that it knows."""
    module = copy.deepcopy(saved_job["model"])
    optimizer = make(module.parameters())
    packed = copy.deepcopy(saved_job["optim"].state_dict())
    [stored], [own] = packed["param_groups"], optimizer.param_groups
    group = {key: stored.get(key, value) for key, value in own.items()}
    with contextlib.suppress(KeyError):  # some look for a step when they load
        optimizer.load_state_dict({"state": packed["state"], "param_groups": [group]})
    return {"model": module, "optim": optimizer}


@pytest.mark.parametrize("name", CLASSES)
def test_state_with_which_torch_cannot_step_is_missing(name: str) -> None:
    source = job(2, CLASSES[name])
    storage = saved(source)
    for make in CLASSES.values():
        theirs, own = of_torch(source, make), job(0, make)
        try:
            train(theirs)
        except KeyError as error:
            key = error.args[0]
            with pytest.raises(MismatchError, match="Another optimizer was saved") as caught:
                remesh.load(own, storage)
            assert f"optim.state.0.bias.{key}" in caught.value.missing
            remesh.load(own, storage, missing="keep")
            train(own)
        else:
            remesh.load(own, storage)
            train(own)
            check_states_equal(own, theirs)


@pytest.mark.parametrize("make", CLASSES.values())
def test_state_that_is_kept_missing_begins_anew(make: Make) -> None:
    source, own = job(2, CLASSES["sgd"]), job(0, make)
    fresh = copy.deepcopy(own)
    fresh["model"].load_state_dict(source["model"].state_dict())
    for entries in source["optim"].state.values():  # that of an optimizer that nobody knows
        entries["unknown"] = entries.pop("momentum_buffer")
    transfer(source, own, missing="keep")
    for entries in own["optim"].state.values():
        del entries["unknown"]
    [loaded], [options] = own["optim"].param_groups, fresh["optim"].param_groups
    options.update({key: value for key, value in loaded.items() if key != "params"})
    train(own)
    train(fresh)
    check_states_equal(own, fresh)


def test_state_of_which_each_kind_of_parameter_needs_another() -> None:
    source = job(1, CLASSES["sgd"])
    with pytest.raises(MismatchError) as caught:
        transfer(source, job(0, torch.optim.Adafactor))
    of_matrix = {f"optim.state.0.weight.{key}" for key in ("step", "row_var", "col_var")}
    of_vector = {f"optim.state.0.bias.{key}" for key in ("step", "variance")}
    assert of_matrix | of_vector == {
        name for name in caught.value.missing if name.startswith("optim.state.0.")
    }


def test_older_torch_kept_steps_as_numbers() -> None:
    source, target = job(2), job()
    for entries in source["optim"].state.values():
        entries["step"] = 2
    transfer(source, target)
    assert torch.equal(of(target, "0.weight")["step"], torch.tensor(2.0))
    train(target)


def test_an_optimizer_without_the_entries_of_torch_is_refused() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"own": 1}

    with pytest.raises(StateError, match="the state dict of Own has no entries 'state'"):
        describe(job(0, Own), describe_leaf)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_steps_lie_where_the_optimizer_needs_them(options: dict[str, Any]) -> None:
    module = model().cuda()
    fresh = torch.optim.AdamW(module.parameters(), **options)
    transfer(job(2), {"model": module, "optim": fresh})
    entries = next(iter(fresh.state.values()))
    assert entries["step"].is_cuda == bool(options)
    assert entries["exp_avg"].is_cuda
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
    assert int(entries["step"]) == 3
