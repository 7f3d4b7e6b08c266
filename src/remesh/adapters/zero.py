"""ZeroRedundancyOptimizer: every rank keeps the state of some of the parameters.

Parameters are given to ranks whole, so there is nothing to cut: each rank holds an ordinary
optimizer over its own, which is described as it is. The names in its groups are merged over the
ranks, and loading takes the state of whichever parameters a rank has now. The groups that the
trainer sees belong to the wrapper, which copies their options into the local ones at every step.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from remesh.adapters.optimizer import describe_optimizer
from remesh.core.state import Loaded, Path, Rebuild, Walk

_HOME = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero_redundancy(optimizer: object) -> bool:
    """Whether this is torch's ZeroRedundancyOptimizer.

    The class is asked for by name, because importing its module compiles code and takes seconds.
    """
    return any(kind.__module__ == _HOME for kind in type(optimizer).__mro__)


def describe_zero_redundancy(walk: Walk, path: Path, optimizer: Any) -> Rebuild:
    """Describe this rank's part of a ZeroRedundancyOptimizer."""
    local: Optimizer = optimizer.optim
    _copy_options(optimizer.param_groups, local.param_groups)
    rebuild_local = describe_optimizer(walk, path, local)

    def rebuild(loaded: Loaded) -> Any:
        rebuild_local(loaded)
        _copy_options(local.param_groups, optimizer.param_groups)
        return optimizer

    return rebuild


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Give groups the options of others, keeping their parameters."""
    for options, group in zip(source, target, strict=True):
        group.update({option: value for option, value in options.items() if option != "params"})
