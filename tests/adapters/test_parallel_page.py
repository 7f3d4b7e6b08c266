"""The page on parallelism, run as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remesh.sharding

PAGE = Path(__file__).parent.parent.parent / "docs" / "parallelism.md"


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 7
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)


def test_every_declaration_is_on_the_page() -> None:
    text = PAGE.read_text()
    guide = PAGE.with_name("guide.md").read_text()
    missing = [n for n in remesh.sharding.__all__ if n not in text and n not in guide]
    assert missing == []


def test_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if target:
            assert (PAGE.parent / target).exists(), target
        else:
            assert anchor in headings, anchor
