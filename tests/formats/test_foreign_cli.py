"""The command line on checkpoints of other systems."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from tests.formats.test_readers import write_dcp_by_remesh


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments), terminal_width=100)
    return result.exit_code, result.output


def test_ls_show_and_verify(tmp_path: Path) -> None:
    write_dcp_by_remesh({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path)
    place = str(tmp_path)
    status, text = run("ls", place, "--values")
    assert status == 0
    assert "without digests" in text
    assert re.search(r"float32 +2 x 3|float32 +\(?2, ?3|float32.*w", text)
    document = json.loads(run("ls", place, "--json")[1])
    assert document["format"] == "torch_dcp"
    assert [tensor["name"] for tensor in document["tensors"]] == ["w"]
    shown = json.loads(run("show", place, "w", "--json")[1])
    assert shown["elements"] == [0, 1, 2, 3, 4, 5]
    status, text = run("verify", place)
    assert (status, "no digests" in text) == (0, True)


def test_values_are_shown(tmp_path: Path) -> None:
    remesh.save({"step": 7}, tmp_path, format="torch_dist")
    assert run("show", str(tmp_path), "step") == (0, "7\n")
