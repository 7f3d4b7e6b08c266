"""The same for torch without cutting: each rank holds the whole model. It can be entered again."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.elastic import fsdp_job

uninterrupted = fsdp_job.uninterrupted


class Job(fsdp_job.Job):
    """See `numpy_job.Job`."""

    def divide(self, model: nn.Module) -> nn.Module:
        """Have the ranks add up their gradients."""
        return DistributedDataParallel(model)
