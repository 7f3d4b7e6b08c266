"""The programs on the pages that have no test of their own run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"

PAGES = [
    "explanation/architecture.md",
    "explanation/sizing.md",
    "how-to/from-dcp.md",
    "how-to/from-dlrover.md",
    "how-to/from-lightning-accelerate.md",
    "how-to/from-torch-save.md",
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_programs_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists() or "reference" in page.parts, target


def test_the_comparison_names_tests_that_there_are() -> None:
    page = (DOCS / "explanation" / "comparison.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", page)
    assert len(named) > 15
    assert [path for path in named if not (DOCS.parent / path).exists()] == []
