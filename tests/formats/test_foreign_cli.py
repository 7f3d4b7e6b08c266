"""The command line on checkpoints of other systems, and the page about them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.cli import cli

PAGE = Path(__file__).parents[2] / "docs/how-to/foreign-formats.md"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments), terminal_width=100)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["torch_dcp", "torch_dist", "zarr"])
def test_ls_show_and_verify(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    remesh.save({"w": torch.arange(6.0).reshape(2, 3), "step": 7}, folder, format=name)
    status, text = run("ls", folder, "--values")
    assert status == 0
    assert "without digests" in text
    assert re.search(r"float32 +2 x 3|float32 +\(?2, ?3|float32.*w", text)
    status, text = run("ls", folder, "--json")
    document = json.loads(text)
    assert document["format"] == ("torch_dcp" if name == "torch_dist" else name)
    assert [tensor["name"] for tensor in document["tensors"]] == ["w"]
    assert run("show", folder, "step") == (0, "7\n")
    status, text = run("show", folder, "w", "--json")
    assert json.loads(text)["statistics"]["maximum"] == 5
    status, text = run("verify", folder)
    assert (status, "no digests" in text) == (0, True)


def test_verify_finds_a_short_file(tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(6.0)}, tmp_path, format="torch_dcp")
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    status, text = run("verify", str(tmp_path))
    assert (status, "cut short" in text) == (1, True)


def test_a_single_file_is_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.pt")
    status, text = run("ls", str(tmp_path / "model.pt"))
    assert (status, "bfloat16" in text) == (0, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
