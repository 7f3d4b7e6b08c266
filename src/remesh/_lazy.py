"""Public names that are resolved on first use.

`import remesh` costs next to nothing, and what needs no torch does not import it: a package whose
names come from several modules lists them by module, and imports a module when one of its names is
first asked for. Type checkers read the imports under `TYPE_CHECKING` instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, names_by_module: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, whose submodules need no import."""
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> object:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package])["__all__"], *module_of, *submodules})

    return get, names
