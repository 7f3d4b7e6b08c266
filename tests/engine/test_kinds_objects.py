"""Modules, optimizers, objects with a state dict and remesh's descriptions, saved and loaded."""

from __future__ import annotations

import copy
import fractions
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer, lr_scheduler

import remesh
from remesh.core.sharded import LocalNonpersistentObject, ShardedObject, ShardedTensor
from remesh.core.sharded import ShardedTensorFactory as Factory
from remesh.core.values import UnresolvedValue
from remesh.storage import MemoryStorage
from tests.engine.bits import bits_of_all
from tests.engine.scenes import errors_of_save, saved
from tests.engine.test_kinds import flat, load_exactly

# ---------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with normalisation statistics, and buffers of both kinds."""

    kept: torch.Tensor
    recomputed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("recomputed", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        return result


BLOCK_NAMES = {
    "linear.weight",
    "linear.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "kept",
}


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["in a state", "alone"])
def test_a_module_is_filled_in_place(prefix: str, tmp_path: Path) -> None:
    source, target = Block(), Block()
    source(torch.rand(5, 3))
    saved_state, state = ({"model": one} if prefix else one for one in (source, target))
    remesh.save(saved_state, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert set(checkpoint.index) == {f"{prefix}{name}" for name in BLOCK_NAMES}
    weight, own = target.linear.weight, target.recomputed.clone()
    assert load_exactly(state, tmp_path) is state
    assert target.linear.weight is weight
    stored = checkpoint.state()["model"] if prefix else checkpoint.state()
    for found in (target.state_dict(), stored):
        assert bits_of_all(found) == bits_of_all(source.state_dict())
    assert target.norm.num_batches_tracked == 1
    assert torch.equal(target.recomputed, own)
    target.load_state_dict(stored)  # nothing is missing


Wrap = Callable[[Any], Any]


def as_it_is(module: Any) -> Any:
    return module


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, tuple[Wrap, Wrap]] = {  # of the layer in a block, and of the block
    "none": (as_it_is, as_it_is),
    "compiled": (as_it_is, compiled),
    "compiled in place": (compiled, as_it_is),
    "recomputing": (checkpoint_wrapper, checkpoint_wrapper),
    "compiled and recomputing": (lambda module: compiled(checkpoint_wrapper(module)),) * 2,
    "recomputing what is compiled": (as_it_is, lambda block: checkpoint_wrapper(compiled(block))),
}


def wrapped(block: Any, kind: str) -> Any:
    inner, outer = WRAPPERS[kind]
    block.linear = inner(block.linear)
    return outer(block)


# What is stored is the same for all, so each is a source and a target once.
@pytest.mark.parametrize(
    ("of_source", "of_target"),
    [pair for kind in [*WRAPPERS][1:] for pair in ((kind, "none"), ("none", kind))],
)
def test_wrappers_leave_no_trace_in_names(of_source: str, of_target: str, tmp_path: Path) -> None:
    source, target = Block(), Block()
    expected = bits_of_all(source.state_dict())
    remesh.save({"model": wrapped(source, of_source)}, tmp_path)
    assert set(remesh.Checkpoint(tmp_path).index) == {f"model.{name}" for name in BLOCK_NAMES}
    model = wrapped(target, of_target)
    load_exactly({"model": model}, tmp_path)
    assert list(bits_of_all(model.state_dict()).values()) == list(expected.values())


class Remembering(nn.Module):
    """Keeps more than tensors, in any form."""

    def __init__(self, memory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.memory = memory

    def get_extra_state(self) -> object:
        return self.memory

    def set_extra_state(self, state: object) -> None:
        self.memory = state


@pytest.mark.parametrize("live", [None, {}, {"seen": [], "amax": torch.zeros(1)}, torch.zeros(9)])
@pytest.mark.parametrize(
    "memory",
    [
        {"seen": [1, 2], "amax": torch.arange(3.0), "per_layer": [torch.ones(1), 5]},
        torch.arange(4, dtype=torch.uint8),
        "text",
        {},
        None,
    ],
)
def test_extra_state_of_modules(memory: Any, live: object, tmp_path: Path) -> None:
    source, target = Remembering(memory), Remembering(live)
    remesh.save({"model": nn.Sequential(source)}, tmp_path)
    load_exactly({"model": nn.Sequential(target)}, tmp_path)
    assert flat(target.memory) == flat(memory)
    assert type(target.memory) is type(memory)
    assert torch.equal(target.weight, source.weight)


class Tied(nn.Module):
    """An embedding whose weight may be the output layer's, too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        if tied:
            self.out.weight = self.embed.weight


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    source = Tied(tied=True)
    remesh.save({"model": source}, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert set(checkpoint.index) == {"model.embed.weight", "model.out.weight"}
    assert checkpoint.index.aliases == {"model.out.weight": "model.embed.weight"}
    assert checkpoint.index.pieces("model.out.weight") == checkpoint.index.pieces(
        "model.embed.weight"
    )
    assert sum(piece.num_bytes for piece in checkpoint.index.pieces("model.embed.weight")) == 60
    assert torch.equal(checkpoint.state()["model"]["out.weight"], source.embed.weight)
    assert len(checkpoint.index.boxes) == 1


@pytest.mark.parametrize("target_is_tied", [True, False])
@pytest.mark.parametrize("source", ["tied", "equal", "different"])
def test_weights_that_are_tied_or_not_load_where_they_fit(
    source: str, target_is_tied: bool, tmp_path: Path
) -> None:
    stored, target = Tied(tied=source == "tied"), Tied(tied=target_is_tied)
    with torch.no_grad():
        stored.out.weight.copy_(stored.embed.weight)
        stored.out.weight[4, 2] += source == "different"
    remesh.save({"model": stored}, tmp_path)
    before = target.embed.weight.detach().clone()
    if source == "different" and target_is_tied:
        with pytest.raises(remesh.MismatchError, match="tied in the state") as caught:
            remesh.load({"model": target}, tmp_path)
        [conflict] = caught.value.conflicts
        assert "model.embed.weight" in conflict
        assert "model.out.weight" in conflict
        assert torch.equal(target.embed.weight, before)
        return
    load_exactly({"model": target}, tmp_path)
    assert (target.out.weight is target.embed.weight) == target_is_tied
    assert torch.equal(target.embed.weight, stored.embed.weight)
    assert torch.equal(target.out.weight, stored.out.weight)


def test_a_tied_weight_that_is_stored_under_its_second_name(tmp_path: Path) -> None:
    values = torch.rand(5, 3)
    remesh.save({"model": {"out.weight": values}}, tmp_path)
    target = Tied(tied=True)
    report = remesh.load({"model": target}, tmp_path)
    assert torch.equal(target.embed.weight, values)
    assert report.derived == {"model.embed.weight": "model.out.weight"}


# ---------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------


class Packing(torch.optim.AdamW):
    """Its state dict has moments in a dict of their own, as that of bitsandbytes has them."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        states = {}
        for number, entries in packed["state"].items():
            moments = {key: entries[key] for key in ("exp_avg", "exp_avg_sq")}
            states[number] = {"step": entries["step"], "moments": moments}
        return {**packed, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {}
        for number, entries in state_dict["state"].items():
            states[number] = {"step": entries["step"], **entries["moments"]}
        super().load_state_dict({**state_dict, "state": states})


def packing_by_hooks(parameters: Any) -> Optimizer:
    """Stores half of the bits of a moment under a name of its own, and twice the steps."""
    optimizer = torch.optim.AdamW(parameters)

    def pack(_optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        states = {number: dict(entries) for number, entries in packed["state"].items()}
        for entries in states.values():
            entries["half"] = entries.pop("exp_avg").bfloat16()
            entries["exp_avg_sq"] = entries["exp_avg_sq"].double()
            entries["step"] = entries["step"] * 2
        return {**packed, "state": states}

    def unpack(_optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        states = {number: dict(entries) for number, entries in packed["state"].items()}
        for entries in states.values():
            entries["exp_avg"] = entries.pop("half").float()
            entries["exp_avg_sq"] = entries["exp_avg_sq"].float()
        return {**packed, "state": states}

    def halve(optimizer: Optimizer) -> None:
        for entries in optimizer.state.values():
            entries["step"] /= 2

    optimizer.register_state_dict_post_hook(pack)
    optimizer.register_load_state_dict_pre_hook(unpack)
    optimizer.register_load_state_dict_post_hook(halve)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "packing": Packing,
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adamw": torch.optim.AdamW,
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def batch(step: int) -> torch.Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(step))


def test_hooks_of_an_optimizer_are_called(tmp_path: Path) -> None:
    source, target = net(), net()
    optimizer, resumed = (packing_by_hooks(module.parameters()) for module in (source, target))
    train(source, [optimizer], range(4))
    remesh.save({"model": source, "optim": optimizer}, tmp_path)
    load_exactly({"model": target, "optim": resumed}, tmp_path)
    for old, new in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert old.keys() == new.keys()
        assert old["step"] == new["step"] == 4
        assert torch.equal(old["exp_avg"].bfloat16().float(), new["exp_avg"])
        assert torch.equal(old["exp_avg_sq"], new["exp_avg_sq"])
    train(target, [resumed], range(4, 6))


def train(module: nn.Module, optimizers: list[Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = module(batch(step)).square().mean()
        module.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "in use"])
def test_training_goes_on_with_the_same_losses(name: str, fresh: bool, tmp_path: Path) -> None:
    source, target = net(), net()
    optimizer, resumed = (OPTIMIZERS[name](module.parameters()) for module in (source, target))
    train(source, [optimizer], range(4))
    remesh.save({"model": source, "optim": optimizer, "step": 4}, tmp_path)
    if not fresh:
        train(target, [resumed], range(7, 9))
    state: dict[str, Any] = {"model": target, "optim": resumed, "step": 0}
    load_exactly(state, tmp_path)
    assert state["step"] == 4
    assert state["optim"] is resumed
    assert train(target, [resumed], range(4, 10)) == train(source, [optimizer], range(4, 10))


def test_an_optimizer_alone_has_no_names(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(net().parameters())
    with pytest.raises(remesh.errors.StateError, match="is in no module of the state"):
        remesh.save({"optim": optimizer}, tmp_path)
    with pytest.raises(remesh.errors.StateError, match="is in no module of the state"):
        remesh.save(optimizer, tmp_path)


def test_an_optimizer_without_its_module(tmp_path: Path) -> None:
    source, target = net(), net()
    optimizer, resumed = (torch.optim.AdamW(module.parameters()) for module in (source, target))
    train(source, [optimizer], range(2))
    remesh.save({"model": LocalNonpersistentObject(source), "optim": optimizer}, tmp_path)
    assert not any(name.startswith("model.") for name in remesh.Checkpoint(tmp_path).index)
    before = bits_of_all(target.state_dict())
    load_exactly({"model": LocalNonpersistentObject(target), "optim": resumed}, tmp_path)
    assert bits_of_all(target.state_dict()) == before
    target.load_state_dict(source.state_dict())
    assert train(target, [resumed], range(2, 5)) == train(source, [optimizer], range(2, 5))


# ---------------------------------------------------------------------------------------------
# Other objects with a state
# ---------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str, tmp_path: Path) -> None:
    def job() -> dict[str, Any]:
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return {"model": module, "optim": optimizer, "sched": SCHEDULERS[name](optimizer)}

    def go_on(state: dict[str, Any], steps: range) -> list[float]:
        rates = []
        for step in steps:
            loss = train(state["model"], [state["optim"]], range(step, step + 1))
            scheduler = state["sched"]
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*(loss if plateau else []))
            rates.append(state["optim"].param_groups[0]["lr"])
        return rates

    source, target = job(), job()
    go_on(source, range(4))
    remesh.save(source, tmp_path)
    scheduler = target["sched"]
    load_exactly(target, tmp_path)
    assert target["sched"] is scheduler
    assert scheduler.state_dict().keys() == source["sched"].state_dict().keys()
    expected = go_on(source, range(4, 12))
    assert len(set(expected)) > 1
    assert go_on(target, range(4, 12)) == expected


def test_random_numbers_go_on(tmp_path: Path) -> None:
    torch.rand(3, generator=(generator := torch.Generator().manual_seed(5)))
    own, python = np.random.default_rng(3), random.Random(4)
    states = {"numpy": own.bit_generator.state, "python": python.getstate()}
    remesh.save({"torch": generator, **states}, tmp_path)
    target: dict[str, Any] = {"torch": torch.Generator(), "numpy": None, "python": None}
    load_exactly(target, tmp_path)
    assert torch.equal(torch.rand(4, generator=target["torch"]), torch.rand(4, generator=generator))
    assert {"numpy": target["numpy"], "python": target["python"]} == states


class Stateful:
    """Anything with a state dict; remembers what it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATES: dict[str, Any] = {
    "mixed": {"buffer": torch.arange(3.0), "array": np.arange(4), "epoch": 2, "seen": ["a", 1]},
    "nested": {"workers": [{"rng": torch.arange(2)}, {"rng": torch.arange(5)}], "at": (1, None)},
    "numbered": {0: torch.ones(1), 5: "x"},
    "deep": {"deep": {"empty": {}, "list": [], "pair": (torch.ones(1), [torch.ones(2), {}])}},
    "a tensor": torch.arange(4.0),
    "a value": 17,
    "a tuple": (torch.ones(2), {"x": 1}),
    "nothing": {},
    "odd keys": {(1, 2): 3},
}


@pytest.mark.parametrize("live", ["the same", "empty", "another"])
@pytest.mark.parametrize("kind", STATES)
def test_objects_get_the_stored_state_whatever_theirs_is(
    kind: str, live: str, tmp_path: Path
) -> None:
    stored, other = STATES[kind], {"buffer": torch.zeros(7), "epoch": 0}
    remesh.save({"data": Stateful(stored)}, tmp_path)
    target = Stateful(copy.deepcopy({"the same": stored, "empty": {}, "another": other}[live]))
    if live != "another":
        load_exactly({"data": target}, tmp_path)
    elif kind in {"nested", "numbered", "deep"}:
        # What only they have is missing, where the stored state has names of that kind.
        with pytest.raises(remesh.MismatchError) as caught:
            remesh.load({"data": target}, tmp_path)
        assert set(caught.value.missing) == {"data.buffer", "data.epoch"}
        assert flat(target.state) == flat(other)
        stored = {**stored, **other}
    if live == "another":
        remesh.load({"data": target}, tmp_path, unexpected="error", missing="keep")
    assert flat(target.state) == flat(stored)
    if live == "the same":
        assert type(target.state) is type(stored)
        assert kind != "mixed" or isinstance(target.state["array"], np.ndarray)


# ---------------------------------------------------------------------------------------------
# Descriptions
# ---------------------------------------------------------------------------------------------


def split(name: str, data: torch.Tensor) -> dict[str, ShardedTensor]:
    gate, up = data.chunk(2)
    return {
        "gate": ShardedTensor.whole(f"{name}.gate", gate),
        "up": ShardedTensor.whole(f"{name}.up", up.t().contiguous()),
    }


def join(parts: dict[str, ShardedTensor]) -> torch.Tensor:
    gate, up = (parts[key].parts[0].data for key in ("gate", "up"))
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    return torch.cat([gate, up.t()])


def test_a_factory_is_stored_in_another_form(tmp_path: Path) -> None:
    fused = torch.arange(24.0).reshape(6, 4)
    remesh.save({"w": Factory("mlp", fused, split, join)}, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert set(checkpoint.index) == {"mlp.gate", "mlp.up"}
    assert torch.equal(checkpoint.read("mlp.up"), fused[3:].t())
    parameter = nn.Parameter(torch.zeros(6, 4))
    state = {"w": Factory("mlp", parameter, split, join)}
    load_exactly(state, tmp_path)
    assert state["w"].data is parameter
    assert torch.equal(parameter, fused)


def test_a_factory_of_values_gives_a_new_one(tmp_path: Path) -> None:
    def build(name: str, data: list[Any]) -> dict[str, Any]:
        return {"first": data[0], "rest": ShardedTensor.whole(name, data[1])}

    def merge(built: dict[str, Any]) -> list[Any]:
        return [built["first"], built["rest"].parts[0].data]

    remesh.save({"f": Factory("g", ["x", np.arange(3)], build, merge)}, tmp_path)
    assert remesh.Checkpoint(tmp_path).values == {"f.first": "x"}
    state = {"f": Factory("g", ["", np.zeros(3, np.int64)], build, merge)}
    load_exactly(state, tmp_path)
    assert state["f"].data[0] == "x"
    assert state["f"].data[1].tolist() == [0, 1, 2]


def test_elements_of_sharded_objects(tmp_path: Path) -> None:
    def grid(values: list[object]) -> dict[str, Any]:
        return {
            "rng": [
                ShardedObject("rng", value, (2, 2), divmod(number, 2))
                for number, value in enumerate(values)
            ]
        }

    values: list[object] = [{"seed": 1}, (2, None), b"\x03", None]
    remesh.save(grid(values), tmp_path)
    stored = remesh.Checkpoint(tmp_path).objects
    assert stored["rng/shard_1.0_2.2"] == b"\x03"
    assert len(stored) == 4
    target = grid([0, 0, 0, 0])
    loaded = load_exactly(target, tmp_path)
    assert [element.data for element in loaded["rng"]] == values


def test_an_object_that_this_program_cannot_have_is_refused() -> None:
    unresolved = [UnresolvedValue("enum", "a.Color", "RED")]
    place = saved({"enum": ShardedObject("enum", unresolved, (1,), (0,))})
    state = {"enum": ShardedObject("enum", None, (1,), (0,))}
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(state, place)
    (unknown,) = caught.value.conflicts
    assert unknown.startswith("enum/shard_0_1: the stored value is a a.Color")
    assert state["enum"].data is None


@pytest.mark.parametrize("wrap", [list, lambda value: ShardedObject("x", list(value), (1,), (0,))])
def test_what_a_reader_did_not_read_is_not_saved(wrap: Callable[[Any], object]) -> None:
    torch.save({"x": fractions.Fraction(1, 3)}, file := io.BytesIO())
    source = MemoryStorage()
    source.put("a.pt", file.getvalue(), overwrite=False)
    found = remesh.Checkpoint(source).values["x"]
    errors = errors_of_save(1, lambda _rank: {"x": wrap([found])})
    told = r"^x(\.0)?: its content was not read"
    with pytest.raises(remesh.errors.UnsupportedValueError, match=told):
        raise errors[0]


def test_a_nonpersistent_object_is_neither_stored_nor_touched(tmp_path: Path) -> None:
    lock = object()
    cache = {"t": torch.zeros(2)}
    state: dict[str, Any] = {
        "lock": LocalNonpersistentObject(lock),
        "cache": LocalNonpersistentObject(cache),
        "w": torch.ones(1),
    }
    remesh.save(state, tmp_path)
    assert set(remesh.Checkpoint(tmp_path).state()) == {"w"}
    wrapped = state["lock"]
    load_exactly(state, tmp_path)
    assert state["lock"] is wrapped
    assert wrapped.obj is lock
    assert cache["t"].tolist() == [0, 0]
