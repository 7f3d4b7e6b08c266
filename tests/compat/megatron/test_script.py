"""A script for Megatron's checkpoints, and the page that says how to move."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from remesh.exchange import Exchange
from tests.support import run_processes

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "how-to" / "from-megatron.md"
SCRIPT = (HERE / "megatron_job.txt").read_text()


def moved(script: str) -> str:
    """The script with its import lines as the page says."""
    text = script.replace(
        "from megatron.core import dist_checkpointing\n",
        "from remesh.compat import megatron as dist_checkpointing\n",
    )
    return text.replace("megatron.core.dist_checkpointing", "remesh.compat.megatron")


def _run(exchange: Exchange, folder: Path) -> str:
    """The script on this rank, whose process group is there already; what it prints."""
    for name in ("init_process_group", "destroy_process_group"):
        setattr(torch.distributed, name, lambda *_: None)
    sys.argv = ["job.py", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(moved(SCRIPT), "job.py", "exec"), {})
    return printed.getvalue()


def test_a_script_runs_with_other_import_lines_alone(tmp_path: Path) -> None:
    lines = zip(SCRIPT.splitlines(), moved(SCRIPT).splitlines(), strict=True)
    changed = [line for line, new in lines if line != new]
    assert len(changed) == 7
    assert all(line.startswith("from megatron.core") for line in changed)
    first, *_ = run_processes(2, _run, tmp_path)
    second, *rest = run_processes(4, _run, tmp_path)
    assert rest == [""] * 3
    assert re.fullmatch(r"step 1 weights -?[0-9.]+ moments -?[0-9.]+\n", first)
    # The same two steps on two ranks.
    other = [run_processes(2, _run, tmp_path / "other")[0] for _ in range(2)]
    assert [first, second] == other


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # `install` on the page is undone, and another test's import of Megatron does not disturb it.
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
