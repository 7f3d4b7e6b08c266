"""Plain English: words that pages, messages, help texts and docstrings do not use.

docs/glossary.md has the words to use. The pages are checked, and all texts in the sources of the
package: docstrings, help, messages and log lines. Comments are not.

The first line of an error or warning says what is wrong, and is short; where, and what to do,
follow on further lines. The texts are measured in the sources; of what is filled in, a name or a
number of `ASSUMED` characters is assumed. Drop-ins say what the systems say in whose place they
stand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "remesh"

BANNED = {
    r"whoever|whomever|nobody|somebody|anybody|everybody": "name the rank, process or caller",
    r"what stands": "name it: the prefix, the bytes, the stand-in",
    r"does not stand|do not stand": "does not survive",
    r"lest": "so that ... not",
    r"in vain": "without effect",
    r"for good": "say what ends it",
    r"made up": "generated",
    r"speaks? as they do": "with the same interface",
    r"went away|it went": "was closed, ended",
    r"the house": "the project",
    r"is of (?:no )?use": "say what for",
}
"""Pattern → what to write instead."""

PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in BANNED), re.IGNORECASE)

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference"),
]


def texts_in(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string in a module, the parts of f-strings too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def found_in(text: str) -> list[str]:
    return [match[0] for match in PATTERN.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_pages_are_in_plain_english(page: Path) -> None:
    assert found_in(page.read_text()) == []


def test_texts_of_the_package_are_in_plain_english() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in texts_in(path)
        if (found := found_in(text))
    ]
    assert wrong == []


def test_the_glossary_names_the_words_to_avoid() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert "## Words to avoid" in glossary


MAX_FIRST_LINE = 100
ASSUMED = "x" * 10


def text_of(node: ast.expr) -> str:
    """A message with `ASSUMED` in place of what is filled in."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr():
            parts = (part if isinstance(part, ast.Constant) else None for part in node.values)
            return "".join(ASSUMED if part is None else str(part.value) for part in parts)
        case ast.BinOp(op=ast.Add()):
            return text_of(node.left) + text_of(node.right)
    return ASSUMED


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of what is raised, and of warnings and errors of the log."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=[first, *others])):
                texts = [one for one in (first, *others[:1]) if not isinstance(one, ast.Name)]
                if texts:
                    yield node.lineno, text_of(texts[0])
            case ast.Call(
                func=ast.Attribute(value=log, attr="warning" | "error"), args=[first, *_]
            ):
                if "log" in ast.unparse(log).lower():
                    text = re.sub(r"%[-+ 0-9.]*[sdfgrx]", ASSUMED, text_of(first))
                    yield node.lineno, text


def test_first_lines_are_short() -> None:
    found = [
        (path.relative_to(SOURCE), line, text.splitlines()[0])
        for path in sorted(SOURCE.rglob("*.py"))
        if "compat" not in path.relative_to(SOURCE).parts
        for line, text in messages(ast.parse(path.read_text()))
        if text
    ]
    assert len(found) > 600
    long = [f"{path}:{line}: {text}" for path, line, text in found if len(text) > MAX_FIRST_LINE]
    assert long == []
