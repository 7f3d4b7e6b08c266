"""The command line on checkpoints of other systems."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from tests.formats.test_readers import WRITERS as READERS
from tests.formats.test_readers import (
    write_dcp_by_remesh,
    write_huggingface_in_several_files,
    write_safetensors_file,
    write_torch_file,
)
from tests.support.zarr_files import write_zarr


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments), terminal_width=100)
    return result.exit_code, result.output


WRITERS = {
    "torch_dcp": write_dcp_by_remesh,
    "zarr": write_zarr,
    "torch_file": write_torch_file,
    "safetensors": write_safetensors_file,
    "huggingface": write_huggingface_in_several_files,
}


@pytest.mark.parametrize("format_name", WRITERS)
def test_ls_show_and_verify(format_name: str, tmp_path: Path) -> None:
    write = WRITERS[format_name]
    write({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path)
    place = str(tmp_path / READERS[write][1])
    status, text = run("ls", place, "--values")
    assert status == 0
    assert "without digests" in text
    assert re.search(r"float32 +2 x 3|float32 +\(?2, ?3|float32.*w", text)
    document = json.loads(run("ls", place, "--json")[1])
    assert document["format"] == format_name
    assert [tensor["name"] for tensor in document["tensors"]] == ["w"]
    shown = json.loads(run("show", place, "w", "--json")[1])
    assert shown["elements"] == [0, 1, 2, 3, 4, 5]
    status, text = run("verify", place)
    assert (status, "no digests" in text) == (0, True)


def test_values_are_shown(tmp_path: Path) -> None:
    remesh.save({"step": 7}, tmp_path, format="torch_dist")
    assert run("show", str(tmp_path), "step") == (0, "7\n")
