"""What may be given as a transformation: texts, dicts of renames, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh import Transform
from remesh.errors import TransformError


@pytest.mark.parametrize(
    ("renames", "text"),
    [
        ({"a": "b", "c": "d"}, "a -> b\nc -> d"),
        ({"a-b": "12", "it's": "_"}, "'a-b' -> '12'\n\"it's\" -> '_'"),
        ({"a[0:2]": "b^T"}, "'a[0:2]' -> 'b^T'"),
        ({"a": "b", "b": "c"}, "b -> _renamed.b\na -> b\n_renamed.b -> c"),
        ({"a.0": "a.0", "a.1": "b.1"}, "a.0 -> a.0\na.1 -> b.1"),
        ({}, ""),
    ],
)
def test_renames_as_statements(renames: dict[str, str], text: str) -> None:
    assert str(Transform(renames)) == text


def test_swapped_names_come_back() -> None:
    swap = Transform({"a": "b", "b": "a"})
    state = {"a": np.zeros(2), "b": np.ones(2), "a.exp_avg": np.zeros(2), "b.exp_avg": np.ones(2)}
    targets = {name: np.empty(2) for name in state}
    there = swap.apply(state, targets)
    assert {name: array[0] for name, array in there.items()} == {
        "a": 1,
        "b": 0,
        "a.exp_avg": 1,
        "b.exp_avg": 0,
    }
    back = swap.reversed().apply(there, {name: np.empty(2) for name in state})
    assert all(np.array_equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (7, "statements as text, or a dict of renames\nThis is of type int"),
        (b"a -> b", "This is of type bytes"),
        (["a -> b", 7], "a list of statements holds texts; 7 is of type int"),
        ({"a": 7}, "It holds names or prefixes"),
        ({re.compile("a"): "b"}, "lambda name: pattern.sub(new, name)"),
        ({"a": "c", "b": "c"}, "'a' and 'b' are both renamed to 'c'"),
        ({"a\"'": "b"}, "cannot be renamed: it holds both kinds of quotes"),
        ({"a": ""}, "a name cannot be empty"),
        ({"": "b"}, "write '': 'b.'"),
        ({"a.": None, "b.$N": "c.$N"}, "'b.$N' has a wildcard, and a dict of renames has none"),
        ({"a": "b.*.w"}, "Write a statement or a function instead"),
    ],
)
def test_anything_else_is_refused(program: Any, says: str) -> None:
    with pytest.raises(TransformError) as caught:
        Transform(program)
    assert says in str(caught.value)


GIVEN: list[Any] = [Transform("a -> b"), "a -> b", ["a -> b"], {"a": "b"}]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_load_reshard_and_resume_take_what_makes_a_transformation(
    given: Any, tmp_path: Path
) -> None:
    source = {"a": torch.arange(3)}
    remesh.save(source, tmp_path / "saved")
    with remesh.Manager(tmp_path / "run") as manager:
        manager.save(1, source)

    def resume(state: Any) -> None:
        with remesh.Manager(tmp_path / "run") as manager:
            assert manager.resume(state, transform=given)

    ways: list[Callable[[Any], object]] = [
        lambda state: remesh.load(state, tmp_path / "saved", transform=given),
        lambda state: remesh.reshard(source, state, transform=given),
        lambda state: remesh.Resharder(source, state, transform=given).push(),
        resume,
    ]
    for way in ways:
        state = {"b": torch.zeros(3, dtype=torch.int64)}
        way(state)
        assert state["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("given", "says"), [(7, "of type int"), ("a ->", "the text ends")])
def test_what_is_malformed_is_refused_before_anything_is_done(
    given: Any, says: str, tmp_path: Path
) -> None:
    state = {"b": torch.zeros(3)}
    with pytest.raises(TransformError, match=says):
        remesh.load(state, tmp_path / "nothing is here", transform=given)
    with pytest.raises(TransformError, match=says):
        remesh.reshard({}, state, transform=given)
    with pytest.raises(TransformError, match=says):
        remesh.Resharder({}, state, transform=given)
    with remesh.Manager(tmp_path / "run") as manager, pytest.raises(TransformError, match=says):
        manager.resume(state, transform=given)
