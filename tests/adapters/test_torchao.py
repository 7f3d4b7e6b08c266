"""torchao: optimizers with states of few bits, quantised weights, weights of float8 training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.optim.lr_scheduler import StepLR

import remesh
import remesh.sharding
from remesh.cli import cli
from remesh.errors import MismatchError, StateError, TransformError, UnsupportedValueError
from remesh.training import export_weights
from tests.adapters import torchao_jobs as jobs
from tests.adapters.stored import saved, transfer
from tests.support.torch_versions import needs

pytestmark = needs("torchao")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """torchao compiles its steps, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def job(name: str, seed: int, *, steps: int = 0) -> dict[str, Any]:
    """A model of which some parameters are large enough for states of few bits."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    state = {"model": model, "optimizer": jobs.optimizer(name, model)}
    train(state, steps)
    return state


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        samples = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        state["optimizer"].zero_grad()
        state["model"](samples).square().sum().backward()
        state["optimizer"].step()


@pytest.mark.parametrize("name", jobs.OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_training_goes_on_as_if_it_had_not_stopped(name: str, steps_before: int) -> None:
    source, target = job(name, 0, steps=3), job(name, 1, steps=steps_before)
    transfer(source, target)
    assert jobs.states(target["optimizer"]) == jobs.states(source["optimizer"])
    assert [key for key in jobs.states(target["optimizer"]) if key[2] == "codes"]
    train(source, 2)
    train(target, 2)
    for new, old in zip(target["model"].parameters(), source["model"].parameters(), strict=True):
        assert torch.equal(new, old)


def test_states_are_stored_under_their_parameters() -> None:
    checkpoint = remesh.Checkpoint(saved(job("AdamW8bit", 0, steps=1)))
    base = "optimizer.state.0.weight.exp_avg"
    found = {
        name.removeprefix(f"{base}."): (checkpoint.index[name].dtype, checkpoint.index[name].shape)
        for name in checkpoint.index
        if name.startswith(f"{base}.")
    }
    assert found == {
        "codes": ("uint8", (128, 64)),
        "scale": ("float32", (32,)),
        "qmap": ("float32", (256,)),
    }
    assert checkpoint.values[f"{base}.__tensor_flatten__"] == {
        "class": "torchao.OptimState8bit",
        "tensors": {"codes": "uint8", "scale": "float32", "qmap": "float32"},
        "signed": True,
        "block_size": 256,
    }


def test_the_first_state_is_made_without_touching_the_live_optimizer() -> None:
    source, target = job("AdamW8bit", 0, steps=1), job("AdamW8bit", 1)
    storage = saved({"optimizer": source["optimizer"], "model": source["model"]})
    optimizer = target["optimizer"]
    scheduler = StepLR(optimizer, 1)  # wraps the optimizer's step
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    weights = [parameter.clone() for parameter in target["model"].parameters()]
    target["model"] = remesh.sharding.LocalNonpersistentObject(target["model"])
    remesh.load(target, storage)
    assert calls == []
    assert scheduler.last_epoch == 0
    parameters = target["model"].obj.parameters()
    for parameter, weight in zip(parameters, weights, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, weight)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_another_optimizer_is_refused(steps: int) -> None:
    storage = saved(job("AdamW8bit", 0, steps=1))
    for name, wanted in (("AdamWFp8", "torchao.OptimStateFp8"), ("AdamW", "a plain tensor")):
        target = job(name, 1, steps=steps)
        before = copy.deepcopy([*target["model"].parameters()])
        with pytest.raises(MismatchError) as caught:
            remesh.load(target, storage)
        assert len(caught.value.conflicts) == 4  # two moments of two weights
        assert all(f"{wanted} is wanted" in told for told in caught.value.conflicts)
        for parameter, weight in zip(target["model"].parameters(), before, strict=True):
            assert torch.equal(parameter, weight)


def test_state_that_this_optimizer_does_not_make_is_refused() -> None:
    with pytest.raises(
        StateError, match=r"(?s)exp_avg: .*\nConstruct it as the one that was saved"
    ):
        transfer(job("AdamW8bit", 0, steps=1), job("SGD", 1))


def test_states_follow_parameters_that_are_renamed() -> None:
    source, target = job("AdamW8bit", 0, steps=1), job("AdamW8bit", 1)
    target["model"] = nn.ModuleDict({"a": target["model"][0], "b": target["model"][1]})
    renames = remesh.Transform(
        "model.0.weight -> model.a.weight\nmodel.0.bias -> model.a.bias\n"
        "model.1.weight -> model.b.weight\nmodel.1.bias -> model.b.bias"
    )
    transfer(source, target, transform=renames)
    assert jobs.states(target["optimizer"]) == jobs.states(source["optimizer"])


def test_states_do_not_follow_parameters_that_are_reshaped() -> None:
    source, target = job("AdamW8bit", 0, steps=1), job("AdamW8bit", 1)
    target["model"][0].weight = nn.Parameter(torch.zeros(64, 128))
    target["optimizer"] = jobs.optimizer("AdamW8bit", target["model"])
    transposed = remesh.Transform("model.0.weight^T -> model.0.weight")
    with pytest.raises(TransformError, match=r"exp_avg\.scale' cannot follow its parameter"):
        transfer(source, target, transform=transposed)


# ---------------------------------------------------------------------------------------------
# Quantised weights
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", jobs.QUANTISED)
def test_quantised_weights(name: str) -> None:
    source, target = jobs.quantised(name, 0), jobs.quantised(name, 1)
    transfer({"model": source}, {"model": target})
    samples = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(target(samples), source(samples))
    assert jobs.inner_bytes(target[0].weight) == jobs.inner_bytes(source[0].weight)


def test_weights_that_are_quantised_otherwise_are_refused() -> None:
    storage = saved({"model": jobs.quantised("Int8WeightOnlyConfig", 0)})
    for target, told in (
        (jobs.quantised("Float8WeightOnlyConfig", 1), "torchao.Float8Tensor is wanted"),
        (jobs.quantised("Int8DynamicActivationInt8WeightConfig", 1), "act_quant_kwargs"),
        (nn.Sequential(nn.Linear(64, 32)).bfloat16(), "a plain tensor is wanted"),
    ):
        with pytest.raises(MismatchError, match=told):
            remesh.load({"model": target}, storage)


@pytest.mark.parametrize("make", [jobs.int4, jobs.nf4])
def test_packed_weights(make: Any) -> None:
    source, target = make(0), make(1)
    transfer({"w": source}, {"w": target})
    assert jobs.inner_bytes(target) == jobs.inner_bytes(source)


# ---------------------------------------------------------------------------------------------
# Float8 training
# ---------------------------------------------------------------------------------------------


def test_a_weight_of_float8_training_is_stored_as_a_plain_one() -> None:
    source, target = jobs.float8(0), jobs.float8(1)
    plain: Any = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    assert type(source[0].weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    storage = saved({"model": source})
    checkpoint = remesh.Checkpoint(storage)
    assert [(n, checkpoint.index[n].dtype) for n in checkpoint.index] == [
        ("model.0.weight", "float32"),
        ("model.1.weight", "float32"),
    ]
    remesh.load({"model": plain}, storage)
    assert torch.equal(plain[0].weight, source[0].weight._tensor)
    target[0].weight._precomputed_scale = torch.tensor(3.0)
    transfer({"model": plain}, {"model": target})
    assert torch.equal(target[0].weight._tensor, plain[0].weight)
    assert target[0].weight._precomputed_scale is None  # it was that of other elements


def test_quantised_weights_are_not_exported(tmp_path: Path) -> None:
    model = jobs.quantised("Int8WeightOnlyConfig", 0)
    remesh.save({"model": model}, tmp_path / "c")
    for source in ({"model": model}, tmp_path / "c"):
        with pytest.raises(UnsupportedValueError, match=r"model\.0\.weight\.qdata: weight files"):
            export_weights(source, tmp_path / "out", entry="model")
    export_weights(model, tmp_path / "bias", names=lambda name: None if "weight" in name else name)


def test_the_command_line_shows_what_a_tensor_is_made_of(tmp_path: Path) -> None:
    remesh.save({"model": jobs.quantised("Int8WeightOnlyConfig", 0)}, tmp_path / "c")
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "c"), "model.0.weight"])
    assert "'class': 'torchao.Int8Tensor'" in shown.output
    assert "'qdata': 'int8'" in shown.output
    listed = CliRunner().invoke(cli, ["ls", str(tmp_path / "c"), "model.0.weight*"])
    for inner, dtype in (("qdata", "int8"), ("scale", "float32"), ("zero_point", "int8")):
        (line,) = [line for line in listed.output.splitlines() if f"weight.{inner}" in line]
        assert line.split()[0] == dtype
