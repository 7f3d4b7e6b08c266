"""A checkpoint behaves like a dict of what is stored, and is read without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import remesh
from remesh.checkpoint import convert
from remesh.sharding import ShardedObject


@pytest.fixture
def checkpoint(tmp_path: Path) -> remesh.Checkpoint:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = {
        "model": model,
        "optimizer": optimizer,
        "step": 7,
        "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
    }
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    remesh.save(state, tmp_path / "checkpoint")
    return remesh.Checkpoint(tmp_path / "checkpoint")


def test_names_are_those_of_everything_that_is_stored(checkpoint: remesh.Checkpoint) -> None:
    names = [*checkpoint.index, *checkpoint.values, *checkpoint.lists, *checkpoint.objects]
    assert list(checkpoint) == list(checkpoint.keys()) == names
    assert len(checkpoint) == len(names)
    assert {"model.weight", "step"} <= checkpoint.keys()
    assert all(name in checkpoint for name in names)
    assert "model" not in checkpoint
    assert 1 not in checkpoint


def test_items_are_what_is_stored(checkpoint: remesh.Checkpoint) -> None:
    assert torch.equal(checkpoint["model.weight"], checkpoint.read("model.weight"))
    assert checkpoint["step"] == 7
    everything = dict(checkpoint)
    assert everything.keys() == checkpoint.keys()
    for kind in (checkpoint.values, checkpoint.lists, checkpoint.objects):
        assert kind
        assert all(everything[name] == value for name, value in kind.items())


def test_patterns(tmp_path: Path) -> None:
    state = {"m": {"w": torch.ones(5), "h": torch.ones(2)}, "n": 1}
    remesh.save(state, tmp_path / "c")
    checkpoint = remesh.Checkpoint(tmp_path / "c")
    assert checkpoint.names("m.*") == ["m.w", "m.h"]
    assert list(checkpoint.state("m.w")["m"]) == ["w"]


def test_an_item_of_a_list_keeps_its_number(tmp_path: Path) -> None:
    remesh.save({"a": [torch.zeros(1), (torch.ones(1), 2)]}, tmp_path / "c")
    checkpoint = remesh.Checkpoint(tmp_path / "c")
    second = {"a": {1: (torch.ones(1), 2)}}
    assert checkpoint.state("a.1*") == second
    convert(tmp_path / "c", tmp_path / "second", format="remesh", only="a.1*")
    assert remesh.Checkpoint(tmp_path / "second").state() == second
    assert checkpoint.state("a.*") == {"a": [torch.zeros(1), (torch.ones(1), 2)]}
