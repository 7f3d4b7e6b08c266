"""Loading through a transformation: real modules and optimizers, shards, and only needed bytes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import remesh
from remesh.checkpoint import convert
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.engine.scenes import all_are, errors_of, saved_by, share_of
from tests.support import run_ranks

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 24
HEAD_DIM = DIM // HEADS


class Split(nn.Module):
    """Attention and MLP weights as separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        parts = [self.q(x), self.k(x), self.v(x), torch.sigmoid(self.gate(x)) * self.up(x)]
        return sum((part.square().mean() for part in parts), torch.zeros(()))


class Fused(nn.Module):
    """The same with one layer for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.gate_up = nn.Linear(DIM, 2 * HIDDEN, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        heads = self.qkv(x).unflatten(-1, (KV_HEADS, -1, HEAD_DIM))
        group = HEADS // KV_HEADS
        gate, up = self.gate_up(x).chunk(2, -1)
        parts = [heads[..., :group, :], heads[..., group, :], heads[..., group + 1, :]]
        losses = [part.square().mean() for part in [*parts, torch.sigmoid(gate) * up]]
        return sum(losses, torch.zeros(()))


FUSE = f"""
model.q.weight, model.k.weight, model.v.weight -> model.qkv.weight, \
fused_qkv, num_heads={HEADS}, num_key_value_groups={KV_HEADS}, axis=0
model.gate.weight, model.up.weight -> model.gate_up.weight, axis=0
"""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(8, DIM, generator=torch.Generator().manual_seed(step))
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def save_split(path: Path) -> list[float]:
    """Train and save a split model; the losses of the steps that follow."""
    torch.manual_seed(0)
    model = Split()
    optimizer = adamw(model)
    train(model, optimizer, range(5))
    remesh.save({"model": model, "optimizer": optimizer, "step": 5}, path)
    return train(model, optimizer, range(5, 12))


def test_fused_layers_and_their_optimizer_go_on_training(tmp_path: Path) -> None:
    expected = save_split(tmp_path)
    model = Fused()
    optimizer = adamw(model)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    report = remesh.load(
        state,
        tmp_path,
        transform=remesh.Transform(FUSE),
        unexpected="error",
    )
    assert state["step"] == 5
    assert len(optimizer.state) == 4
    assert "model.q.weight" in report.derived["model.qkv.weight"]
    assert train(model, optimizer, range(5, 12)) == pytest.approx(expected, rel=1e-5)


ROWS, COLUMNS = 600, 1024


@pytest.mark.parametrize("share_reads", [False, True])
@pytest.mark.parametrize("num_targets", [1, 2, 4])
def test_shards_of_a_fused_transposed_source(num_targets: int, share_reads: bool) -> None:
    a = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    b = -a
    storage = saved_by(
        3, lambda rank: {"a": share_of("a", a, rank, 3), "b": share_of("b", b, rank, 3)}
    )

    def load(exchange: Exchange) -> remesh.checkpoint.RestoreReport:
        expected = np.concatenate([a.T, b.T], axis=1)
        target = share_of("c", np.zeros_like(expected), exchange.rank, num_targets, 1)
        report = remesh.load(
            {"c": target},
            storage,
            group=exchange,
            transform=remesh.Transform("a^T, b^T -> c, axis=1"),
            unexpected="error",
            share_reads=share_reads,
        )
        part = target.parts[0]
        np.testing.assert_array_equal(part.data, expected[part.box.slices])
        return report

    reports = run_ranks(num_targets, load)
    assert sum(report.bytes_needed for report in reports) == a.nbytes + b.nbytes
    # A column of the target is a row of a source, so no rank reads what another one needs.
    for report in reports:
        assert report.bytes_read <= report.bytes_needed + (4 << 20)


def test_what_does_not_fit_is_found_on_all_ranks_and_changes_nothing() -> None:
    storage = MemoryStorage()
    remesh.save({"a": np.ones((4, 3)), "b": np.ones((4, 3))}, storage)

    def load(exchange: Exchange, text: str, name: str) -> None:
        target = np.zeros((8, 3))
        try:
            remesh.load({name: target}, storage, group=exchange, transform=remesh.Transform(text))
        finally:
            assert not target.any()

    for text, name, kind in (
        ("a, bb -> c, axis=0", "c", remesh.errors.TransformError),
        ("a, b -> c, axis=1", "c", remesh.errors.TransformError),
        ("a, b -> c, axis=0", "d", remesh.MismatchError),
    ):
        all_are(errors_of(2, load, text, name), kind)


def test_untouched_names_load_as_ever_and_added_ones_stay(tmp_path: Path) -> None:
    remesh.save({"a": np.ones(3), "b": np.full(2, 2.0), "n": 7}, tmp_path)
    state = {"x": np.zeros(3), "b": np.zeros(2), "n": 0, "new": np.full(2, 5.0)}
    report = remesh.load(
        state,
        tmp_path,
        transform=remesh.Transform("a -> x\n_ -> new"),
        unexpected="error",
    )
    assert state["x"].tolist() == [1, 1, 1]  # type: ignore[attr-defined]
    assert state["b"].tolist() == [2, 2]  # type: ignore[attr-defined]
    assert state["n"] == 7
    assert state["new"].tolist() == [5, 5]  # type: ignore[attr-defined]
    assert report.kept == ("new",)


# ---------------------------------------------------------------------------------------------
# Paths of names that a conversion has changed
# ---------------------------------------------------------------------------------------------


LAYERS = ("0.weight", "0.bias", "1.weight", "1.bias")
PREFIXES: dict[str, Any] = {
    "prefix": {"model.": "model.net."},
    "prefix of states as well": {"model.": "model.net.", "opt.state.": "opt.state.net."},
    "function": lambda name: name.replace("model.", "model.net."),
    "names": {f"model.{name}": f"model.net.{name}" for name in LAYERS},
    "text": "\n".join(f"model.{name} -> model.net.{name}" for name in LAYERS),
}
"""Ways to say that all parameters have a new prefix."""
KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1.0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
}


def two_layers(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    return model, KINDS[kind](model)


def save_two_layers(kind: str, source: str, place: Path) -> torch.optim.Optimizer:
    """Save a trained model and its optimizer; returns the optimizer."""
    model, optimizer = two_layers(kind, 0)
    model(torch.ones(3)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    if source == "native":
        remesh.save({"model": model, "opt": optimizer}, place)
    else:
        model_state, packed = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.save({"model": model_state, "opt": packed}, checkpoint_id=str(place))
    return optimizer


def check_same(optimizer: torch.optim.Optimizer, trained: torch.optim.Optimizer) -> None:
    found, wanted = optimizer.state_dict(), trained.state_dict()
    assert found["state"].keys() == wanted["state"].keys() == {0, 1, 2, 3}
    for number, entries in wanted["state"].items():
        assert found["state"][number].keys() == entries.keys()
        assert all(torch.equal(found["state"][number][key], entries[key]) for key in entries)
    assert found["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"] == 0.125


# A new prefix may also be a new place of the module: then names in the optimizer stay.
PLACES = [(way, "in a new place", "native") for way in PREFIXES if "states" not in way]
HOW = itertools.product(PREFIXES, ["loaded", "converted", "live"], ["native", "DCP"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "how", "source"), [*HOW, *PLACES])
def test_a_fresh_optimizer_finds_its_state_under_a_new_prefix(
    way: str, how: str, source: str, kind: str, tmp_path: Path
) -> None:
    transform, trained = PREFIXES[way], save_two_layers(kind, source, tmp_path / "a")
    inner, optimizer = two_layers(kind, 1)
    net = {"net": inner}
    state = {"model": net if how == "in a new place" else nn.ModuleDict(net), "opt": optimizer}
    if how == "converted":
        convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=transform)
        remesh.load(state, tmp_path / "b", unexpected="error")
    elif how == "live":
        outer, former = two_layers(kind, 0)
        held = {"model": outer, "opt": former}
        remesh.load(held, tmp_path / "a")
        remesh.reshard(held, state, transform=transform)
    else:
        remesh.load(state, tmp_path / "a", transform=transform, unexpected="error")
    check_same(optimizer, trained)


@pytest.mark.parametrize("source", ["native", "DCP"])
@pytest.mark.parametrize("entry", ["opt", "adam"])
def test_a_new_entry_and_a_new_prefix_in_its_module_at_once(
    entry: str, source: str, tmp_path: Path
) -> None:
    trained = save_two_layers("AdamW", source, tmp_path / "a")
    inner, optimizer = two_layers("AdamW", 1)
    state = {"gan": nn.ModuleDict({"net": inner}), entry: optimizer}
    renames = {"model.": "gan.net.", "opt.": f"{entry}."}
    remesh.load(state, tmp_path / "a", transform=renames, unexpected="error")
    check_same(optimizer, trained)


@pytest.mark.parametrize("stored", ["with an optimizer", "without one"])
def test_a_group_that_is_kept_beside_stored_state_is_told(
    stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = two_layers("AdamW", 0)
    save_two_layers("AdamW", "native", tmp_path / "a")
    if stored == "without one":
        remesh.save({"model": model}, tmp_path / "a", overwrite=True)
    state = {"model": nn.ModuleDict({"net": model}), "opt": optimizer}
    remesh.load(state, tmp_path / "a", missing="keep")
    told = [r.message for r in caplog.records if "stay as they are" in r.message]
    assert len(told) == (stored == "with an optimizer")
    assert all("1 groups of optimizers" in text and "transform=" in text for text in told)


NESTED: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "side by side": (lambda model, adam: {"model": model, "opt": adam}, "model."),
    "in an entry called state": (
        lambda model, adam: {"state": {"m": model, "o": adam}},
        "state.m.",
    ),
    "a model called state": (lambda model, adam: {"state": model, "o": adam}, "state."),
    "an optimizer called state": (lambda model, adam: {"m": model, "state": adam}, "m."),
}
"""Where a model and its optimizer are in a state, and the prefix of the model's names."""


@pytest.mark.parametrize("place", NESTED)
@pytest.mark.parametrize("how", ["loaded", "converted"])
def test_exchanged_parameters_are_in_the_groups_that_they_were_in(
    how: str, place: str, tmp_path: Path
) -> None:
    nest, prefix = NESTED[place]
    exchange = {f"{prefix}a": f"{prefix}b", f"{prefix}b": f"{prefix}a"}

    def job(first: str, second: str, *rates: float) -> tuple[Any, Any]:
        model = nn.ParameterDict({name: torch.rand(2) for name in ("a", "b")})
        pairs = zip((first, second), rates, strict=True)
        return model, torch.optim.AdamW([{"params": [model[n]], "lr": lr} for n, lr in pairs])

    source, trained = job("a", "b", 0.25, 0.5)
    (source["a"] * 3 + source["b"]).sum().backward()
    trained.step()
    remesh.save(nest(source, trained), tmp_path / "a")
    target, adam = job("b", "a", 1, 1)
    if how == "converted":
        convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=exchange)
        remesh.load(nest(target, adam), tmp_path / "b", unexpected="error")
    else:
        remesh.load(nest(target, adam), tmp_path / "a", transform=exchange, unexpected="error")
    assert [group["lr"] for group in adam.param_groups] == [0.25, 0.5]
    for one, other in (("a", "b"), ("b", "a")):
        assert torch.equal(target[one], source[other])
        expected = trained.state[source[other]]["exp_avg"]
        assert torch.equal(adam.state[target[one]]["exp_avg"], expected)


@pytest.mark.parametrize("how", ["loaded", "converted"])
def test_joined_parameters_without_state_are_in_the_group_of_their_parts(
    how: str, tmp_path: Path
) -> None:
    """Also if names of the optimizer end names of several parameters."""

    def job(*joined: str) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        inner = nn.ModuleDict({"norm": nn.Linear(2, 2, bias=False)})
        own = {name: nn.Linear(2, 4 // len(joined), bias=False) for name in joined}
        model = nn.ModuleDict({**own, "norm": nn.Linear(2, 2, bias=False), "inner": inner})
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        groups: list[dict[str, Any]] = [
            {"params": [own[name].weight for name in joined]},
            {"params": norms, "lr": 0.25},
        ]
        return model, torch.optim.SGD(groups, lr=0.5)

    source, sgd = job("q", "k")
    remesh.save({"model": source, "optimizer": sgd}, tmp_path / "a")
    program: Any = "model.q.weight, model.k.weight -> model.qk.weight, axis=0"
    if how == "converted":
        convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=program)
    target, loaded = job("qk")
    for group in loaded.param_groups:
        group["lr"] = 9.0
    place, again = (tmp_path / "b", None) if how == "converted" else (tmp_path / "a", program)
    remesh.load({"model": target, "optimizer": loaded}, place, transform=again)
    assert [group["lr"] for group in loaded.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("program", ["w -> x, y, axis=0", "w -> x  w^T -> y", "w -> x  v -> y"])
def test_a_tied_weight_is_made_of_the_same_elements_under_each_name(
    program: str, tmp_path: Path
) -> None:
    size = 4 if "axis" in program else 2
    remesh.save({"w": torch.rand(size, 2), "v": torch.rand(2, 2)}, tmp_path)
    tied = nn.ParameterDict({"x": torch.zeros(2, 2)})
    tied["y"] = tied["x"]
    with pytest.raises(remesh.MismatchError, match="x and y are tied in the state, but made of"):
        remesh.load(tied, tmp_path, transform=program)
    remesh.load(tied, tmp_path, transform="v -> x, y, untie")
    assert torch.equal(tied["x"], remesh.Checkpoint(tmp_path)["v"])
    remesh.save(tied, tmp_path / "tied")
    target = nn.ParameterDict({"x": torch.zeros(2, 2)})
    target["y"] = target["x"]
    remesh.load({"net": target}, tmp_path / "tied", transform={"x": "net.x", "y": "net.y"})
    assert torch.equal(target["x"], tied["x"])
