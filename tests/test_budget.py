"""Budgets on length: each room of the package may have so many lines, docstrings included.

A change that adds lines to a room takes as many away from it, or gives the room some of another's.
`BUDGETS` is a ratchet: a change that makes a room shorter lowers its number, and a test fails
where it was forgotten. The second number is where the room is going.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "remesh"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
"""Without the docstring."""
SLACK = 60
"""Lines that a room may be below its budget before the budget must be lowered."""

BUDGETS = {  # room: lines at most now, and in the end; "" is the root
    "": (1033, 1200),
    "adapters": (3627, 3200),
    "background": (1595, 1400),
    "catalog": (772, 900),
    "checkpoint": (6113, 4900),
    "cli": (2915, 3700),
    "compat": (4183, 4100),
    "core": (3828, 4990),
    "demo": (1025, 1000),
    "elastic": (7685, 6300),
    "exchange": (1012, 800),
    "formats": (6997, 7000),
    "kubernetes": (1908, 2000),
    "maintenance": (1221, 1100),
    "pipeline": (2698, 2750),
    "planner": (1365, 1450),
    "recipes": (508, 400),
    "storage": (2352, 2580),
    "training": (4661, 4630),
    "transform": (4155, 4300),
}


def lines_by_room() -> dict[str, int]:
    """Lines of Python of each folder of the package, and of the modules at its root."""
    lines = dict.fromkeys(BUDGETS, 0)
    for path in MODULES:
        parents = path.relative_to(SOURCE).parts[:-1]
        room = parents[0] if parents else ""
        lines[room] = lines.get(room, 0) + path.read_text().count("\n")
    return lines


def long_functions(path: Path) -> list[str]:
    """The functions of a module that are longer than they may be."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = 0
            if ast.get_docstring(node) is not None:
                docstring = (first.end_lineno or first.lineno) - first.lineno + 1
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path.relative_to(SOURCE)}: {node.name}")
    return found


def test_rooms_stay_within_their_budgets() -> None:
    lines = lines_by_room()
    assert lines.keys() == BUDGETS.keys(), "each room has a budget, and each budget a room"
    over = {room: (lines[room], most) for room, (most, _) in BUDGETS.items() if lines[room] > most}
    assert over == {}, "lines and budget of rooms that grew"


def test_budgets_follow_rooms_that_shrink() -> None:
    lines = lines_by_room()
    loose = {
        room: (lines[room], most)
        for room, (most, goal) in BUDGETS.items()
        if lines[room] < most - SLACK and most > goal
    }
    assert loose == {}, "lower these budgets to the lines that the rooms have now"


def test_functions_stay_short() -> None:
    assert [name for path in MODULES for name in long_functions(path)] == []


def test_modules_say_what_they_are_for() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
