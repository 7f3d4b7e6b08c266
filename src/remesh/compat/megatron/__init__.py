"""Megatron's `dist_checkpointing` over remesh's engine: `from remesh.compat import megatron`.

A drop-in for `megatron.core.dist_checkpointing`, with its names in the same submodules. `install`
makes Megatron itself import it. Start reading at `serialization`. `mapping` has the classes that
describe shards, as boxes for the engine, and `strategies` has the backends.
Nothing here plans, moves bytes or knows a file format; the engine does.
"""

from remesh.compat.megatron.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
)
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from remesh.compat.megatron.redirect import install, uninstall
from remesh.compat.megatron.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from remesh.compat.megatron.validation import StrictHandling

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "install",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "uninstall",
]
