"""The first line of an error or warning says what is wrong, and is short.

Where, and what to do, follow on further lines. The texts are measured in the sources; of what is
filled in, a name or a number of `ASSUMED` characters is assumed. Drop-ins say what the systems say
in whose place they stand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "remesh"

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
