"""The programs of the pages run from top to bottom, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remesh.compat.atorch
import remesh.sharding

DOCS = Path(__file__).parent.parent / "docs"

PAGES = [
    "data-position.md",
    "explanation/architecture.md",
    "explanation/sizing.md",
    "export.md",
    "how-to/from-atorch.md",
    "how-to/from-dcp.md",
    "how-to/from-dlrover.md",
    "how-to/from-flex-checkpoint.md",
    "how-to/from-lightning-accelerate.md",
    "how-to/from-torch-save.md",
    "how-to/load-a-part.md",
    "how-to/lora.md",
    "how-to/recipes.md",
    "manager.md",
    "parallelism.md",
    "tutorial.md",
]
FRAMEWORKS = [
    f"how-to/{name}.md" for name in ("accelerate", "huggingface", "lightning", "torchtitan")
]
"""Pages whose programs need a training of the reader's."""


def programs_of(page: str) -> list[str]:
    """The programs of a page, without whole scripts."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    return [block for block in blocks if "# train.py" not in block]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_the_programs_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in programs_of(page):
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_the_programs_of_a_page_on_a_framework_are_python(page: str) -> None:
    for block in programs_of(page):
        compile(block, page, "exec")


def headings_of(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    return {
        re.sub(r"[^a-z0-9_ -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page",
    [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists() or "reference" in page.parts, target
        if anchor and linked.suffix == ".md" and linked.exists():
            assert anchor in headings_of(linked), (target, anchor)


def test_pages_name_every_declaration_and_what_comes_from_atorch() -> None:
    text = (DOCS / "parallelism.md").read_text() + (DOCS / "guide.md").read_text()
    assert [name for name in remesh.sharding.__all__ if name not in text] == []
    text = (DOCS / "how-to/from-atorch.md").read_text()
    assert [name for name in remesh.compat.atorch.__all__ if name not in text] == []


def test_the_comparison_names_tests_that_there_are() -> None:
    page = (DOCS / "explanation" / "comparison.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", page)
    assert len(named) > 15
    assert [path for path in named if not (DOCS.parent / path).exists()] == []
