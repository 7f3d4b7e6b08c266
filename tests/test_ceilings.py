"""Ceilings on length: whoever meets one looks for the missing idea instead of raising it."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
"""Without the docstring."""


def too_long(path: Path) -> list[str]:
    """The module and its functions that are longer than they may be."""
    text, place = path.read_text(), path.relative_to(SOURCE)
    found = [str(place)] if text.count("\n") > MAX_MODULE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = 0
            if ast.get_docstring(node) is not None:
                docstring = (first.end_lineno or first.lineno) - first.lineno + 1
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
            if length > MAX_FUNCTION_LINES:
                found.append(f"{place}: {node.name}")
    return found


def test_modules_and_functions_stay_short() -> None:
    assert [name for path in MODULES for name in too_long(path)] == []


def test_modules_say_what_they_are_for() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
