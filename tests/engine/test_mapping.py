"""A checkpoint behaves like a dict of what is stored, and is read without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import remesh
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


def test_slices_read_only_their_part(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(5, 4, 3)
    remesh.save(
        {"m": {"w": whole, "h": torch.ones(2, dtype=torch.bfloat16)}, "n": 1}, tmp_path / "c"
    )
    checkpoint = remesh.Checkpoint(tmp_path / "c")
    part = checkpoint.get_slice("m.w")
    assert (part.shape, part.dtype) == ((5, 4, 3), "float32")
    for key in (
        (slice(1, 3),),
        (2,),
        (-1, slice(None), 0),
        (..., slice(1, 2)),
        (0, ..., 2),
        (slice(4, 2),),
        (slice(None, None), 3),
        (1, 2, 1),
        (...,),
    ):
        assert torch.equal(part[key], whole[key])
    for wrong in ((0, 0, 0, 0), (5,), (slice(0, 4, 2),)):
        with pytest.raises(IndexError):
            part[wrong]
    assert checkpoint.names("m.*") == ["m.w", "m.h"]
    assert list(checkpoint.state("m.w")["m"]) == ["w"]
    arrays = remesh.Checkpoint(tmp_path / "c", framework="numpy")
    assert isinstance(arrays["m.w"], np.ndarray)
    assert isinstance(arrays.get_slice("m.w")[1:2], np.ndarray)
    with pytest.raises(remesh.errors.UnsupportedValueError, match="numpy has no bfloat16"):
        arrays.read("m.h")
    with pytest.raises(remesh.errors.StateError, match="framework must be"):
        remesh.Checkpoint(tmp_path / "c", framework="pt")  # type: ignore[arg-type]
