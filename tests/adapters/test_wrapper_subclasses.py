"""Tensors that are made of other tensors are stored as these, and loaded into what is the same."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import nn

import remesh
from remesh.errors import MismatchError, NameCollisionError, UnsupportedValueError
from tests.adapters.stored import saved, transfer


class Rounding(enum.Enum):
    DOWN = 0
    UP = 1


@dataclass
class Options:
    bits: int = 8
    rounding: Rounding = Rounding.DOWN


class Sizes(NamedTuple):
    group: int


class Unknown:
    """Nothing that has a plain form."""


class Scaled(torch.Tensor):
    """Whole numbers times a scale."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: object

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: object = None) -> Self:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale, made.context = codes, scale, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, _size: Any, _stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach(), args[0].context)
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(str(func))


class Other(Scaled):
    """Of another class."""


def scaled(start: int = 0, scale: float = 0.5, context: object = None) -> Scaled:
    codes = torch.arange(start, start + 6, dtype=torch.int8).reshape(2, 3)
    return Scaled(codes, torch.tensor(scale), context)


def empty(context: object = None) -> Scaled:
    return Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.tensor(0.0), context)


def check_equal(found: Any, expected: Scaled) -> None:
    assert type(found) is type(expected)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)


class Keeps:
    """An object whose state dict has such a tensor."""

    def __init__(self, tensor: Scaled) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def module_with(tensor: Scaled) -> Any:
    module = nn.Module()
    module.w = nn.Parameter(tensor, requires_grad=False)
    module.register_buffer("b", scaled(9))
    return module


def test_inner_tensors_are_stored_under_names_of_their_own() -> None:
    checkpoint = remesh.Checkpoint(saved({"model": module_with(scaled())}))
    names = {"model.w.codes", "model.w.scale", "model.b.codes", "model.b.scale"}
    assert set(checkpoint.index) == names
    assert checkpoint.values["model.w.__tensor_flatten__"] == {
        "class": "tests.Scaled",
        "tensors": {"codes": "int8", "scale": "float32"},
        "context": None,
        "shape": [2, 3],
        "dtype": "torch.float32",
    }


def test_a_tensor_is_filled_in_place() -> None:
    target: dict[str, Any] = {"w": empty(), "list": [empty(), 5]}
    whole, item = target["w"], target["list"][0]
    transfer({"w": scaled(), "list": [scaled(4, 2.0), 7]}, target)
    assert target["w"] is whole
    assert target["list"][0] is item
    check_equal(whole, scaled())
    check_equal(item, scaled(4, 2.0))


def test_a_parameter_is_filled_in_place() -> None:
    target = module_with(empty())
    codes = target.w.codes
    transfer({"model": module_with(scaled())}, {"model": target})
    check_equal(target.w.data, scaled())
    assert target.w.codes is codes


def test_an_object_gets_a_tensor_of_the_same_class() -> None:
    target = Keeps(empty("c"))
    before = target.tensor
    transfer({"kept": Keeps(scaled(context="c"))}, {"kept": target})
    check_equal(target.tensor, scaled())
    check_equal(before, empty())  # what the object had is not written
    assert target.tensor.context == "c"


def test_tied_tensors_are_stored_once() -> None:
    def tied(tensor: Scaled) -> nn.Module:
        module = nn.Module()
        module.a = module.b = nn.Parameter(tensor, requires_grad=False)
        return module

    storage, target = saved({"model": tied(scaled())}), tied(empty())
    aliases = remesh.Checkpoint(storage).index.aliases
    assert aliases == {"model.b.codes": "model.a.codes", "model.b.scale": "model.a.scale"}
    remesh.load({"model": target}, storage)
    check_equal(target.b.data, scaled())


@pytest.mark.parametrize(
    "context",
    [
        {"bits": 4, "dtype": torch.int8, "device": torch.device("cpu")},
        [True, torch.Size([2, 3]), 0.5],
        Options(4),
        (Sizes(32), Rounding.UP, Unknown()),
    ],
)
def test_contexts_are_compared(context: Any) -> None:
    target = {"w": empty(context)}
    transfer({"w": scaled(context=context)}, target)
    check_equal(target["w"], scaled())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (Options(4), Options(8)),
        (Options(4, Rounding.UP), Options(4, Rounding.DOWN)),
        (Sizes(32), Sizes(64)),
        ({"bits": 4}, {"bits": 4, "signed": True}),
        (1, True),
        (Unknown(), Options()),
    ],
)
def test_another_context_is_refused(stored: Any, wanted: Any) -> None:
    target = empty(wanted)
    told = refused({"w": scaled(context=stored)}, {"w": target}, cast=True, missing="keep")
    assert re.fullmatch("w: context .* is stored, .* is wanted", told)
    check_equal(target, empty())


def refused(source: dict[str, Any], target: dict[str, Any], **options: Any) -> str:
    """The only conflict of a load."""
    with pytest.raises(MismatchError) as caught:
        transfer(source, target, **options)
    assert not caught.value.missing
    (told,) = caught.value.conflicts
    return told


def test_another_class_is_refused() -> None:
    target = Other(torch.zeros(2, 3, dtype=torch.int8), torch.tensor(0.0))
    told = refused({"w": scaled()}, {"w": target})
    assert told == "w: class tests.Scaled is stored, tests.Other is wanted"


def test_other_inner_dtypes_are_refused_also_with_cast() -> None:
    target = Scaled(torch.zeros(2, 3, dtype=torch.uint8), torch.tensor(0.0))
    told = refused({"w": scaled()}, {"w": target}, cast=True)
    assert told.startswith("w: tensors {'codes': 'int8', 'scale': 'float32'} is stored")


@pytest.mark.parametrize("missing", ["error", "keep"])
def test_a_plain_tensor_is_no_tensor_made_of_others(missing: str) -> None:
    plain, target = torch.ones(2, 3), empty()
    told = refused({"w": plain}, {"w": target}, missing=missing)
    assert told == "w: a plain tensor is stored, a tests.Scaled made of other tensors is wanted"
    check_equal(target, empty())
    told = refused({"w": scaled()}, {"w": plain}, missing=missing)
    assert told == "w: a tests.Scaled made of other tensors is stored, a plain tensor is wanted"
    kept = {"tensor": plain, "count": 3}
    told = refused({"kept": kept}, {"kept": Keeps(scaled())}, missing=missing)
    assert told.startswith("kept.tensor: a plain tensor is stored")


def test_without_the_class_the_inner_tensors_are_read() -> None:
    (found,) = remesh.Checkpoint(saved({"w": scaled()})).state().values()
    assert found["codes"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["__tensor_flatten__"]["class"] == "tests.Scaled"


def test_what_has_the_name_of_an_inner_tensor_is_refused() -> None:
    with pytest.raises(NameCollisionError, match=r"'w\.codes' is the stored name of two"):
        saved({"w": scaled(), "w.codes": torch.ones(1)})


def test_a_context_with_a_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match=r"(?s)w: the context .* holds a tensor"):
        saved({"w": scaled(context={"t": torch.ones(1)})})


def test_a_tensor_made_of_such_tensors() -> None:
    class Nested(Scaled):
        pass

    def nested(inner: Scaled) -> Nested:
        return Nested(inner, torch.tensor(1.0))

    target, storage = {"w": nested(empty())}, saved({"w": nested(scaled())})
    assert "w.codes.codes" in remesh.Checkpoint(storage).index
    remesh.load(target, storage)
    check_equal(target["w"].codes, scaled())


def test_a_nested_tensor_of_torch_is_refused() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UnsupportedValueError, match=r"w: a tensor of type torch\.nested"):
        saved({"w": ragged})
