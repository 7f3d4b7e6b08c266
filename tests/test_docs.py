"""The README and the guide, run as a reader would run them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from remesh import errors

ROOT = Path(__file__).parent.parent


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_guide_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = python_blocks("docs/guide.md")
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "docs/guide.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "steps (did you mean step?)" in printed
    assert "shape (16, 8) is stored, (32, 8) is wanted" in printed


@pytest.mark.timeout(600)
def test_the_first_minute_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, script = python_blocks("README.md")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    namespace = {"model": model, "optimizer": optimizer, "step": 3}
    monkeypatch.chdir(tmp_path)
    exec(compile(calls, "README.md", "exec"), namespace)
    (tmp_path / "train.py").write_text(script)
    printed = []
    for num_ranks in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", "-m", "remesh.elastic.script", "train.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        # Before it, gloo of older torch says who is connected.
        printed.append(done.stdout.strip().splitlines()[-1])
    assert printed == ["2 ranks saved step 20", "4 ranks saved step 40"]
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in printed)


def warnings_in(tree: ast.Module) -> Iterator[str]:
    """The texts of calls to `warning`, as far as they are literal."""
    named = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".warning"):
            text = node.args[0]
            value = text.value if isinstance(text, ast.Constant) else named.get(ast.unparse(text))
            if isinstance(value, str):
                yield value


def test_every_exception_and_warning_is_explained() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    assert [each.__name__ for each in classes if f"| `{each.__name__}` |" not in page] == []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for text in warnings_in(ast.parse(file.read_text())):
            parts = [part.strip(" :;,.") for part in re.split(r"%[.\d]*[sdfg]|[.,:;] |\n", text)]
            long = [part for part in parts if len(part) > 8]
            assert not long or any(part in page for part in long), f"{file.name}: {text!r}"


def test_the_environment_of_the_demo_has_what_its_last_run_needs() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rule = re.search(r"ready-demo:.*\n\t.*'\.\[(.*)\]'", (ROOT / "Makefile").read_text())
    assert rule is not None
    extras = rule[1].split(",")
    installed = [
        word for name in extras for word in package["project"]["optional-dependencies"][name]
    ]
    assert {word.split(">")[0] for word in installed} >= {"torch", "aiohttp", "prometheus-client"}
