"""Imports of `megatron.core.dist_checkpointing` lead to the drop-in.

`install` adds a finder to `sys.meta_path`, before all others. For that package and every module
below it, the finder imports the module of the drop-in at the same place and enters that very module
in `sys.modules`, so a class has one identity whichever name it is imported by. The modules of
`FROM_RELEASE` are files of the installed Megatron: they import what they stand on, `mapping`,
`utils`, `validation` and others, and so get the drop-in's. Anything else is not found.

Code that has imported a name keeps it. So `install` has to come before the first import of
Megatron, and `uninstall` forgets Megatron's modules, which hold the drop-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from remesh.errors import StateError

REPLACED = "megatron.core.dist_checkpointing"
"""The package whose imports are redirected."""

FROM_RELEASE = frozenset(
    {
        "gpt_checkpoint_interop",
        "strategies.checkpointable",
        "strategies.resharding",
        "tensor_aware_state_dict",
    }
)
"""Modules below `REPLACED` that the installed release provides, those of them that it has."""

_HOME = __package__


class _Finder(MetaPathFinder):
    """Finds the modules of `REPLACED` in the drop-in."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface is Python's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module of the drop-in at the same place, or None for modules of other packages."""
        if fullname != REPLACED and not fullname.startswith(f"{REPLACED}."):
            return None
        below = fullname.removeprefix(REPLACED)
        if below.removeprefix(".") in FROM_RELEASE:
            return _spec_from_release(fullname)
        name = _HOME + below
        if importlib.util.find_spec(name) is None:
            return None
        return ModuleSpec(fullname, _Alias(name))


def _spec_from_release(fullname: str) -> ModuleSpec | None:
    """The file of the installed Megatron, or None if that release has none."""
    above = sys.modules["megatron.core"]  # Python imports parents first
    folders = fullname.removeprefix(f"{above.__name__}.").split(".")[:-1]
    return PathFinder.find_spec(fullname, ["/".join([root, *folders]) for root in above.__path__])


class _Alias(Loader):
    """Enters a module under a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python; `exec_module` replaces what it makes."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module by its own name and enter it in place of `module`."""
        sys.modules[module.__name__] = importlib.import_module(self._name)


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
