"""remesh's own format: data files that other programs can open, and the index of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

import remesh
from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.core.safetensors_file import decode_header
from remesh.sharding import Box, Part
from tests.engine.bits import bits_of, random_tensor


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads from a data file."""
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "remesh"
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_every_dtype_can_be_opened(dtype: str, tmp_path: Path) -> None:
    expected = random_tensor(getattr(torch, dtype), (3, 4))
    remesh.save({"t": expected}, tmp_path)
    [path] = tmp_path.glob("data-*/0*.safetensors")
    tensor = tensors_in(path)["t"]
    assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == bits_of(expected)[2]
    pairs = BY_NAME[dtype].pairs  # have no code; a pair of real numbers has the same bytes
    assert tuple(tensor.shape) == ((3, 4, 2) if pairs else (3, 4))
    if not pairs:
        called = BY_NAME[dtype].carrier.name if BY_NAME[dtype].is_opaque else dtype
        assert str(tensor.dtype) == f"torch.{called}"


def pieces_of(state: Any, tmp_path: Path) -> dict[str, Any]:
    """What the header of the only data file says of its pieces."""
    remesh.save(state, tmp_path)
    [path] = tmp_path.glob("data-*/0*.safetensors")
    header = decode_header(path.read_bytes(), "f")
    pieces: dict[str, Any] = json.loads(header.metadata["pieces"])
    assert set(header.entries) >= set(pieces)
    return dict.fromkeys(header.entries) | pieces


def test_names_that_meet_are_told_apart(tmp_path: Path) -> None:
    byte = np.ones(1, np.int8)
    halves = tuple(Part(Box((at,), (2,)), np.ones(2, np.int8)) for at in (0, 2))
    state = {"a": remesh.ShardedTensor("a", (4,), halves), "a@2": byte, "a@2'": byte * 2}
    pieces = pieces_of(state, tmp_path)
    assert set(pieces) == {"a@0", "a@2", "a@2'", "a@2''"}
    assert pieces["a@2"] == ["a", "int8", [4], [2]]
    assert pieces["a@2'"] == ["a@2", "int8", [1], [0]]


def test_a_tensor_may_be_called_like_the_metadata(tmp_path: Path) -> None:
    pieces = pieces_of({"__metadata__": np.ones(4, np.int8)}, tmp_path)
    assert pieces == {"__metadata__'": ["__metadata__", "int8", [4], [0]]}
