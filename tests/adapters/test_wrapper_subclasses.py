"""Tensors that are made of other tensors are refused by their type and by what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import remesh
from remesh.errors import UnsupportedValueError


class Scaled(torch.Tensor):
    """Whole numbers times a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _context: Any, _size: Any, _stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach())
        raise NotImplementedError(str(func))


def scaled() -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor(0.5))


def states() -> dict[str, Any]:
    module = nn.Module()
    module.w = nn.Parameter(scaled(), requires_grad=False)
    plain = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.state[plain.weight] = {"step": torch.tensor(1.0), "exp_avg": scaled()}
    return {
        "w": {"w": scaled()},
        "model.w": {"model": module},
        "optimizer.state.weight.exp_avg": {"model": plain, "optimizer": optimizer},
    }


PROBLEM = r"a tensor of type .*Scaled keeps .* other tensors \(codes, scale\); put those"


@pytest.mark.parametrize("name", list(states()))
def test_a_tensor_made_of_others_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert is_traceable_wrapper_subclass(scaled())
    with pytest.raises(UnsupportedValueError, match=PROBLEM) as caught:
        remesh.save(states()[name], tmp_path / "c")
    assert str(caught.value).partition(": ")[0].endswith(name.rpartition(".")[2])
    assert not (tmp_path / "c" / "remesh.json").exists()


@pytest.mark.parametrize("name", ["w", "model.w"])
def test_nothing_is_loaded_into_a_tensor_made_of_others(name: str, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"w": torch.ones(2, 3)}
    remesh.save(plain if name == "w" else {"model": plain}, tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=PROBLEM):
        remesh.load(states()[name], tmp_path / "c")


def test_its_inner_tensors_are_stored(tmp_path: Path) -> None:
    source, target = scaled(), Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.tensor(0.0))
    for tensor, act in ((source, remesh.save), (target, remesh.load)):
        act({"codes": tensor.codes, "scale": tensor.scale}, tmp_path / "c")
    assert torch.equal(target.codes, source.codes)
    assert torch.equal(target.scale, source.scale)
