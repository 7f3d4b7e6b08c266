"""Package, pages and workflows claim the same versions of Python and torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.support.torch_versions import LACKS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "explanation" / "versions.md").read_text()


def newest(versions: set[str]) -> str:
    return max(versions, key=lambda text: [*map(int, text.split("."))])


def test_package_and_pages_claim_the_same_versions() -> None:
    rows = re.findall(r"^\| (2\.\d+) \| ([\d., ]+) \|", PAGE, re.MULTILINE)
    torches = {torch for torch, _ in rows}
    pythons = {python for _, some in rows for python in some.split(", ")}
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classifiers = " ".join(package["classifiers"])
    assert set(re.findall(r"Python :: (3\.\d+)", classifiers)) == pythons
    oldest = rows[0][0]
    assert package["optional-dependencies"]["torch"] == [f"torch>={oldest}"]
    assert f"torch>={oldest}" in package["optional-dependencies"]["dev"]
    assert package["requires-python"] == f">={rows[0][1]}"
    for page in ("README.md", "docs/explanation/faq.md", "CHANGELOG.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"Python 3.11 to {newest(pythons)}" in text, page
        claims = re.search(r"torch (2\.\d+) (?:to|or newer).*?(2\.\d+)", text)
        assert claims is not None, page
        assert (claims[1], claims[2]) == (oldest, newest(torches)), page


def test_workflows_run_the_claimed_versions_with_commands_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = []
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
        commands += [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        if file.name == "tests.yml":
            matrix = jobs["tests"]["strategy"]["matrix"]["include"]
            ran = {(row["torch"], row["python"]) for row in matrix}
    rows = re.findall(r"^\| (2\.\d+) \| ([\d., ]+) \|", PAGE, re.MULTILINE)
    assert ran == {(torch, python) for torch, some in rows for python in some.split(", ")}
    made = re.findall(r"\bmake ([a-z-]+)", "\n".join(commands))
    assert made
    assert set(made) <= targets


def test_the_page_says_what_older_versions_lack() -> None:
    assert re.findall(r"^\| (2\.\d+) \| (\D.*) \|$", PAGE, re.MULTILINE)[-len(LACKS) :] == [
        *LACKS.values()
    ]
