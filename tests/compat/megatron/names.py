"""What code on Megatron imports from its `dist_checkpointing`, read from its sources.

`python -m tests.compat.megatron.names FOLDER...` lists for each folder (that of a release, which
has `megatron` in it, or that of NeMo or Megatron Bridge) what the drop-in lacks, and which of that
the installed Megatron lends.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from remesh.compat import megatron

PACKAGE = "megatron.core.dist_checkpointing"
HOME = "remesh.compat.megatron"
HOMES = ("megatron", "nemo")
"""Packages that import it."""


def _absolute(node: ast.ImportFrom, package: list[str]) -> str:
    """The module that an import names, as seen from a package."""
    if not node.level:
        return node.module or ""
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _attributes(tree: ast.AST) -> Iterator[list[str]]:
    """`a.b.c` as ["a", "b", "c"]."""
    for node in ast.walk(tree):
        chain: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            chain.insert(0, value.attr)
            value = value.value
        if chain and isinstance(value, ast.Name):
            yield [value.id, *chain]


def imported(path: Path, root: Path) -> set[str]:
    """What a file imports from the package, as paths below it: `mapping.ShardedTensor`."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return set()
    package = list(path.relative_to(root).parts[:-1])
    found: set[str] = set()
    aliases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names if f"{one.name}.".startswith(f"{PACKAGE}.")}
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            names = {f"{module}.{one.name}": one.asname or one.name for one in node.names}
            found |= {name for name in names if name.startswith(f"{PACKAGE}.")}
            aliases |= {alias for name, alias in names.items() if name == PACKAGE}
    for first, *rest in _attributes(tree):
        if first in aliases:
            found.add(".".join([PACKAGE, *rest]))
        elif ".".join([first, *rest]).startswith(f"{PACKAGE}."):
            found.add(".".join([first, *rest]))
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in found} - {""}


def exists(name: str, home: str = HOME) -> bool:
    """Whether a package has a name, or the object that it is an attribute of."""
    parts = name.split(".")
    module, rest = importlib.import_module(home), parts
    while rest:
        try:
            module = importlib.import_module(f"{module.__name__}.{rest[0]}")
        except ModuleNotFoundError:
            return hasattr(module, rest[0])
        rest = rest[1:]
    return True


def missing(root: Path) -> dict[str, list[str]]:
    """What the drop-in lacks of what a release imports: name → files, relative to `root`."""
    found: dict[str, list[str]] = {}
    for path in sorted(one for name in HOMES for one in (root / name).rglob("*.py")):
        place = path.relative_to(root)
        if not str(place).startswith(PACKAGE.replace(".", "/")):
            for name in imported(path, root):
                if not exists(name):
                    found.setdefault(name, []).append(str(place))
    return found


if __name__ == "__main__":
    megatron.install()
    for argument in sys.argv[1:]:
        lacking = missing(Path(argument))
        lent = {name for name in lacking if exists(name, PACKAGE)}
        print(argument, {name: lacking[name] for name in lacking.keys() - lent}, sorted(lent))
