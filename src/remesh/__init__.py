"""remesh keeps the state of PyTorch training jobs: save on any mesh, load on any other.

Names are resolved on first use, so that `import remesh` costs nothing and the parts that need no
torch (inspection, the command line) never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.adapters import Block as Block
    from remesh.adapters import DescribedOptimizer as DescribedOptimizer
    from remesh.adapters import FlatSpan as FlatSpan
    from remesh.adapters import NamedModule as NamedModule
    from remesh.adapters import Split as Split
    from remesh.adapters import build_sharded_state_dict as build_sharded_state_dict
    from remesh.adapters import default_sharded_state_dict as default_sharded_state_dict
    from remesh.adapters import flat_partition as flat_partition
    from remesh.adapters import rename_shards as rename_shards
    from remesh.adapters import shard_weight as shard_weight
    from remesh.checkpoint import Checkpoint as Checkpoint
    from remesh.checkpoint import RestoreReport as RestoreReport
    from remesh.checkpoint import SaveHandle as SaveHandle
    from remesh.checkpoint import Saver as Saver
    from remesh.checkpoint import load as load
    from remesh.checkpoint import save as save
    from remesh.checkpoint import save_async as save_async
    from remesh.errors import AgentLostError as AgentLostError
    from remesh.errors import CheckpointError as CheckpointError
    from remesh.errors import CheckpointExistsError as CheckpointExistsError
    from remesh.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from remesh.errors import CheckpointReplacedError as CheckpointReplacedError
    from remesh.errors import CorruptCheckpointError as CorruptCheckpointError
    from remesh.errors import CoverageError as CoverageError
    from remesh.errors import DivergedReplicaError as DivergedReplicaError
    from remesh.errors import ExchangeError as ExchangeError
    from remesh.errors import FormatVersionError as FormatVersionError
    from remesh.errors import MasterError as MasterError
    from remesh.errors import MismatchError as MismatchError
    from remesh.errors import NameCollisionError as NameCollisionError
    from remesh.errors import NoSpaceError as NoSpaceError
    from remesh.errors import NotSharedError as NotSharedError
    from remesh.errors import PickleRefusedError as PickleRefusedError
    from remesh.errors import RankFailedError as RankFailedError
    from remesh.errors import RemeshError as RemeshError
    from remesh.errors import StateError as StateError
    from remesh.errors import StorageError as StorageError
    from remesh.errors import TransformError as TransformError
    from remesh.errors import UnsupportedValueError as UnsupportedValueError
    from remesh.formats.table import Source as Source
    from remesh.geometry import Box as Box
    from remesh.index import Index as Index
    from remesh.resharding import Resharder as Resharder
    from remesh.resharding import ReshardReport as ReshardReport
    from remesh.resharding import reshard as reshard
    from remesh.sharded import LocalNonpersistentObject as LocalNonpersistentObject
    from remesh.sharded import Part as Part
    from remesh.sharded import ShardedObject as ShardedObject
    from remesh.sharded import ShardedTensor as ShardedTensor
    from remesh.sharded import ShardedTensorFactory as ShardedTensorFactory
    from remesh.training.manager import Manager as Manager
    from remesh.transform import Transform as Transform

__version__ = "0.1.0"

_HOMES = {
    "remesh.adapters": (
        "Block",
        "DescribedOptimizer",
        "FlatSpan",
        "NamedModule",
        "Split",
        "build_sharded_state_dict",
        "default_sharded_state_dict",
        "flat_partition",
        "rename_shards",
        "shard_weight",
    ),
    "remesh.checkpoint": (
        "Checkpoint",
        "RestoreReport",
        "SaveHandle",
        "Saver",
        "load",
        "save",
        "save_async",
    ),
    "remesh.errors": (
        "AgentLostError",
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CheckpointReplacedError",
        "CorruptCheckpointError",
        "CoverageError",
        "DivergedReplicaError",
        "ExchangeError",
        "FormatVersionError",
        "MasterError",
        "MismatchError",
        "NameCollisionError",
        "NoSpaceError",
        "NotSharedError",
        "PickleRefusedError",
        "RankFailedError",
        "RemeshError",
        "StateError",
        "StorageError",
        "TransformError",
        "UnsupportedValueError",
    ),
    "remesh.formats.table": ("Source",),
    "remesh.geometry": ("Box",),
    "remesh.index": ("Index",),
    "remesh.resharding": ("ReshardReport", "Resharder", "reshard"),
    "remesh.sharded": (
        "LocalNonpersistentObject",
        "Part",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
    "remesh.training.manager": ("Manager",),
    "remesh.transform": ("Transform",),
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
