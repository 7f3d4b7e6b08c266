"""The pictures of the pages are what `docs/update_pictures.py` draws of real runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NUMBER = re.compile(r"-?\d+(\.\d+)?")

UPDATE: dict[str, Any] = runpy.run_path(str(DOCS / "update_pictures.py"))


@pytest.mark.parametrize("name", UPDATE["DRAWN"])
def test_a_picture_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    stored = (DOCS / "pictures" / name).read_text()
    drawn = UPDATE["DRAWN"][name](tmp_path)
    if name in UPDATE["TIMED"]:
        stored, drawn = NUMBER.sub("0", stored), NUMBER.sub("0", drawn)
    assert stored == drawn, "out of date; run python docs/update_pictures.py"
    assert "prefers-color-scheme: dark" in stored


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    pictures = {path.name for path in (DOCS / "pictures").iterdir()}
    assert pictures == set(UPDATE["DRAWN"])
    assert [name for name in pictures if f"pictures/{name})" not in pages] == []
