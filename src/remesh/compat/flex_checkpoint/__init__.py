"""The names of PaddlePaddle's Flex Checkpoint, for PyTorch tensors.

Programs that describe their state by `ShardedWeight`s, and save, load and reshard it by
`save_state_dict`, `load_state_dict` and `reshard_sharded_state_dict`, run on remesh's engine by a
change of the import. Names and arguments are Flex Checkpoint's; layouts, plans, files and errors
are remesh's own. docs/how-to/from-flex-checkpoint.md says what is different.
"""

from remesh.compat.flex_checkpoint.shards import (
    ShardInfo,
    check_dst_state_dict_validity,
    check_src_dst_state_dict_validity,
    check_src_state_dict_validity,
    flat_range_in_min_slice,
    get_overlap_region,
    minimal_nd_slice,
    ravel_index,
    unravel_index,
)
from remesh.compat.flex_checkpoint.state_dicts import (
    clear_async_save_task_queue,
    get_rank_to_files,
    load_state_dict,
    reshard_sharded_state_dict,
    save_state_dict,
)
from remesh.compat.flex_checkpoint.weights import (
    ShardedTensor,
    ShardedWeight,
    ShardedWeightDesc,
    assign_sharded_slice,
    build_shard_desc,
    build_sharded_state_dict,
    is_sharded_state_dict,
    make_replicated_sharded_tensor,
    make_replicated_sharded_weight,
    make_tp_sharded_tensor_for_checkpoint,
    make_tp_sharded_weight_for_checkpoint,
    merge_shard_info_list,
    shard_weight,
)
from remesh.formats.paddle import LocalTensorIndex, LocalTensorMetadata, Metadata

__all__ = [
    "LocalTensorIndex",
    "LocalTensorMetadata",
    "Metadata",
    "ShardInfo",
    "ShardedTensor",
    "ShardedWeight",
    "ShardedWeightDesc",
    "assign_sharded_slice",
    "build_shard_desc",
    "build_sharded_state_dict",
    "check_dst_state_dict_validity",
    "check_src_dst_state_dict_validity",
    "check_src_state_dict_validity",
    "clear_async_save_task_queue",
    "flat_range_in_min_slice",
    "get_overlap_region",
    "get_rank_to_files",
    "is_sharded_state_dict",
    "load_state_dict",
    "make_replicated_sharded_tensor",
    "make_replicated_sharded_weight",
    "make_tp_sharded_tensor_for_checkpoint",
    "make_tp_sharded_weight_for_checkpoint",
    "merge_shard_info_list",
    "minimal_nd_slice",
    "ravel_index",
    "reshard_sharded_state_dict",
    "save_state_dict",
    "shard_weight",
    "unravel_index",
]
