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

from .conftest import Run, RunJson, data_files, flip_byte


def test_tensor_as_json(run_json: RunJson, checkpoint: Path) -> None:
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)
    document = run_json("show", checkpoint, "model.embed")
    statistics = document.pop("statistics")
    pieces = document.pop("pieces")

    assert document == {
        "kind": "tensor",
        "path": str(checkpoint),
        "name": "model.embed",
        "tied_to": None,
        "dtype": "float32",
        "shape": [8, 6],
        "num_bytes": 192,
        "box": {"offset": [0, 0], "shape": [8, 6]},
        "elements": list(range(10)),
    }
    assert [(piece["offset"], piece["shape"], piece["num_bytes"]) for piece in pieces] == [
        ([0, 0], [4, 6], 96),
        ([4, 0], [4, 6], 96),
    ]
    assert statistics == {
        "num_elements": 48,
        "num_zero": 1,
        "num_nan": 0,
        "num_inf": 0,
        "minimum": 0.0,
        "maximum": 47.0,
        "mean": 23.5,
        "std": pytest.approx(whole.std(dtype=np.float64)),
    }


def test_tensor_as_text(run: Run, checkpoint: Path) -> None:
    result = run("show", checkpoint, "model.embed")

    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[:4] == ["model.embed", "dtype  float32", "shape  [8, 6]", "size   192 B"]
    assert [line.split()[:3] for line in lines if line.startswith("[")][:2] == [
        ["[0:4,", "0:6]", "96"],
        ["[4:8,", "0:6]", "96"],
    ]
    for fact in ("min    0", "max    47", "mean   23.5", "std    13.8534", "zeros  1 of 48"):
        assert fact in lines
    assert lines[-2:] == ["first 10 of 48 elements", "[0. 1. 2. 3. 4. 5. 6. 7. 8. 9.]"]
    small = run("show", checkpoint, "model.half").stdout
    assert small.endswith("  elements\n  [[0.5 0.5 0.5]\n   [0.5 0.5 0.5]]\n")


def test_tied_names_lead_to_the_tensor(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    document = run_json("show", checkpoint, "model.tied")

    assert document["tied_to"] == "model.head"
    assert document["elements"] == [0, 1, 2, 3, 4, 5]
    assert "tied to  model.head" in run("show", checkpoint, "model.tied").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:8,0:6", np.s_[0:8, 0:6]),
        ("3:5,5:6", np.s_[3:5, 5:6]),
        ("5", np.s_[5:6, :]),
        (":,2", np.s_[:, 2:3]),
        ("6:", np.s_[6:, :]),
        (" :2 , 4 : ", np.s_[:2, 4:]),
    ],
)
def test_box(run_json: RunJson, checkpoint: Path, text: str, expected: tuple[slice, ...]) -> None:
    region = np.arange(48, dtype=np.float32).reshape(8, 6)[expected]

    document = run_json("show", checkpoint, "model.embed", "--box", text)

    assert document["box"]["shape"] == list(region.shape)
    assert document["elements"] == region.reshape(-1).tolist()
    assert document["statistics"]["mean"] == pytest.approx(float(region.mean()))
    assert document["statistics"]["num_elements"] == region.size


def test_box_keeps_its_shape_and_lists_the_pieces_that_it_touches(
    run: Run, run_json: RunJson, checkpoint: Path
) -> None:
    document = run_json("show", checkpoint, "model.embed", "--box", "4:6")
    shown = run("show", checkpoint, "model.embed", "--box", "3:5,1:3").stdout

    assert [piece["offset"] for piece in document["pieces"]] == [[4, 0]]

    assert "  box    [3:5, 1:3], 4 elements\n" in shown
    assert shown.endswith("  elements\n  [[19. 20.]\n   [25. 26.]]\n")


def test_large_box_shows_first_elements(run_json: RunJson, run: Run, tmp_path: Path) -> None:
    values = np.arange(2000, dtype=np.int32).reshape(2, 1000)
    remesh.save({"w": values}, tmp_path / "ck")

    whole = run_json("show", tmp_path / "ck", "w", "--box", "0:2")
    row = run_json("show", tmp_path / "ck", "w", "--box", "1")

    assert whole["elements"] == list(range(10))
    assert row["elements"] == list(range(1000, 2000))
    assert "..." not in run("show", tmp_path / "ck", "w", "--box", "1").stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:9", "--box 0:9: 0:9 is not in dim 0; model.embed has shape [8, 6]"),
        ("3:3", "--box 3:3: 3:3 is not in dim 0; model.embed has shape [8, 6]"),
        (":,6", "--box :,6: 6:7 is not in dim 1; model.embed has shape [8, 6]"),
        ("1,1,1", "--box 1,1,1 has 3 dims, but model.embed has shape [8, 6]"),
        ("1", "step is not a tensor, so it has no --box"),
    ],
)
def test_box_outside_the_tensor(run: Run, checkpoint: Path, text: str, message: str) -> None:
    name = "step" if message.startswith("step") else "model.embed"
    result = run("show", checkpoint, name, "--box", text)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\n"


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "-1:2", "1;2", "1,", "9" * 5000])
def test_not_a_box(run: Run, checkpoint: Path, text: str) -> None:
    result = run("show", checkpoint, "model.embed", f"--box={text}")

    assert result.exit_code == 2
    assert f"{text!r} is not a box; write it like 0:10,5:7" in result.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, np.nan, np.inf, -np.inf, -0.0, 3.0], (2, 1, 2, 0.0, 3.0)),
        ([np.nan, np.inf], (1, 1, 0, None, None)),
    ],
)
def test_only_finite_elements_are_summarised(
    run_json: RunJson, run: Run, tmp_path: Path, values: list[float], expected: tuple[Any, ...]
) -> None:
    remesh.save({"w": np.array(values, np.float16)}, tmp_path / "ck")
    document = run_json("show", tmp_path / "ck", "w")
    found = document["statistics"]
    num_inf, num_nan, num_zero = (int(np.isinf(values).sum()), int(np.isnan(values).sum()), 0)
    finite = [value for value in values if np.isfinite(value)]
    num_zero = finite.count(0.0)

    assert (found["num_inf"], found["num_nan"], found["num_zero"]) == (num_inf, num_nan, num_zero)
    assert (found["minimum"], found["maximum"]) == expected[3:]
    assert found["mean"] == (pytest.approx(np.mean(finite)) if finite else None)
    assert found["std"] == (pytest.approx(np.std(finite)) if finite else None)
    assert document["elements"] == [
        value if np.isfinite(value) else str(float(value)) for value in values
    ]
    if not finite:
        assert "mean   - (no finite element)" in run("show", tmp_path / "ck", "w").stdout


BITS: torch.dtype = getattr(torch, "uint4")  # noqa: B009 - torch does not declare it


@pytest.mark.parametrize(
    ("tensor", "expected", "elements", "said"),
    [
        (np.array([1e308, -1e308, 1e308]), {"std": None}, None, "std    - (beyond float64)"),
        (
            np.array([2**64 - 1, 2**64 - 2], np.uint64),
            {"minimum": 2**64 - 2, "maximum": 2**64 - 1},
            [2**64 - 1, 2**64 - 2],
            "uint64",
        ),
        (
            np.array([True, False, True, True]),
            {"num_zero": 1, "mean": 0.75, "minimum": 0},
            [True, False, True, True],
            "bool",
        ),
        (
            np.array([1 + 2j, 3 - 1j]),
            None,
            [[1.0, 2.0], [3.0, -1.0]],
            "statistics of complex128 are not given: it has no order",
        ),
        (
            torch.tensor([3, 200], dtype=torch.uint8).view(BITS),
            None,
            [3, 200],
            "statistics of uint4 are not given: only its bits are known",
        ),
    ],
)
def test_statistics_by_type(
    run: Run,
    run_json: RunJson,
    tmp_path: Path,
    tensor: Any,
    expected: Any,
    elements: Any,
    said: str,
) -> None:
    remesh.save({"w": tensor}, tmp_path / "ck")

    document = run_json("show", tmp_path / "ck", "w")

    found = document["statistics"]
    assert expected == (found and {name: found[name] for name in expected})
    assert elements is None or document["elements"] == elements
    assert said in run("show", tmp_path / "ck", "w").stdout


def test_empty_and_scalar_tensors(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    remesh.save({"e": np.zeros((0, 3)), "s": np.full((), 7.5)}, tmp_path / "ck")

    empty = run_json("show", tmp_path / "ck", "e")
    assert empty["elements"] == []
    assert empty["statistics"]["num_elements"] == 0
    assert empty["statistics"]["mean"] is None
    assert run("show", tmp_path / "ck", "e").exit_code == 0

    assert run_json("show", tmp_path / "ck", "s")["elements"] == [7.5]
    assert run("show", tmp_path / "ck", "s").stdout.endswith("  elements\n  7.5\n")
    assert run("show", tmp_path / "ck", "s", "--box", "0").exit_code == 2


# ----- values -----


def test_values(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    assert run("show", checkpoint, "betas").stdout == "(0.9, 0.95)\n"
    assert run_json("show", checkpoint, "betas") == {
        "kind": "value",
        "path": str(checkpoint),
        "name": "betas",
        "type": "tuple",
        "value": [0.9, 0.95],
    }
    assert run_json("show", checkpoint, "rng/shard_1_2") == {
        "kind": "object",
        "path": str(checkpoint),
        "name": "rng/shard_1_2",
        "type": "dict",
        "value": {"seed": 1, "raw": "01ff"},
    }


def test_values_of_every_kind_as_json(run_json: RunJson, tmp_path: Path) -> None:
    state = {
        "none": None,
        "big": 2**80,
        "inf": float("-inf"),
        "complex": 1 - 2j,
        "set": {3, 1, 2},
        "bytes": b"\x00\xff",
        "keys": {1: "a", (2, 3): "b"},
        "numpy": np.float32(1.5),
        "path": Path("a/b"),
        "time": dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    }
    remesh.save({"all": [state]}, tmp_path / "ck")

    (value,) = run_json("show", tmp_path / "ck", "all")["value"]

    assert value == {
        "none": None,
        "big": 2**80,
        "inf": "-inf",
        "complex": [1.0, -2.0],
        "set": [1, 2, 3],
        "bytes": "00ff",
        "keys": {"1": "a", "(2, 3)": "b"},
        "numpy": 1.5,
        "path": "a/b",
        "time": "2026-01-31 12:00:00+00:00",
        "args": {"lr": 0.1, "layers": [1, 2]},
    }


def test_long_values_are_laid_out(run: Run, tmp_path: Path) -> None:
    value = [{"name": f"parameter_{number}", "lr": 0.1} for number in range(5)]
    remesh.save({"groups": [value, ()]}, tmp_path / "ck")

    shown = run("show", tmp_path / "ck", "groups").stdout

    assert ast.literal_eval(shown) == [value, ()]
    assert len(shown.splitlines()) > 4
    assert max(map(len, shown.splitlines())) <= 80


def test_no_such_name(run: Run, checkpoint: Path) -> None:
    near = run("show", checkpoint, "model.embedd")
    far = run("show", checkpoint, "qqq")

    assert (near.exit_code, far.exit_code) == (2, 2)
    assert near.stderr.startswith(
        "error: model.embedd: nothing is stored under this name; near are model.embed"
    )
    assert far.stderr == (
        "error: qqq: nothing is stored under this name; "
        f"remesh ls {checkpoint} --values lists the names\n"
    )


def test_a_directory_of_checkpoints_is_not_one(run: Run, runs: Path) -> None:
    result = run("show", runs, "w")

    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {runs}: not a checkpoint itself; it holds 3 checkpoints; name one of them, "
        f"the newest is {runs / 'step_100'}\n"
    )


def test_damaged_bytes_are_never_summarised(run: Run, checkpoint: Path) -> None:
    for file in data_files(checkpoint):
        flip_byte(file, file.stat().st_size - 1)

    result = run("show", checkpoint, "layers.9")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "are not what was written" in result.stderr
    assert "layers.9" in result.stderr
