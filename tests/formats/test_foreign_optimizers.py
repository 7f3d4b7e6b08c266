"""Optimizers that others stored, by numbers or flattened, get the names of their parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

import remesh
from remesh.checkpoint import convert
from remesh.errors import MismatchError, StateError
from tests.matrix.writers import App

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def job(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model, optimizer = job(0)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def stored_by(kind: str, folder: Path) -> str:
    """A checkpoint of a trained job, as other programs write it."""
    model, optimizer = trained()
    place, packed = str(folder / kind), optimizer.state_dict()
    if kind == "torch.save":
        torch.save({"model": model.state_dict(), "opt": packed}, f"{place}.pt")
        return f"{place}.pt"
    if kind == "flattened":
        packed = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"model": model.state_dict(), "opt": packed}, checkpoint_id=place)
    return place


def check_trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected, moments = trained()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
        state, wanted = optimizer.state[parameter], moments.state[other]
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("missing", ["error", "keep"])
@pytest.mark.parametrize("kind", ["torch.save", "numbered", "flattened"])
def test_no_way_of_loading_loses_the_moments(kind: str, missing: Any, tmp_path: Path) -> None:
    place = stored_by(kind, tmp_path)
    model, optimizer = job(1)
    remesh.load({"model": model, "opt": optimizer}, place, missing=missing, unexpected="error")
    check_trained(model, optimizer)


class Factored(torch.optim.SGD):
    """An optimizer that keeps lists and tuples, as LBFGS, SOAP and Shampoo do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state, shape = self.state[parameter], parameter.shape
            rows = [torch.full((extent, extent), 2.0) for extent in shape]
            state.setdefault("factors", rows)[0].mul_(3)
            state.setdefault("pairs", [(torch.ones(2), None), (torch.ones(1), 5)])[1][0].mul_(2)
            state.setdefault("order", [*range(len(shape))])
            assert type(state["factors"]) is type(state["order"]) is list
        return super().step(closure)


def factored() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    return model, Factored(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["torch.save", "converted", "numbered", "native"])
def test_lists_in_a_state_stay_lists(kind: str, tmp_path: Path) -> None:
    model, optimizer = factored()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    place = str(tmp_path / kind)
    if kind == "native":
        remesh.save({"model": model, "opt": optimizer}, place)
    elif kind == "numbered":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.save(state, checkpoint_id=place)
    else:
        torch.save(state, tmp_path / "a.pt")
        if kind == "converted":
            convert(tmp_path / "a.pt", place, format="remesh")
        else:
            place = str(tmp_path / "a.pt")
    fresh, again = factored()
    remesh.load({"model": fresh, "opt": again}, place, unexpected="error")
    assert str(again.state_dict()) == str(optimizer.state_dict())
    fresh(torch.ones(3)).sum().backward()
    again.step()


def schedulers() -> list[Any]:
    _, optimizer = job(0)
    kinds = torch.optim.lr_scheduler
    return [kinds.StepLR(optimizer, 3), kinds.MultiStepLR(optimizer, [2, 5]), {"a": [1]}, None]


@pytest.mark.parametrize("transform", [None, {"model.": "net."}])
@pytest.mark.parametrize("kind", ["torch.save", "native"])
def test_objects_in_a_list_load_items_of_a_plain_one(
    kind: str, transform: Any, tmp_path: Path
) -> None:
    step, several, *_ = schedulers()
    several.last_epoch = step.last_epoch = 4
    model = torch.nn.Linear(3, 2)
    plain = [step.state_dict(), several.state_dict(), {"a": [7, 8]}, 9]
    state = {"model": model.state_dict(), "all": plain, "pair": ([step.state_dict()], 1)}
    place = tmp_path / "a.pt"
    if kind == "native":
        remesh.save(state, place)
    else:
        torch.save(state, place)
    target: dict[str, Any] = {"all": schedulers(), "pair": (schedulers()[:1], 0)}
    target["model" if transform is None else "net"] = torch.nn.Linear(3, 2)
    remesh.load(target, place, transform=transform, unexpected="error")
    first, second, *rest = target["all"]
    assert (first.state_dict(), second.state_dict()) == (plain[0], plain[1])
    assert rest == [{"a": [7, 8]}, 9]
    assert target["pair"][0][0].state_dict() == plain[0]
    assert target["pair"][1] == 1
    # What no object of the state takes is told.
    with pytest.raises(MismatchError) as caught:
        remesh.load({"all": schedulers()[:1]}, place, unexpected="error")
    assert set(caught.value.unexpected) >= {"all", "pair"}
    with pytest.raises(MismatchError, match=r"all\.4\.step_size"):
        remesh.load({"all": [*schedulers(), schedulers()[0]]}, place)


@pytest.mark.parametrize("kind", ["torch.save", "flattened"])
def test_state_without_a_name_does_not_get_lost_in_a_transformation(
    kind: str, tmp_path: Path
) -> None:
    place = stored_by(kind, tmp_path)
    model, optimizer = job(1)
    renames: Any = {"model.weight": "model.0.weight", "model.bias": "model.0.bias"}
    state = {"model": torch.nn.Sequential(model), "opt": optimizer}
    with pytest.raises(remesh.MismatchError, match=r"opt: the transformation makes 0\.weight"):
        remesh.load(state, place, transform=renames, missing="keep")
    assert not optimizer.state


def both_groups(model: torch.nn.Linear) -> torch.optim.Optimizer:
    groups: Any = [{"params": [model.weight]}, {"params": [model.bias]}]
    return torch.optim.AdamW(groups)


def test_numbers_need_the_groups_that_were_saved(tmp_path: Path) -> None:
    place = stored_by("torch.save", tmp_path)
    model, _ = job(1)
    before = model.weight.detach().clone()
    reverse: Any = [model.bias, model.weight]
    others: dict[str, torch.optim.Optimizer] = {
        "one group of 2 parameters, the optimizer of the state has groups of 1 and 1": (
            both_groups(model)
        ),
        r"its parameter 0 has exp_avg of shape \(2, 3\), bias has \(2,\)": (
            torch.optim.AdamW(reverse)
        ),
    }
    for problem, optimizer in others.items():
        with pytest.raises(remesh.MismatchError, match=problem) as caught:
            remesh.load({"model": model, "opt": optimizer}, place, missing="keep")
        assert len(str(caught.value).splitlines()[0]) <= 100 + len(place)
        assert torch.equal(model.weight, before)
        assert not optimizer.state
    groups = {"opt": {"state": {}, "param_groups": [1]}}
    torch.save({"model": model.state_dict(), **groups}, tmp_path / "groups.pt")
    with pytest.raises(remesh.MismatchError, match="groups of parameters are not a list of dicts"):
        remesh.load({"model": model, "opt": optimizer}, tmp_path / "groups.pt")
    # Without its model an optimizer has no names for them.
    with pytest.raises(StateError, match="Put its module into the state"):
        remesh.load({"opt": job(1)[1]}, place)
    # Names that the saved optimizer knew are worth more than an order.
    model, optimizer = trained()
    pairs: Any = [("bias", model.bias), ("weight", model.weight)]
    named = torch.optim.AdamW(pairs, lr=0.1)
    named.load_state_dict(
        {
            "state": {n: optimizer.state[p] for n, p in enumerate([model.bias, model.weight])},
            "param_groups": named.state_dict()["param_groups"],
        }
    )
    torch.save({"model": model.state_dict(), "opt": named.state_dict()}, place)
    other, fresh = job(1)
    remesh.load({"model": other, "opt": fresh}, place)
    check_trained(other, fresh)


def test_flattened_options_of_a_group_must_agree(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = both_groups(model)
    optimizer.param_groups[1]["lr"] = 0.5
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    packed = get_optimizer_state_dict(model, optimizer, options=FLAT)
    torch.save({"model": model.state_dict(), "opt": packed}, tmp_path / "x.pt")
    other, one_group = job(1)
    with pytest.raises(remesh.MismatchError, match=r"(?s)weight\.lr and .*bias\.lr differ"):
        remesh.load({"model": other, "opt": one_group}, tmp_path / "x.pt")
    groups = both_groups(other)
    remesh.load({"model": other, "opt": groups}, tmp_path / "x.pt")
    assert [group["lr"] for group in groups.param_groups] == [0.001, 0.5]


def test_a_stateful_object_gets_back_what_it_gave(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"app": App(*trained())}, checkpoint_id=tmp_path / "x")
    model, optimizer = job(1)
    remesh.load({"app": App(model, optimizer)}, tmp_path / "x")
    check_trained(model, optimizer)


def test_what_keeping_means_for_parameters_that_are_new_is_said(tmp_path: Path) -> None:
    model, optimizer = trained()
    remesh.save({"model": model, "opt": optimizer}, tmp_path / "c")
    other = torch.nn.Sequential(job(1)[0])
    state = {"model": other, "opt": torch.optim.AdamW(other.parameters())}
    with pytest.raises(remesh.MismatchError, match="begin without its state") as caught:
        remesh.load(state, tmp_path / "c")
    assert "transform=" in str(caught.value)
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load({"a": 1}, tmp_path / "c")
    assert "begin without" not in str(caught.value)
