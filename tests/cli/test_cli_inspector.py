"""`diff` and `convert`, on our format and Hugging Face's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import remesh

from .conftest import Run

QUERY, OUTPUT = "layers.0.q_proj.weight", "layers.0.o_proj.weight"


def weights(change: float = 0.0) -> dict[str, Any]:
    query = np.arange(64, dtype=np.float32).reshape(8, 8)
    query[0, 1] += change
    return {
        QUERY: query,
        OUTPUT: np.ones((8, 8), np.float32),
        "norm": np.full(4, np.nan, np.float32),
    }


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    remesh.save({"model": weights(), "step": 3}, tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    save_file(weights(change=0.5), tmp_path / "theirs" / "model.safetensors")
    return tmp_path / "theirs"


# ----- diff -----


def test_values_are_compared_with_a_tolerance(run_json: Any, tmp_path: Path, ours: Path) -> None:
    remesh.save({"model": weights(change=0.25), "step": 4, "more": 1}, tmp_path / "other")

    found = run_json("diff", ours, tmp_path / "other", exit_code=1)
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["num_different"]) == (f"model.{QUERY}", 1)
    assert tensor["max_difference"] == 0.25
    assert (found["values"], found["only_second_values"]) == ({"step": ["3", "4"]}, ["more"])

    close = run_json("diff", ours, tmp_path / "other", "--atol", 0.3, exit_code=1)
    assert (close["tensors"], close["num_equal"]) == ([], 3)
    shallow = run_json("diff", ours, tmp_path / "other", "--structure", exit_code=1)
    assert shallow["tensors"] == []


def test_formats_are_compared_through_a_transformation(
    run: Run, run_json: Any, tmp_path: Path, ours: Path, theirs: Path
) -> None:
    statements = [f"{name} -> model.{name}" for name in weights()]
    (tmp_path / "names.aoa").write_text("\n".join(statements))

    names = run_json("diff", theirs, ours, exit_code=1)
    assert (len(names["only_first"]), len(names["only_second"])) == (3, 3)
    mapped = run_json("diff", theirs, ours, "--transform", tmp_path / "names.aoa", exit_code=1)
    assert (mapped["only_first"], mapped["only_second"], mapped["num_equal"]) == ([], [], 2)
    assert [tensor["max_difference"] for tensor in mapped["tensors"]] == [0.5]
    text = "\n".join(statements)
    assert run("diff", theirs, ours, "--transform", text, "--atol", 1).exit_code == 0
    renames = '{"": "model."}'
    assert f"compare with --transform '{renames}'" in run("diff", theirs, ours).stdout
    assert run("diff", theirs, ours, "--transform", renames, "--atol", 1).exit_code == 0


def test_shapes_and_types_that_differ(run_json: Any, tmp_path: Path) -> None:
    remesh.save({"a": np.zeros(3), "b": np.zeros(3)}, tmp_path / "one")
    remesh.save({"a": np.zeros(4), "b": np.zeros(3, np.float32)}, tmp_path / "two")

    found = run_json("diff", tmp_path / "one", tmp_path / "two", exit_code=1)

    assert [(t["name"], t["num_different"]) for t in found["tensors"]] == [("a", None), ("b", 0)]
    # What no statement touches is compared as it is without any.
    command = ("diff", tmp_path / "one", tmp_path / "two", "--transform", "_ -> other")
    assert run_json(*command, exit_code=1)["tensors"] == found["tensors"]


def test_what_neither_floating_point_nor_a_text_shows(run_json: Any, tmp_path: Path) -> None:
    numbers, values = np.array([2**62, -(2**63)]), np.arange(3.0)
    far = np.array([1.0, 1e308])
    for name, change in (("one", 0), ("two", 1)):
        element = remesh.sharding.ShardedObject("o", values * (1 + change * 1e-15), (1,), (0,))
        changed = numbers + np.array([change, -change])
        state = {"a": changed, "far": far * (1 - 2 * change), "o": element}
        remesh.save(state, tmp_path / name)

    found = run_json("diff", tmp_path / "one", tmp_path / "two", exit_code=1)

    assert [t["num_different"] for t in found["tensors"]] == [2, 2]
    assert [t["max_difference"] for t in found["tensors"]] == [2.0**64, "inf"]
    assert len(found["values"]) == 1


# ----- convert -----


def test_a_conversion_says_how_fast_it_was(run: Run, theirs: Path, tmp_path: Path) -> None:
    done = run("convert", theirs, tmp_path / "new", "--format", "remesh")

    assert re.search(r"3 tensors, 528 B; .*; [0-9.]+ s, [0-9.]+ GB/s$", done.stdout.strip())


# ----- others -----


def test_help_of_run_needs_no_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    shown = run("run", "--help")

    assert shown.exit_code == 0
    assert "remesh run --nproc-per-node 4 train.py" in shown.stdout


def test_shells_complete_commands() -> None:
    environment = {**os.environ, "_REMESH_COMPLETE": "bash_complete", "COMP_WORDS": "remesh d"}
    done = subprocess.run(
        [sys.executable, "-m", "remesh"],
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "COMP_CWORD": "1"},
        timeout=240,
    )

    assert "plain,diff" in done.stdout.split()
