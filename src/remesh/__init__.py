"""remesh keeps the state of PyTorch training jobs: save on any mesh, load on any other.

Names are resolved on first use, so that `import remesh` costs nothing and the parts that need no
torch (inspection, the command line) never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.checkpoint import Checkpoint, RestoreReport, load, save
    from remesh.errors import *  # noqa: F403
    from remesh.geometry import Box
    from remesh.index import Index
    from remesh.state import (
        LocalNonpersistentObject,
        Part,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

__version__ = "0.1.0"

_HOMES = {
    "remesh.checkpoint": ("Checkpoint", "RestoreReport", "load", "save"),
    "remesh.errors": (
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CorruptCheckpointError",
        "CoverageError",
        "DivergedReplicaError",
        "ExchangeError",
        "FormatVersionError",
        "MismatchError",
        "NameCollisionError",
        "NoSpaceError",
        "RankFailedError",
        "RemeshError",
        "StateError",
        "StorageError",
        "UnsupportedValueError",
    ),
    "remesh.geometry": ("Box",),
    "remesh.index": ("Index",),
    "remesh.state": (
        "LocalNonpersistentObject",
        "Part",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - the names are in the table above


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
