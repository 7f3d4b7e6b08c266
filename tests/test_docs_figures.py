"""Figures of the pages are those of the stored results."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

UPDATE: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parent.parent / "docs" / "update_figures.py")
)


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
    stored = (UPDATE["ROOT"] / "docs" / f"{name}.svg").read_text()
    assert stored == UPDATE["chart"](name), "run python docs/update_figures.py"


BY_HAND = {"## Planning"}
"""Sections with a table of a single measurement, which has its date beside it."""


def test_tables_of_figures_are_not_typed_by_hand() -> None:
    page = (UPDATE["ROOT"] / "docs" / "performance.md").read_text()
    section, typed = "", set()
    for line in UPDATE["BLOCK"].sub("", page).splitlines():
        section = line if line.startswith("## ") else section
        if line.startswith("|"):
            typed.add(section)
    assert typed <= BY_HAND
