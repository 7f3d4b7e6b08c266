"""The site of the documentation: it builds without a warning, and each public name has one page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_and_has_each_public_name_once(tmp_path: Path) -> None:
    # A copy, because the pages of the reference are written beside the others.
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("reference"))
    for name in ("README.md", "examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [*(sys.executable, "-m", "sphinx", "--builder", "html", "--quiet"), "docs", "site"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = list((tmp_path / "site" / "reference").glob("*.html"))
    text = "".join(page.read_text() for page in pages)
    api = (ROOT / "docs" / "api.md").read_text()
    for section in api.split("\n## ")[1:]:
        module = section.split("\n", 1)[0]
        for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE):
            assert text.count(f'id="{module}.{name}"') == 1, f"{module}.{name}"
