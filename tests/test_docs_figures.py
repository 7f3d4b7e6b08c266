"""Figures and pictures of the pages are what `docs/update_*.py` make of results and real runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NUMBER = re.compile(r"-?\d+(\.\d+)?")
UPDATE: dict[str, Any] = runpy.run_path(str(DOCS / "update_figures.py"))
PICTURES: dict[str, Any] = runpy.run_path(str(DOCS / "update_pictures.py"))


@pytest.mark.parametrize("page", UPDATE["pages"](), ids=lambda page: page.stem)
def test_figures_are_those_of_the_stored_results(page: Path) -> None:
    text = page.read_text()
    assert UPDATE["updated"](text) == text, "out of date; run python docs/update_figures.py"


def test_every_stored_result_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in UPDATE["pages"]())
    shown = {name.split(".")[0] for _, name, _ in UPDATE["BLOCK"].findall(text)}
    assert shown == {path.stem for path in UPDATE["RESULTS"].glob("*.json")}


@pytest.mark.parametrize("name", UPDATE["CHARTS"])
def test_charts_are_those_of_the_stored_results(name: str) -> None:
    stored = (DOCS / f"{name}.svg").read_text()
    assert stored == UPDATE["chart"](name), "run python docs/update_figures.py"


BY_HAND = {"## Planning"}
"""Sections with a table of a single measurement, which has its date beside it."""


def test_tables_of_figures_are_not_typed_by_hand() -> None:
    page = (DOCS / "performance.md").read_text()
    section, typed = "", set()
    for line in UPDATE["BLOCK"].sub("", page).splitlines():
        section = line if line.startswith("## ") else section
        if line.startswith("|"):
            typed.add(section)
    assert typed <= BY_HAND


@pytest.mark.parametrize("name", PICTURES["DRAWN"])
def test_a_picture_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    stored = (DOCS / "pictures" / name).read_text()
    drawn = PICTURES["DRAWN"][name](tmp_path)
    if name in PICTURES["TIMED"]:
        stored, drawn = NUMBER.sub("0", stored), NUMBER.sub("0", drawn)
    assert stored == drawn, "out of date; run python docs/update_pictures.py"
    assert "prefers-color-scheme: dark" in stored


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    pictures = {path.name for path in (DOCS / "pictures").iterdir()}
    assert pictures == set(PICTURES["DRAWN"])
    assert [name for name in pictures if f"pictures/{name})" not in pages] == []
