"""docs/compatibility.md says what these tests check."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    page = runpy.run_path(str(DOCS / "update_compatibility.py"))["page_of"](set())
    message = "docs/compatibility.md is out of date; run python docs/update_compatibility.py"
    assert (DOCS / "compatibility.md").read_text() == page, message
