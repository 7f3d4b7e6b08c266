"""docs/tutorial.md and the pages on frameworks, as a reader would follow them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["tutorial.md", *(f"how-to/{name}.md" for name in ("huggingface", "lightning"))]
PAGES += [f"how-to/{name}.md" for name in ("accelerate", "torchtitan")]


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_tutorial_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = [block for block in blocks_of("tutorial.md", "python") if "# train.py" not in block]
    assert len(blocks) >= 8
    for block in blocks:
        exec(compile(block, "tutorial.md", "exec"), namespace)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_of_the_tutorial_goes_on_in_every_launch(tmp_path: Path) -> None:
    (script,) = (block for block in blocks_of("tutorial.md", "python") if "# train.py" in block)
    (tmp_path / "train.py").write_text(script)
    consoles = "".join(blocks_of("tutorial.md", "console"))
    launches = re.findall(r"^\$ (.* train\.py \d+)\n(.*\d ranks go on.*)$", consoles, re.MULTILINE)
    assert len(launches) == 3
    for command, expected in launches:
        program, *words = command.split()
        start = {
            "torchrun": ["-m", "torch.distributed.run", "--standalone"],
            "remesh": ["-c", "from remesh.cli import main; main()"],
        }[program]
        if program == "torchrun":  # whose processes may abort after their work
            words[words.index("train.py") :] = ["-m", "remesh.elastic.script", *words[-2:]]
        done = subprocess.run(
            [sys.executable, *start, *words],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout.splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (DOCS / page).read_text()):
        assert ((DOCS / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES[1:])
def test_the_code_of_a_page_on_a_framework_is_python(page: str) -> None:
    for block in blocks_of(page, "python"):
        compile(block, page, "exec")
