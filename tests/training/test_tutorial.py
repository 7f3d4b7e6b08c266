"""The script of docs/tutorial.md, as a reader would start it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.elastic.cluster import run_job, run_torchrun

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
        launch = {"torchrun": run_torchrun, "remesh": run_job}[program]
        code, output = launch(tmp_path, *words[program == "remesh" :])
        assert code == 0, output
        assert expected in output.splitlines()
