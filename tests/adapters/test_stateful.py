from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.adapters import describe_leaf
from remesh.core.sharded import LocalNonpersistentObject
from remesh.core.state import describe
from remesh.errors import UnsupportedValueError
from tests.adapters.stored import transfer

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - what old code uses


class Box:
    """Keeps any state."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def test_live_memory_is_not_touched() -> None:
    live: dict[str, Any] = {"a": torch.zeros(3), "b": np.zeros(2), "c": [torch.zeros(1)]}
    target = Box(live)
    transfer({"x": Box({"a": torch.ones(3), "b": np.ones(2), "c": [torch.ones(1)]})}, {"x": target})
    assert live["a"].tolist() == [0, 0, 0]
    assert live["b"].tolist() == [0, 0]
    assert live["c"][0].tolist() == [0]
    assert target.state["a"].tolist() == [1, 1, 1]
    assert isinstance(target.state["b"], np.ndarray)
    assert target.state["b"].tolist() == [1, 1]
    assert target.state["c"][0].tolist() == [1]


def test_containers_keep_their_types() -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "milestones": Counter({30: number, 60: 2}),
            "ordered": OrderedDict(a=torch.tensor(number), b=1),
            "default": defaultdict(list, {"x": [number]}),
            "point": Point(torch.tensor(number), 2),
        }

    target = Box(state(0))
    transfer({"x": Box(state(5))}, {"x": target})
    assert target.state == state(5)
    assert {name: type(value) for name, value in target.state.items()} == {
        "milestones": Counter,
        "ordered": OrderedDict,
        "default": defaultdict,
        "point": Point,
    }


def test_a_state_that_is_itself_stateful() -> None:
    target = Box({"a": 0})
    transfer(Box({"a": [1, torch.ones(2)]}), target)
    assert str(target.state) == str({"a": [1, torch.ones(2)]})


def test_what_has_no_encoding_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"loader\.dataset\.file"):
        describe({"loader": Box({"dataset": {"file": object()}})}, describe_leaf)
    with pytest.raises(UnsupportedValueError, match=r"(?s)loader\.mask: .*to_dense"):
        describe({"loader": Box({"mask": torch.eye(2).to_sparse()})}, describe_leaf)


def test_classes_and_wrapped_objects_are_not_stateful() -> None:
    wrapped = LocalNonpersistentObject(Box({"a": object()}))
    description = describe({"x": wrapped, "y": 1}, describe_leaf)
    assert description.values == {"y": 1}
    with pytest.raises(UnsupportedValueError, match="x: "):
        describe({"x": Box}, describe_leaf)


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    remesh.save({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, tmp_path / "c")
    state = {"scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(RuntimeError, match="disabled instance of GradScaler") as raised:
        remesh.load(state, tmp_path / "c")
    assert "scaler: GradScaler refuses what is stored for it" in raised.value.__notes__
