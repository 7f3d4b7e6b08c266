"""The same for torch, cut among two ranks and copied: a rank that dies takes nothing along."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.elastic import fsdp_job

uninterrupted = fsdp_job.uninterrupted


class Job(fsdp_job.Job):
    """See `numpy_job.Job`."""

    def divide(self, model: nn.Module) -> nn.Module:
        """Divide the model between two ranks, and copy it to the other pairs."""
        shape = dist.get_world_size() // 2, 2
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")))
        return model
