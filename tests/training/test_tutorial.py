"""The script of docs/tutorial.md, as a reader would start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_of_the_tutorial_goes_on_in_every_launch(tmp_path: Path) -> None:
    (script,) = (block for block in blocks_of("python") if "# train.py" in block)
    (tmp_path / "train.py").write_text(script)
    consoles = "".join(blocks_of("console"))
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
