# ruff: noqa: INP001 - a script, not a package
"""Bring docs/api.md up to date: `python docs/update_api.py`.

The page lists the public modules, and of each the names in its `__all__` with the first sentence of
their docstrings. It is read from the sources, so nothing is imported. What is not on the page may
change without notice.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PAGE = Path(__file__).with_name("api.md")
SOURCES = PAGE.parent.parent / "src"

MODULES = {
    "remesh": "[guide](guide.md), [manager](manager.md), [transformations](transform.md)",
    "remesh.errors": "[guide](guide.md#errors)",
    "remesh.sharding": "[parallelism](parallelism.md), [guide](guide.md#shards-made-by-hand)",
    "remesh.checkpoint": "[guide](guide.md), [foreign formats](how-to/foreign-formats.md#writing)",
    "remesh.background": "[guide](guide.md#background-saves)",
    "remesh.maintenance.repair": "[command line](cli.md#remesh-repair)",
    "remesh.formats": "[foreign formats](how-to/foreign-formats.md)",
    "remesh.core.index": "[guide](guide.md#looking-inside)",
    "remesh.transform": "[transformations](transform.md#which-bytes-a-target-needs)",
    "remesh.recipes": "[recipes](how-to/recipes.md)",
    "remesh.training": (
        "[manager](manager.md), [data position](data-position.md), [export](export.md)"
    ),
    "remesh.training.integrations.huggingface": "[Hugging Face](how-to/huggingface.md)",
    "remesh.training.integrations.lightning": "[Lightning](how-to/lightning.md)",
    "remesh.catalog": "[manager](manager.md#what-to-keep)",
    "remesh.events": "[guide](guide.md#watching)",
    "remesh.elastic": "[elastic](elastic.md#processes-that-go-on)",
    "remesh.elastic.client": "[elastic](elastic.md)",
    "remesh.elastic.status": "[command line](cli.md#remesh-status)",
    "remesh.storage": "[guide](guide.md#where-and-how)",
    "remesh.exchange": "[guide](guide.md#where-and-how)",
    "remesh.exchange.torch_group": "[guide](guide.md#where-and-how)",
}
"""The public modules, and the pages that explain them."""

FIRST = {"save": 0, "load": 1}
"""The names that come first in their modules."""

HEAD = """# Public names

Import each name from the module under which it is listed. The top level has the names that training
scripts use, and the errors that they catch. `python docs/update_api.py` writes this page from the
docstrings, and a test fails if it is out of date. The names in `remesh.compat` are those of other
systems: see [Megatron](how-to/from-megatron.md),
[Flex Checkpoint](how-to/from-flex-checkpoint.md), [ATorch](how-to/from-atorch.md).
"""


def page() -> str:
    """The page as it is to be."""
    sections = [HEAD]
    for module, where in MODULES.items():
        rows = [f"| `{name}` | {_summary(*home_of(module, name))} |" for name in names_of(module)]
        table = "\n".join(["| name | |", "|---|---|", *rows])
        sections.append(f"## {module}\n\nExplained in {where}.\n\n{table}\n")
    return "\n".join(sections)


def names_of(module: str) -> list[str]:
    """The public names of a module, apart from its version."""
    for node in _parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(node.value) if name != "__version__"]
            return sorted(names, key=lambda name: FIRST.get(name, len(FIRST)))
    raise ValueError(f"{module} has no __all__")


def home_of(module: str, name: str) -> tuple[str, str]:
    """The module that defines a name, and its name there."""
    for node in ast.walk(_parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return home_of(node.module, alias.name)
    return module, name


def _summary(module: str, name: str) -> str:
    """The first sentence of the docstring of a name, in one line."""
    body = _parsed(module).body
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _first_sentence(ast.get_docstring(node))
        if _is_assignment(node, name) and isinstance(below, ast.Expr):
            return _first_sentence(ast.literal_eval(below.value))
    raise ValueError(f"{module}.{name} has no docstring")


def _is_assignment(node: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a name."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target) == name
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name


def _first_sentence(docstring: str | None) -> str:
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return (sentence + stop.rstrip()).replace("|", "\\|")


@functools.cache
def _parsed(module: str) -> ast.Module:
    """The source of a module or package."""
    path = SOURCES / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
