"""Parts of a checkpoint under other names: modules, optimizers, averages beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remesh
from remesh.checkpoint import convert
from remesh.errors import TransformError


class Encoder(nn.Module):
    """A module of two submodules, one of them frozen."""

    def __init__(self, body: str = "body", *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.add_module(body, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.head = nn.Linear(4, 2)
        self.head.weight.requires_grad_(False)
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.get_submodule(self._body)(x))
        return result


def trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(model.parameters(), lr=0.1)
    for number in range(2):
        model(torch.full((3, 4), float(number + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def same_next_step(
    one: nn.Module, one_optimizer: torch.optim.Optimizer, two: nn.Module, two_optimizer: Any
) -> bool:
    for model, optimizer in ((one, one_optimizer), (two, two_optimizer)):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


Full = tuple[Path, Encoder, torch.optim.Optimizer]


@pytest.fixture
def full(tmp_path: Path) -> Full:
    """A checkpoint of a model, its moving average, its optimizer and a step."""
    model, average = Encoder(), Encoder(seed=1)
    optimizer = trained(model, torch.optim.AdamW)
    state = {"model": model, "ema": average, "optimizer": optimizer, "step": 2}
    remesh.save(state, tmp_path / "full")
    return tmp_path / "full", model, optimizer


RENAMES: list[Any] = [
    {"model.": "net."},
    lambda name: "net." + name.removeprefix("model.") if name.startswith("model.") else None,
]


@pytest.mark.parametrize("transform", RENAMES, ids=["prefix", "function"])
def test_only_the_model_under_another_prefix(full: Full, transform: Any) -> None:
    path, model, _ = full
    net = Encoder(seed=2)
    report = remesh.load({"net": net}, path, transform=transform)
    assert all(torch.equal(net.state_dict()[n], t) for n, t in model.state_dict().items())
    assert report.renamed["net.head.weight"] == "model.head.weight"


def test_subtree_as_the_whole_state_and_back(full: Full, tmp_path: Path) -> None:
    path, model, _ = full
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    remesh.load(body, path, transform={"model.body.": ""})
    assert torch.equal(body.get_parameter("1.weight"), model.get_parameter("body.1.weight"))
    remesh.save(body, tmp_path / "body")
    again = Encoder(seed=3)
    remesh.load({"m": again}, tmp_path / "body", transform={"": "m.body."}, missing="keep")
    assert torch.equal(again.get_parameter("body.1.weight"), body.get_parameter("1.weight"))


@pytest.mark.parametrize("with_average", [True, False], ids=["average", "alone"])
def test_optimizer_follows_another_prefix(full: Full, *, with_average: bool) -> None:
    path, model, optimizer = full
    net, average = Encoder(seed=2), Encoder(seed=3)
    own = torch.optim.AdamW(net.parameters())
    state: dict[str, Any] = {"net": net, "optim": own, "step": 0}
    if with_average:
        state["ema"] = average
    rules = {"model.": "net.", "optimizer.": "optim."}
    remesh.load(state, path, transform=rules, unexpected="ignore" if not with_average else "error")
    assert state["step"] == 2
    assert own.param_groups[0]["lr"] == 0.1
    assert same_next_step(model, optimizer, net, own)


def test_what_is_dropped_keeps_its_value(full: Full) -> None:
    path, model, _ = full
    net = Encoder(seed=2)
    before = net.head.weight.clone()
    transform = {"model.head.": None}
    report = remesh.load({"model": net}, path, transform=transform)
    assert torch.equal(net.head.weight, before)
    same = [model.get_parameter("body.0.weight"), net.get_parameter("body.0.weight")]
    assert torch.equal(*same)
    assert "model.head.weight" in report.kept


class Slots(nn.Module):
    """A model whose parameters are called like what optimizers keep of others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Module()
        parameters = {key: nn.Parameter(torch.rand(4)) for key in ("exp_avg", "step", "x")}
        self.inner.register_module(name, nn.ParameterDict(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * p**3 for p in self.parameters()])


@pytest.mark.parametrize("through", ["load", "convert"])
@pytest.mark.parametrize(
    ("key", "name", "transform"),
    [
        ("net", "w", {"model.": "net."}),
        ("model", "v", {"model.inner.w.": "model.inner.v."}),
        (
            "model",
            "v",
            [f"model.inner.w.{x} -> model.inner.v.{x}" for x in ("exp_avg", "step", "x")],
        ),
    ],
)
def test_parameters_called_like_slots_keep_their_moments(
    key: str, name: str, transform: Any, through: str, tmp_path: Path
) -> None:
    model = Slots("w")
    optimizer = trained(model, torch.optim.AdamW)
    remesh.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    net = Slots(name)
    own = torch.optim.AdamW(net.parameters(), lr=0.5)
    state = {key: net, "optimizer": own}
    if through == "convert":
        convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=transform)
        remesh.load(state, tmp_path / "b", unexpected="error")
    else:
        remesh.load(state, tmp_path / "a", transform=transform, unexpected="error")
    assert same_next_step(model, optimizer, net, own)


@pytest.mark.parametrize("transform", [{"ema.": "model."}, "ema.head.weight -> model.head.weight"])
def test_what_is_replaced_is_reported_as_not_loaded(full: Full, transform: Any) -> None:
    path, _, _ = full
    state = {"model": Encoder(seed=2)}
    report = remesh.load(state, path, transform=transform)
    stored = remesh.Checkpoint(path)
    weight = state["model"].head.weight.detach().numpy()
    assert np.array_equal(weight, stored["ema.head.weight"])
    assert report.renamed["model.head.weight"] == "ema.head.weight"
    assert "model.head.weight" in report.unexpected
    assert "ema.head.weight" not in report.unexpected
    assert ("model.head.bias" in report.unexpected) == ("model.head.bias" in report.renamed)


def test_names_that_collide_and_rules_that_are_none(full: Full) -> None:
    path, _, _ = full
    state = {"model": Encoder()}
    with pytest.raises(TransformError, match="both renamed to"):
        remesh.load(state, path, transform={"model.": "x.", "ema.": "x."})
    with pytest.raises(TransformError, match="is a prefix"):
        remesh.load(state, path, transform={"model.": "net"})
    with pytest.raises(TransformError, match="is no name"):
        remesh.load(state, path, transform=lambda _name: "")
    with pytest.raises(TransformError, match="call bind"):
        remesh.Transform({"model.": "net."}).reversed()


def test_a_rule_about_one_of_two_that_the_optimizer_may_belong_to(full: Full) -> None:
    path, model, optimizer = full
    net, average = Encoder("backbone", seed=2), Encoder(seed=3)
    own = torch.optim.AdamW(net.parameters())
    state = {"model": net, "ema": average, "optimizer": own}
    remesh.load(state, path, transform={"model.body.": "model.backbone."})
    assert same_next_step(model, optimizer, net, own)
    state["model"] = Encoder()
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())  # type: ignore[attr-defined]
    with pytest.raises(TransformError, match="owners="):
        remesh.load(state, path, transform={"model.head.": None})


def test_a_base_of_other_names_is_kept_and_told(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    """Fine-tuning: adapters are new to the checkpoint, its head has no place in the state."""
    path, model, _ = full
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    net["body"].register_parameter("lora_a", nn.Parameter(torch.ones(2, 4)))
    caplog.set_level("INFO", "remesh")
    report = remesh.load({"model": net}, path, missing="keep")
    assert report.missing == ("model.body.lora_a",)
    assert {"model.head.weight", "step"} <= set(report.unexpected)
    assert torch.equal(net.get_parameter("body.1.bias"), model.get_parameter("body.1.bias"))
    lines = report.table().splitlines()
    assert "missing     model.body.lora_a" in lines
    assert "restored    model.body.0.weight" in lines
    messages = [record.getMessage() for record in caplog.records]
    (summary,) = [message for message in messages if message.startswith("loaded ")]
    assert "4 restored, 1 missing" in summary
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_load_that_restores_nothing_warns(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    path, _, _ = full
    remesh.load({"module": Encoder()}, path, missing="keep")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no tensor is loaded" in warning
    assert "module.body.0.weight" in warning
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load({"model": Encoder(), "epoch": 0}, path)
    first, *rest = str(caught.value).splitlines()
    assert len(first) <= 100
    assert "1 name is not stored:" in rest
    assert "  epoch" in rest
    with pytest.raises(remesh.MismatchError, match="names are stored that no rank asks for"):
        remesh.load({"model": Encoder()}, path, unexpected="error")


def test_optimizer_state_that_is_left_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Encoder()
    optimizer = trained(model, torch.optim.AdamW)
    remesh.save({"model": model, "optimizer": optimizer}, tmp_path / "full")
    other = torch.optim.AdamW(model.get_submodule("body.0").parameters())
    with caplog.at_level("WARNING", "remesh"):
        remesh.load({"model": model, "optimizer": other}, tmp_path / "full", missing="keep")
    assert "9 entries of optimizer state" in caplog.text
    assert "optimizer.state.body.1.weight.exp_avg" in caplog.text
