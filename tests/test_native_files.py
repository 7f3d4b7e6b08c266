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
from tests.engine.scenes import saved_by

WHOLE = {
    "layers.0.w": random_tensor(torch.bfloat16, (4, 6)),
    "scale": random_tensor(torch.float64, ()),
    "z": random_tensor(torch.complex128, (3, 2)),
    "fp8": random_tensor(torch.float8_e4m3fn, (8,)),
    "mask": random_tensor(torch.bool, (5,)),
    "nothing": random_tensor(torch.int64, (0, 4)),
}
HELD: list[dict[str, Box]] = [
    {"layers.0.w": Box((0, 0), (4, 2)), "fp8": Box((0,), (8,)), "z": Box((0, 0), (1, 2))},
    {},
    {
        "layers.0.w": Box((0, 2), (4, 4)),
        "scale": Box((), ()),
        "z": Box((1, 0), (2, 2)),
        "mask": Box((0,), (5,)),
        "nothing": Box((0, 0), (0, 4)),
    },
]
"""What each of three ranks holds."""


def part_of_state(rank: int) -> dict[str, Any]:
    return {
        name: remesh.ShardedTensor.at_offset(
            name, WHOLE[name][box.slices].clone(), tuple(WHOLE[name].shape), box.offset
        )
        for name, box in HELD[rank].items()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, of which one holds nothing."""
    path: Path = saved_by(3, part_of_state, tmp_path_factory.mktemp("native") / "c")
    return path


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads from a data file."""
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "remesh"
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_the_safetensors_library_reads_every_piece(place: Path) -> None:
    files = [tensors_in(path) for path in sorted(place.glob("data-*/0*.safetensors"))]
    assert [{k: (t.dtype, tuple(t.shape)) for k, t in found.items()} for found in files] == [
        {
            "layers.0.w@0,0": (torch.bfloat16, (4, 2)),
            "fp8": (torch.float8_e4m3fn, (8,)),
            # complex128 has no code; a pair of real numbers has the same bytes.
            "z@0,0": (torch.float64, (1, 2, 2)),
        },
        {
            "layers.0.w@0,2": (torch.bfloat16, (4, 4)),
            "scale": (torch.float64, ()),
            "z@1,0": (torch.float64, (2, 2, 2)),
            "mask": (torch.bool, (5,)),
        },
    ]
    found = files[0] | files[1]
    joined = torch.cat([found["layers.0.w@0,0"], found["layers.0.w@0,2"]], dim=1)
    assert bits_of(joined) == bits_of(WHOLE["layers.0.w"])
    pairs = torch.view_as_complex(torch.cat([found["z@0,0"], found["z@1,0"]]))
    assert bits_of(pairs) == bits_of(WHOLE["z"])
    for name in ("fp8", "scale", "mask"):
        assert bits_of(found[name]) == bits_of(WHOLE[name])


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_every_dtype_can_be_opened(dtype: str, tmp_path: Path) -> None:
    expected = random_tensor(getattr(torch, dtype), (3, 4))
    remesh.save({"t": expected}, tmp_path)
    [path] = tmp_path.glob("data-*/0*.safetensors")
    tensor = tensors_in(path)["t"]
    assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == bits_of(expected)[2]
    if not BY_NAME[dtype].pairs:
        called = BY_NAME[dtype].carrier.name if BY_NAME[dtype].is_opaque else dtype
        assert str(tensor.dtype) == f"torch.{called}"
        assert tuple(tensor.shape) == (3, 4)


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
