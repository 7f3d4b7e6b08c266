"""The names of ATorch's FSDP checkpoints, for FSDP1 and FSDP2.

Programs that save with `save_fsdp_flat_param` and `save_fsdp_optim_param`, and come back with
`init_empty_weights_with_disk_offload` and `ShardOptim`, run on remesh by a change of the import.
The files are laid out as ATorch lays them out (`remesh.formats.flat_param`), but for the meta
files, which are JSON here and not pickles. docs/how-to/from-atorch.md says what is different.
"""

from remesh.compat.atorch.loading import ShardOptim, init_empty_weights_with_disk_offload
from remesh.compat.atorch.saving import save_fsdp_flat_param, save_fsdp_optim_param

__all__ = [
    "ShardOptim",
    "init_empty_weights_with_disk_offload",
    "save_fsdp_flat_param",
    "save_fsdp_optim_param",
]
