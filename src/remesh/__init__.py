"""remesh saves and loads the state of PyTorch training jobs: save on any mesh, load on any other.

Here is what a training script types. The rest of the interface lies in the modules that
docs/api.md lists: `remesh.sharding` declares layouts by hand, `remesh.errors` has every exception,
`remesh.training` what a `Manager` takes.

Names are resolved on first use, so that `import remesh` costs nothing and the parts that need no
torch (inspection, the command line) never import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh import background as background
    from remesh import catalog as catalog
    from remesh import checkpoint as checkpoint
    from remesh import elastic as elastic
    from remesh import errors as errors
    from remesh import events as events
    from remesh import exchange as exchange
    from remesh import formats as formats
    from remesh import recipes as recipes
    from remesh import sharding as sharding
    from remesh import storage as storage
    from remesh import training as training
    from remesh import transform as transform
    from remesh.background import Saver as Saver
    from remesh.background import save_async as save_async
    from remesh.checkpoint import Checkpoint as Checkpoint
    from remesh.checkpoint import Resharder as Resharder
    from remesh.checkpoint import load as load
    from remesh.checkpoint import reshard as reshard
    from remesh.checkpoint import save as save
    from remesh.core.sharded import ShardedTensor as ShardedTensor
    from remesh.errors import CheckpointExistsError as CheckpointExistsError
    from remesh.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from remesh.errors import CorruptCheckpointError as CorruptCheckpointError
    from remesh.errors import MismatchError as MismatchError
    from remesh.errors import RemeshError as RemeshError
    from remesh.errors import StorageError as StorageError
    from remesh.training.manager import Manager as Manager
    from remesh.transform import Transform as Transform
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "remesh.background": ("Saver", "save_async"),
            "remesh.checkpoint": ("Checkpoint", "Resharder", "load", "reshard", "save"),
            "remesh.errors": (
                "CheckpointExistsError",
                "CheckpointNotFoundError",
                "CorruptCheckpointError",
                "MismatchError",
                "RemeshError",
                "StorageError",
            ),
            "remesh.core.sharded": ("ShardedTensor",),
            "remesh.training.manager": ("Manager",),
            "remesh.transform": ("Transform",),
        },
        (
            "background",
            "catalog",
            "checkpoint",
            "elastic",
            "errors",
            "events",
            "exchange",
            "formats",
            "recipes",
            "sharding",
            "storage",
            "training",
            "transform",
        ),
    )

__version__ = "0.1.0"

__all__ = [
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
