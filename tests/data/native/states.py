"""What the stored checkpoints hold, whole: `make` wrote it, and every later version reads it.

Each element follows from its place, so that no version of torch or numpy changes what is expected.
"""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import math
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from remesh.core.dtypes import BY_NAME, DTYPES


class Colour(enum.Enum):
    RED = "r"


class Point(NamedTuple):
    x: int
    y: float


def pattern(dtype: str, *shape: int, start: int = 0) -> torch.Tensor:
    """Bytes that count up, seen as elements; those of a bool are 0 and 1."""
    raw = np.arange(start, start + math.prod(shape) * BY_NAME[dtype].itemsize) % 251
    raw = (raw % 2 if dtype == "bool" else raw).astype(np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    """Floats that count up."""
    return (torch.arange(math.prod(shape)) + start).reshape(shape).float()


def dtypes() -> dict[str, Any]:
    """A tensor of each element type that this torch has, and the shapes that are special."""
    found = {kind.name: pattern(kind.name, 3, 5) for kind in DTYPES if hasattr(torch, kind.name)}
    tied = counted(4)
    special = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3, dtype=torch.int8)}
    return {"kinds": found, "special": special, "tied": tied, "head": {"tied": tied}}


def values() -> dict[str, Any]:
    """A plain value of each kind, and containers of each kind."""
    return {
        "none": None,
        "flag": True,
        "numbers": [0, -1, 2**63, -(2**70), 0.1, -0.0, math.inf, 1 + 2j],
        "text": "naïve",
        "bytes": b"\x00\xff",
        "tuple": (1, (2, "three")),
        "sets": [{1, 2}, frozenset({"a"})],
        "keys": {1: "one", ("a", 2): None, "$": "sign"},
        "place": pathlib.Path("runs/a"),
        "times": [
            dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC),
            dt.date(2024, 2, 29),
            dt.time(1, 2, 3, 4),
            dt.timedelta(days=-1, seconds=2),
        ],
        "numpy": [np.float32(2.5), np.int8(-3), np.bool_(True)],
        "types": [Colour.RED, Point(1, 2.5)],
        "spaces": [argparse.Namespace(lr=0.1), types.SimpleNamespace(a={"b": 1})],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.channels_last],
        "mixed": [counted(2), {"a.b": counted(1), "c": (counted(3), 7)}],
    }


def quantised() -> dict[str, torch.Tensor]:
    """The tensors of which one tensor is made."""
    return {"codes": pattern("int8", 4, 6), "scale": counted(4, 1)}


def sharded() -> dict[str, torch.Tensor]:
    """Tensors that four ranks hold in parts: in a grid, flattened, and as copies."""
    return {
        "grid": pattern("bfloat16", 6, 10),
        "flat": pattern("float32", 5, 7, start=9),
        "copied": pattern("int64", 3),
    }


def objects() -> dict[str, dict[str, Any]]:
    """A plain value of each rank, with arrays in it."""
    return {
        f"random/shard_{rank}_4": {
            "rank": rank,
            "array": np.arange(3) + rank,
            "tensor": counted(2, start=rank),
        }
        for rank in range(4)
    }


class Model(nn.Module):
    """Layers of which the first is frozen, and buffers that ranks may have each their own of."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 32, bias=False).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 6)


def training() -> dict[str, Any]:
    """A model and AdamW after a step, as `Checkpoint.state` shows them."""
    model = {
        "base.weight": counted(32, 16),
        "norm.weight": counted(32, start=1),
        "norm.bias": counted(32, start=2),
        "norm.running_mean": counted(32, start=3),
        "norm.running_var": counted(32, start=4),
        "norm.num_batches_tracked": torch.tensor(5),
        "head.weight": counted(6, 32, start=6),
        "head.bias": counted(6, start=7),
    }
    trained = ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    moments = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": model[name] + 100,
            "exp_avg_sq": model[name] + 1000,
        }
        for name in trained
    }
    return {"model": model, "moments": moments, "step": 1}
