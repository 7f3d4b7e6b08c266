"""The public names: each is imported from one documented place.

docs/api.md lists the public modules and the names in their `__all__`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import remesh

ROOT = Path(__file__).parent.parent
API: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "update_api.py"))
NAMES: dict[str, list[str]] = {module: API["names_of"](module) for module in API["MODULES"]}

TOP_LEVEL = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "Manager",
    "MismatchError",
    "RemeshError",
    "Resharder",
    "Saver",
    "ShardedTensor",
    "StorageError",
    "Transform",
    "__version__",
    "load",
    "reshard",
    "save",
    "save_async",
]

FORMAT_KEYS = {"remesh.json", "remesh.files", "remesh.aliases", "remesh.block_size"}
"""A file, and keys in files, that look like names of Python."""

FOREIGN = "remesh.compat"
"""Packages below have the names of other systems, at the places that these systems have."""


def test_the_top_level_holds_what_a_training_script_types() -> None:
    assert remesh.__all__ == TOP_LEVEL
    assert set(TOP_LEVEL) <= set(dir(remesh))
    assert "lazy_names" not in dir(remesh)


def test_the_page_of_public_names_is_up_to_date() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert API["page"]() == page, "docs/api.md is out of date; run python docs/update_api.py"


@pytest.mark.parametrize("module", [name for name in NAMES if ".integrations" not in name])
def test_every_public_name_can_be_imported(module: str) -> None:
    imported = importlib.import_module(module)
    assert all(getattr(imported, name) is not None for name in NAMES[module])


def test_a_name_has_one_place() -> None:
    places = defaultdict(list)
    for module, names in NAMES.items():
        for name in names:
            places[API["home_of"](module, name)].append(module)
    assert [f"{home}: {found}" for home, found in places.items() if len(found) > 1] == []


def test_every_error_is_public() -> None:
    found = {
        name
        for name, value in vars(remesh.errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert found == set(NAMES["remesh.errors"]) | {n for n in TOP_LEVEL if n.endswith("Error")}


def texts_for_users() -> list[tuple[str, str]]:
    """Name and text of what a user reads: README, the pages and the examples."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted(paths)]


def programs_in(name: str, text: str) -> list[ast.Module]:
    """The Python programs in a page, or the one that an example is."""
    blocks = [text] if name.endswith(".py") else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [ast.parse(block) for block in blocks]


def imports_in(program: ast.Module) -> list[str]:
    """The full names that a program imports from remesh."""
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "remesh"
        for alias in node.names
    ]


def is_public(full: str) -> bool:
    """Whether a dotted name is a public module, or a public name at its place."""
    module, _, name = full.rpartition(".")
    return full in NAMES or name in NAMES.get(module, ()) or full.startswith(FOREIGN)


def test_documentation_and_examples_import_names_from_their_place() -> None:
    wrong = [
        f"{page}: {full}"
        for page, text in texts_for_users()
        for program in programs_in(page, text)
        for full in imports_in(program)
        if not is_public(full)
    ]
    assert wrong == []


def test_documentation_and_examples_mention_names_at_their_place() -> None:
    # `remesh.Manager` or `remesh.errors.StateError`, in programs and in sentences. What follows a
    # public name (`remesh.Transform.parse`) is its own.
    wrong = []
    for page, text in texts_for_users():
        for full in re.findall(r"(?<![\w./-])remesh(?:\.[A-Za-z_]\w*)+(?![\w/-])", text):
            parts = full.split(".")
            shorter = [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
            if not any(is_public(name) for name in shorter) and full not in FORMAT_KEYS:
                wrong.append(f"{page}: {full}")
    assert wrong == []


def test_every_public_name_is_explained() -> None:
    """The list alone explains nothing: the names of the top level are on another page too."""
    text = "\n".join(text for name, text in texts_for_users() if name != "docs/api.md")
    assert [n for n in TOP_LEVEL if n[0] != "_" and not re.search(rf"\b{n}\b", text)] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = remesh.lode  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'Boxes'"):
        _ = remesh.sharding.Boxes  # type: ignore[attr-defined]
