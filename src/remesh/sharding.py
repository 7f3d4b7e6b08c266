"""Layouts declared by hand: what a rank holds where no framework says it.

`remesh.ShardedTensor` describes one rank's boxes of a tensor; here are its relatives. A `Part` is
one box and its array. `ShardedObject` is a value that differs between ranks,
`ShardedTensorFactory` stores something in another form than it has in memory, and a
`LocalNonpersistentObject` is not stored. `build_sharded_state_dict` and `shard_weight` describe
layers that were cut by hand, `NamedModule` and `rename_shards` layers and experts with global
numbers, `flat_partition` slices of flattened parameters, `DescribedOptimizer` an optimizer over
such slices or over copies of parameters. docs/parallelism.md shows all of them.

Names are resolved on first use: those that describe modules and optimizers import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.adapters import (
        Block,
        DescribedOptimizer,
        FlatSpan,
        NamedModule,
        Split,
        build_sharded_state_dict,
        default_sharded_state_dict,
        flat_partition,
        rename_shards,
        shard_weight,
    )
    from remesh.core.geometry import Box
    from remesh.core.sharded import (
        LocalNonpersistentObject,
        Part,
        ShardedObject,
        ShardedTensorFactory,
    )
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
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
            "remesh.core.geometry": ("Box",),
            "remesh.core.sharded": (
                "LocalNonpersistentObject",
                "Part",
                "ShardedObject",
                "ShardedTensorFactory",
            ),
        },
    )

__all__ = [
    "Block",
    "Box",
    "DescribedOptimizer",
    "FlatSpan",
    "LocalNonpersistentObject",
    "NamedModule",
    "Part",
    "ShardedObject",
    "ShardedTensorFactory",
    "Split",
    "build_sharded_state_dict",
    "default_sharded_state_dict",
    "flat_partition",
    "rename_shards",
    "shard_weight",
]
