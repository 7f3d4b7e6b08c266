from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from remesh.adapters import describe_leaf
from remesh.core.sharded import LocalNonpersistentObject
from remesh.core.state import describe
from remesh.errors import UnsupportedValueError
from tests.adapters.fake_checkpoint import FakeCheckpoint, Restored, capture, restore

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


def transfer(source: Any, target: Any) -> Restored:
    return restore(target, FakeCheckpoint([capture(source)]))


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"epoch": 3, "name": "train"},
        {"buffers": [torch.ones(2), torch.zeros(3)], "seen": {"a": 1, "b": torch.tensor(5)}},
        {"workers": [{"rng": torch.arange(3), "shard": (1, 2)}, {"rng": None, "shard": ()}]},
        {"deep": {"empty": {}, "list": [], "pair": (torch.ones(1), [torch.ones(2), {}])}},
        {3: "three", "four": {4: torch.tensor(4.0)}},
    ],
)
@pytest.mark.parametrize(
    "live",
    [
        {},
        {"epoch": torch.zeros(2), "deep": 0, "workers": None},
        {"buffers": [torch.zeros(2)] * 5, "seen": {"a": {"x": torch.ones(1)}}},
        {"workers": [{"rng": torch.zeros(3)}] * 3, "deep": {"pair": torch.ones(1)}},
    ],
)
def test_the_checkpoint_decides_what_there_is(saved: Any, live: Any) -> None:
    target = Box(live)
    result = transfer({"loader": Box(saved)}, {"loader": target})
    assert plain(target.state) == plain(merged(saved, live))
    assert result.unexpected == set()
    assert result.state["loader"] is target
    assert target.loads == 1


def merged(saved: Any, live: Any) -> Any:
    """What was saved, and what is live where nothing was."""
    if not (isinstance(saved, dict) and isinstance(live, dict) and saved):
        return saved
    kept = {key: value for key, value in live.items() if key not in saved}
    return kept | {key: merged(value, live.get(key)) for key, value in saved.items()}


def plain(node: Any) -> Any:
    """A state with tensors as lists."""
    if isinstance(node, dict):
        return {key: plain(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(plain, node))
    return ["tensor", node.tolist()] if isinstance(node, torch.Tensor) else node


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


def test_tensors_without_a_template_are_whole_and_keep_their_dtype() -> None:
    target = Box({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(7)})
    saved = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.int8)}
    transfer({"x": Box(saved)}, {"x": target})
    assert str(target.state) == str(saved)


def test_containers_keep_their_types() -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "milestones": Counter({30: number, 60: 2}),
            "ordered": OrderedDict(a=torch.tensor(number), b=1),
            "default": defaultdict(list, {"x": [number]}),
            "point": Point(torch.tensor(number), 2),
        }

    target = Box(state(0))
    result = transfer({"x": Box(state(5))}, {"x": target})
    assert result.missing == result.unexpected == set()
    assert target.state == state(5)
    assert [type(value) for value in target.state.values()] == [
        Counter,
        OrderedDict,
        defaultdict,
        Point,
    ]


def test_missing_and_unexpected_leaves() -> None:
    target = Box({"a": 1, "new": {"b": torch.ones(2), "c": 3}})
    result = transfer({"x": Box({"a": 2, "old": 4})}, {"x": target})
    assert result.missing == {"x.new.b", "x.new.c"}
    assert result.unexpected == set()
    assert target.state["a"] == 2
    assert target.state["old"] == 4
    assert target.state["new"] == {"b": target.state["new"]["b"], "c": 3}


def test_a_state_that_is_itself_stateful() -> None:
    target = Box({"a": 0})
    assert transfer(Box({"a": [1, torch.ones(2)]}), target).state is target
    assert str(target.state) == str({"a": [1, torch.ones(2)]})


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 3),
        lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lr_scheduler.ReduceLROnPlateau,
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[2],
        ),
    ],
)
def test_schedulers(make: Any) -> None:
    def job() -> tuple[dict[str, Any], Any]:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
        scheduler = make(optimizer)
        return {"m": module, "o": optimizer, "s": scheduler}, scheduler

    def go(scheduler: Any) -> list[float]:
        rates = []
        for step in range(4):
            scheduler.optimizer.step()
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(step)] if plateau else []))
            rates.append(scheduler.optimizer.param_groups[0]["lr"])
        return rates

    (source, theirs), (target, mine) = job(), job()
    go(theirs)
    result = transfer(source, target)
    assert result.missing == result.unexpected == set()
    assert mine.state_dict() == theirs.state_dict()
    assert go(mine) == go(theirs)


def test_gradient_scaler() -> None:
    source, target = (torch.amp.GradScaler("cpu", init_scale=2.0**n) for n in (3, 5))
    transfer({"scaler": source}, {"scaler": target})
    assert target.get_scale() == 8.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert transfer({"scaler": off}, {"scaler": off}).missing == set()


def test_generators() -> None:
    source, target = torch.Generator(), torch.Generator()
    source.manual_seed(7)
    torch.rand(5, generator=source)
    state = {"rng": target}
    assert transfer({"rng": source}, state).state["rng"] is target
    assert torch.equal(torch.rand(9, generator=target), torch.rand(9, generator=source))


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
