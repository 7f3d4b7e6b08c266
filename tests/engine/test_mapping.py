"""A checkpoint behaves like a dict of what is stored, and is read without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import remesh
from remesh.sharding import Box, ShardedObject
from tests.engine.test_imports import run_python


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


def test_a_name_that_is_not_stored_is_a_key_error(checkpoint: remesh.Checkpoint) -> None:
    with pytest.raises(
        KeyError, match=r"(?s)model.wieght: nothing is stored.*near are model.weight"
    ):
        checkpoint["model.wieght"]


def test_an_empty_checkpoint_is_still_one(tmp_path: Path) -> None:
    remesh.save({}, tmp_path)
    assert len(remesh.Checkpoint(tmp_path)) == 0


def test_tensors_are_arrays_where_there_is_no_torch(tmp_path: Path) -> None:
    whole = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    remesh.save({"w": whole, "half": whole.bfloat16(), "step": 3}, tmp_path / "both")
    remesh.save({"w": whole, "step": 3}, tmp_path / "plain")
    code = """
sys.meta_path.pop(0)
sys.modules["torch"] = None  # as where it is not installed
import numpy as np, remesh
both, plain = (remesh.Checkpoint(path) for path in sys.argv[1:])
assert isinstance(both["w"], np.ndarray) and both["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
box = remesh.sharding.Box((1, 0), (1, 2))
assert both.read("w", box).tolist() == [[3, 4]]
assert plain.state()["w"].dtype == np.float32
assert both["step"] == plain.state()["step"] == 3
try:
    both["half"]
except remesh.errors.UnsupportedValueError as error:
    print(error)
assert both.read_array("half").dtype == np.uint16
"""
    printed = run_python(code, str(tmp_path / "both"), str(tmp_path / "plain"))
    assert "half: numpy has no bfloat16\nRead it as a torch tensor" in printed


def test_with_torch_the_same_reads_are_tensors(tmp_path: Path) -> None:
    remesh.save({"w": np.ones((2, 2), np.float32)}, tmp_path)
    assert torch.equal(remesh.Checkpoint(tmp_path)["w"], torch.ones(2, 2))
    box = Box((0, 0), (1, 2))
    assert torch.equal(remesh.Checkpoint(tmp_path).read("w", box), torch.ones(1, 2))


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
