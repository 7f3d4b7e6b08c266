"""Optimizers that others stored: refused if they cannot be matched; what the error says works."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import remesh

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
        dcp.save({"model": model.state_dict(), "opt": packed}, checkpoint_id=place)  # type: ignore[attr-defined]
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
    before = model.weight.detach().clone()
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load({"model": model, "opt": optimizer}, place, missing=missing)
    text = str(caught.value)
    assert "keep" not in text
    assert len(text.splitlines()[0]) <= 100
    assert text.startswith("opt: the checkpoint ")
    assert torch.equal(model.weight, before)
    # What the error says, word for word.
    state: dict[str, Any] = {"model": model}
    advice = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    if kind != "flattened":
        remesh.load(state, place)
    names = {
        **vars(state_dict),
        "model": model,
        "optimizer": optimizer,
        "state": state,
        "path": place,
        "remesh": remesh,
    }
    exec("\n".join(advice), names)
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
