"""`remesh show`: one tensor, a region of it, or one value."""

from __future__ import annotations

import argparse
import ast
import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from tests.engine.small_checkpoint import flip

from .conftest import Run, RunJson, data_files

BITS: torch.dtype = getattr(torch, "uint4")  # noqa: B009 - torch does not declare it


@pytest.mark.parametrize(
    ("tensor", "elements", "said"),
    [
        (np.array([1.0, np.nan, -np.inf], np.float16), [1.0, "nan", "-inf"], "nan"),
        (np.array([2**64 - 1, 2**64 - 2], np.uint64), [2**64 - 1, 2**64 - 2], "uint64"),
        (np.array([True, False, True, True]), [True, False, True, True], "bool"),
        (np.array([1 + 2j, 3 - 1j]), [[1.0, 2.0], [3.0, -1.0]], "complex128"),
        (torch.tensor([3, 200], dtype=torch.uint8).view(BITS), [3, 200], "uint4"),
        (np.arange(12), [*range(10)], "first 10 of 12 elements"),
        (np.zeros((0, 3)), [], "float64"),
        (np.full((), 7.5), [7.5], "  elements\n  7.5\n"),
    ],
)
def test_elements_by_type(
    run: Run, run_json: RunJson, tmp_path: Path, tensor: Any, elements: Any, said: str
) -> None:
    remesh.save({"w": tensor}, tmp_path / "ck")

    assert run_json("show", tmp_path / "ck", "w")["elements"] == elements
    assert said in run("show", tmp_path / "ck", "w").stdout


# ----- values -----


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("betas", {"kind": "value", "type": "tuple", "value": [0.9, 0.95]}),
        ("rng/shard_1_2", {"kind": "object", "type": "dict", "value": {"seed": 1, "raw": "01ff"}}),
    ],
)
def test_a_value_as_json(
    run_json: RunJson, places: dict[str, Path], name: str, shown: dict[str, object]
) -> None:
    path = places["one"]
    assert run_json("show", path, name) == {"path": str(path), "name": name, **shown}


def test_values_of_every_kind_as_json(run_json: RunJson, tmp_path: Path) -> None:
    state = {
        "none": None,
        "big": 2**80,
        "huge": -(16**5000),
        "inf": float("-inf"),
        "complex": 1 - 2j,
        "set": {3, 1, 16**5000},
        "bytes": b"\x00\xff",
        "keys": {1: "a", (2, 3): "b", 16**5000: "c"},
        "alike": {1: "a", "1": "b"},
        "numpy": np.float32(1.5),
        "long": np.longdouble(1.5),
        "path": Path("a/b"),
        "time": dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    }
    remesh.save({"all": [state]}, tmp_path / "ck")

    (value,) = run_json("show", tmp_path / "ck", "all")["value"]

    assert value == {
        "none": None,
        "big": 2**80,
        "huge": "-0x1" + 5000 * "0",
        "inf": "-inf",
        "complex": [1.0, -2.0],
        "set": ["0x1" + 5000 * "0", 1, 3],
        "bytes": "00ff",
        "keys": {"1": "a", "(2, 3)": "b", "0x1" + 5000 * "0": "c"},
        "alike": {"1": "a", "'1'": "b"},
        "numpy": 1.5,
        "long": "1.5",
        "path": "a/b",
        "time": "2026-01-31 12:00:00+00:00",
        "args": {"lr": 0.1, "layers": [1, 2]},
    }


def test_integers_that_python_does_not_print(run: Run, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    remesh.save({"n": [16**5000]}, one)
    remesh.save({"n": [16**5001]}, other)

    assert ast.literal_eval(run("show", one, "n").stdout) == [hex(16**5000)]
    assert "['0x1000" in run("ls", one, "--values").stdout
    assert "n: ['0x1000" in run("diff", one, other).stdout


def test_long_values_are_laid_out(run: Run, tmp_path: Path) -> None:
    value = [{"name": f"parameter_{number}", "lr": 0.1} for number in range(5)]
    remesh.save({"groups": [value, ()]}, tmp_path / "ck")

    shown = run("show", tmp_path / "ck", "groups").stdout

    assert ast.literal_eval(shown) == [value, ()]
    assert len(shown.splitlines()) > 4
    assert max(map(len, shown.splitlines())) <= 80


def test_damaged_bytes_are_never_shown(run: Run, checkpoint: Path) -> None:
    for file in data_files(checkpoint):
        flip(file, -1)

    result = run("show", checkpoint, "layers.9")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "are not what was written" in result.stderr
    assert "layers.9" in result.stderr
