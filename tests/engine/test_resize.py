"""Tensors that are declared to have another size than what is stored, with their moments."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remesh
from remesh import ShardedTensor
from remesh.sharding import Box, LocalNonpersistentObject, Part

OLD, DIM = 6, 4
INITIAL = 9.0
"""What an element is before a load."""


class Declared(nn.Module):
    """A module that describes its parameter by itself, in some boxes."""

    def __init__(self, rows: int, *, is_allowed: bool = True, num_boxes: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, DIM), INITIAL))
        self.is_allowed = is_allowed
        self.bounds = [0, 2, rows] if num_boxes == 2 else [0, rows]

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        name, rows = f"{prefix}weight", len(self.weight)
        parts = tuple(
            Part(Box((start, 0), (stop - start, DIM)), self.weight.detach()[start:stop])
            for start, stop in pairwise(self.bounds)
        )
        allowed = self.is_allowed
        return {name: ShardedTensor(name, (rows, DIM), parts, None, allow_shape_mismatch=allowed)}


def optimized(rows: int, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    module = Declared(rows, **options)
    return {"model": module, "optimizer": kind(module.parameters(), lr=0.1)}


def trained(rows: int, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    state = optimized(rows, kind, **options)
    state["model"].weight.data.copy_(torch.arange(rows * DIM).reshape(rows, DIM))
    state["model"].weight.square().sum().backward()
    state["optimizer"].step()
    return state


def moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["optimizer"].state[state["model"].weight]
    return found


def resized(before: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([before, torch.zeros(max(rows - OLD, 0), *before.shape[1:])])[:rows]


@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("rows", [4, 6, 9])
def test_a_parameter_and_its_moments(rows: int, has_moments: bool, tmp_path: Path) -> None:
    source = trained(OLD)
    remesh.save(source, tmp_path)
    state = trained(rows) if has_moments else optimized(rows)
    moment = moments(state).get("exp_avg")
    report = remesh.load(state, tmp_path)
    assert torch.equal(state["model"].weight, resized(source["model"].weight, rows))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(moments(state)[key], resized(moments(source)[key], rows))
    assert not has_moments or moments(state)["exp_avg"] is moment
    names = {"model.weight"} | {f"optimizer.state.weight.{k}" for k in ("exp_avg", "exp_avg_sq")}
    assert set(report.resized) == (set() if rows == OLD else names)
    state["model"].weight.square().sum().backward()
    state["optimizer"].step()
    assert moments(state)["step"].item() == 2


def test_factored_moments_follow_in_the_dims_that_they_have(tmp_path: Path) -> None:
    source = trained(OLD, torch.optim.Adafactor, num_boxes=1)
    remesh.save(source, tmp_path)
    grown = optimized(9, torch.optim.Adafactor, num_boxes=1)
    remesh.load(grown, tmp_path)
    before, now = moments(source), moments(grown)
    assert torch.equal(now["row_var"], resized(before["row_var"], 9))
    assert torch.equal(now["col_var"], before["col_var"])


def test_state_along_a_dim_that_stays_is_loaded(tmp_path: Path) -> None:
    source = trained(OLD, num_boxes=1)
    moments(source)["factor"] = torch.arange(4.0)
    remesh.save(source, tmp_path)
    grown = optimized(9, num_boxes=1)
    remesh.load(grown, tmp_path)
    assert moments(grown)["factor"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(OLD, OLD), (OLD,)])
def test_state_of_another_form_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = trained(OLD, num_boxes=1)
    moments(source)["factor"] = torch.ones(shape)
    remesh.save(source, tmp_path)
    state = optimized(9, num_boxes=1)
    with pytest.raises(remesh.MismatchError, match="factor: state of shape") as caught:
        remesh.load(state, tmp_path)
    assert len(caught.value.conflicts) == 1
    assert not state["optimizer"].state
    remesh.load({"model": state["model"]}, tmp_path)


def test_any_dim_may_differ(tmp_path: Path) -> None:
    remesh.save({"w": ShardedTensor.whole("w", torch.ones(2, 3))}, tmp_path)
    data = torch.full((3, 2), INITIAL)
    remesh.load([ShardedTensor.whole("w", data, allow_shape_mismatch=True)], tmp_path)
    assert data.tolist() == [[1, 1], [1, 1], [0, 0]]
    flat = ShardedTensor.whole("w", torch.ones(6), allow_shape_mismatch=True)
    with pytest.raises(remesh.MismatchError, match=r"\(2, 3\) is stored, \(6,\) is wanted"):
        remesh.load([flat], tmp_path)


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    remesh.save(trained(OLD), tmp_path)
    state = optimized(9, is_allowed=False)
    with pytest.raises(remesh.MismatchError, match="change its size afterwards"):
        remesh.load(state, tmp_path)
    # Without its parameter among what is loaded, state is not resized either.
    alone = {**trained(9), "model": LocalNonpersistentObject(state["model"])}
    alone["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    with pytest.raises(remesh.MismatchError, match="exp_avg: shape"):
        remesh.load(alone, tmp_path)
    assert state["model"].weight.eq(INITIAL).all()
    assert not state["optimizer"].state


def test_what_a_transformation_makes_is_not_resized(tmp_path: Path) -> None:
    remesh.save(trained(OLD), tmp_path)
    state = optimized(9)
    for statement in ("model.weight -> net.weight", {"model.": "net."}):
        with pytest.raises(remesh.RemeshError, match=r"\(9, 4\)"):
            remesh.load({"net": state["model"]}, tmp_path, transform=statement, missing="keep")
    assert state["model"].weight.eq(INITIAL).all()
