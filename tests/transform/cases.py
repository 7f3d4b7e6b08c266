"""The acceptance cases of the language; their file says what its fields mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remesh import Transform
from remesh.transform import Resolved, TensorInfo
from tests.transform.simulated import Array, round_bf16

Case = dict[str, Any]


CASES: dict[str, Case] = {
    case["name"]: case
    for case in json.loads(Path(__file__).with_name("aoa_cases.json").read_text())["cases"]
}


@dataclass(frozen=True)
class Setting:
    """A case, ready to run: float32 arrays stand for all dtypes."""

    transform: Transform
    sources: dict[str, TensorInfo]
    targets: dict[str, TensorInfo]
    arrays: dict[str, Array]
    initial: dict[str, Array]
    expected: dict[str, Array]

    def resolve(self) -> Resolved:
        resolved = self.transform.resolve(self.sources, self.targets)
        resolved.check()
        return resolved


def _rounded(values: Any, dtype: str) -> Array:
    array = np.asarray(values, dtype=np.float32)
    return round_bf16(array) if dtype == "bfloat16" else array.astype(dtype).astype(np.float32)


def _source(spec: Case) -> tuple[TensorInfo, Array]:
    shape = tuple(spec["shape"])
    dtype = spec.get("dtype", "float32")
    values = spec.get("values")
    if values is None:
        values = np.arange(np.prod(shape, dtype=int)) + spec.get("start", 0)
    parts = tuple(spec.get("parts") or (1,) * len(shape))
    array = _rounded(np.asarray(values).reshape(shape), dtype)
    return TensorInfo(dtype, shape, parts), array


def setting_of(case: Case) -> Setting:
    described = {name: _source(spec) for name, spec in case["source"].items()}
    arrays = {name: array for name, (_, array) in described.items()}
    names = {"src": arrays, "np": np, "round_bf16": round_bf16}
    expected = {
        name: np.asarray(eval(expression, dict(names)), dtype=np.float32)
        for name, expression in case["expected"].items()
    }
    targets, initial = {}, {}
    for name in [*expected, *case.get("destination", {})]:
        spec = case.get("destination", {}).get(name, {})
        shape = expected[name].shape if name in expected else tuple(spec["shape"])
        parts = tuple(spec.get("parts") or (1,) * len(shape))
        targets[name] = TensorInfo(spec.get("dtype", "float32"), shape, parts)
        initial[name] = np.full(shape, spec.get("fill", -1), np.float32)
    transform = Transform(case["statements"])
    return Setting(
        transform.reversed() if case.get("reverse") else transform,
        {name: info for name, (info, _) in described.items()},
        targets,
        arrays,
        initial,
        expected,
    )


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """A float32 array as a tensor of the dtype that it stands for."""
    return torch.from_numpy(array.copy()).to(getattr(torch, dtype))
