"""Imports of `megatron.core.dist_checkpointing` lead to the drop-in.

`install` adds a finder to `sys.meta_path`, before all others. For that package and every module
below it, the finder imports the module of the drop-in at the same place and enters that very module
in `sys.modules`, so a class has one identity whichever name it is imported by. Everything that the
drop-in lacks is the installed Megatron's: whole modules, and single names of modules that the
drop-in has. These files import what they stand on, `mapping`, `utils`, `strategies.base` and
others, and so get the drop-in's.

Code that has imported a name keeps it. So `install` has to come before the first import of
Megatron, and `uninstall` forgets Megatron's modules, which hold the drop-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from remesh.errors import StateError

REPLACED = "megatron.core.dist_checkpointing"
"""The package whose imports are redirected."""

_HOME = __package__
_OF_RELEASE = "_of_release"
"""What follows the name of a module of Megatron that lends names to the drop-in's at its place."""
_OWN = "__own__"
"""Where such a module keeps what it had itself of the names that the drop-in has too."""


class _Finder(MetaPathFinder):
    """Finds the modules of `REPLACED` in the drop-in, or else in the installed Megatron."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface is Python's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module at the same place, or None for modules of other packages."""
        if fullname != REPLACED and not fullname.startswith(f"{REPLACED}."):
            return None
        name = _HOME + fullname.removeprefix(REPLACED)
        if importlib.util.find_spec(name) is None:
            return _spec_from_release(fullname.removesuffix(_OF_RELEASE), fullname)
        return ModuleSpec(fullname, _Alias(name))


def _spec_from_release(place: str, name: str) -> ModuleSpec | None:
    """The spec of a module `name` that runs the installed Megatron's file at `place`, if any."""
    above = sys.modules["megatron.core"]  # Python imports parents first
    folders = place.removeprefix(f"{above.__name__}.").split(".")[:-1]
    found = PathFinder.find_spec(place, ["/".join([root, *folders]) for root in above.__path__])
    if found is None or found.origin is None:
        return None
    return importlib.util.spec_from_file_location(name, found.origin)


class _Alias(Loader):
    """Enters a module under a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python; `exec_module` replaces what it makes."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module by its own name and enter it in place of `module`."""
        ours = sys.modules[module.__name__] = importlib.import_module(self._name)

        def lent(name: str) -> Any:
            """A name that the drop-in's module lacks, from Megatron's at its place."""
            if is_installed() and not name.startswith("__"):
                below = f"{module.__name__}.{name}"
                if hasattr(ours, "__path__") and importlib.util.find_spec(below):
                    return importlib.import_module(below)
                release = _of_release(module.__name__, ours)
                if release is not None:
                    return getattr(release, name)
            raise AttributeError(f"module {ours.__name__!r} has no attribute {name!r}")

        vars(ours)["__getattr__"] = lent


def _of_release(place: str, ours: ModuleType) -> ModuleType | None:
    """Megatron's module at a place, with the drop-in's in place of what both define."""
    name = place + _OF_RELEASE
    if name in sys.modules:
        return importlib.import_module(name)  # waits if another thread imports it
    if importlib.util.find_spec(name) is None:
        return None
    found = importlib.import_module(name)
    own = vars(found)[_OWN] = {
        key: value
        for key, value in vars(found).items()
        if getattr(value, "__module__", None) == name and key in vars(ours)
    }
    vars(found).update({key: vars(ours)[key] for key in own})
    return found


def of_release(module: str, name: str) -> Any:
    """What the installed Megatron itself has under a name of one of its modules.

    None if it has none, is not installed, or is not redirected.
    """
    place = f"{REPLACED}.{module}"
    release = None
    # The finder fails in one of these ways if there is no Megatron.
    with suppress(ImportError, KeyError):
        release = is_installed() and _of_release(place, importlib.import_module(place))
    return vars(release)[_OWN].get(name, getattr(release, name, None)) if release else None


def is_installed() -> bool:
    """True if imports of Megatron's package lead to the drop-in."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Make every import of `megatron.core.dist_checkpointing` give the drop-in. Idempotent.

    `StateError` if Megatron's own package was imported before.
    """
    if is_installed():
        return
    imported = sorted(
        name
        for name in sys.modules
        if name == REPLACED or name.startswith((f"{REPLACED}.", "megatron.training."))
    )
    if imported:
        raise StateError(
            f"{imported[0]} was imported before the drop-in was installed\n"
            "  modules that hold Megatron's own classes keep them, so both would be mixed\n"
            "  call remesh.compat.megatron.install() before the first import of Megatron, or run "
            "`python -m remesh.compat.megatron SCRIPT`"
        )
    sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Make imports of Megatron's package give Megatron's own again.

    Modules of Megatron that were imported meanwhile hold the drop-in and are forgotten: the next
    import loads them anew. References to them stay what they are.
    """
    if not is_installed():
        return
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Finder)]
    for name in [one for one in sys.modules if one == "megatron" or one.startswith("megatron.")]:
        del sys.modules[name]
