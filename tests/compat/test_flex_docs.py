"""The pages for those who come from Flex Checkpoint and ATorch, run as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remesh.compat.atorch
import remesh.compat.flex_checkpoint

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = {
    "from-flex-checkpoint.md": remesh.compat.flex_checkpoint,
    "from-atorch.md": remesh.compat.atorch,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), target


def test_the_page_names_what_a_program_calls() -> None:
    text = (DOCS / "from-atorch.md").read_text()
    assert all(name in text for name in remesh.compat.atorch.__all__)
