"""What to do about the learning rate when a step takes another number of samples than before.

After a change of the world size the global batch is larger or smaller, and hyperparameters that
were chosen for the old one may not fit. There is no right answer for every job, so the user
chooses a rule:

* `none`: leave everything as it is.
* `linear`: multiply learning rates by the growth of the global batch (Goyal et al., Accurate, Large
  Minibatch SGD, 2017). Meant for SGD.
* `sqrt`: by its square root (Krizhevsky, One weird trick for parallelizing convolutional neural
  networks, 2014). For adaptive optimizers such as Adam (Malladi et al., On the SDEs and Scaling
  Rules for Adaptive Gradient Algorithms, 2022, who change its betas and epsilon as well).
* `accumulate`: keep the global batch, by adding up the gradients of more or fewer batches.

`decide_scaling` is a pure function that turns the rule into a decision; `apply_scaling` carries it
out. The decision goes into the state as a plain value, so that the next resume knows which global
batch the stored learning rates belong to, and a reader of the checkpoint how they came about.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import torch
from torch.optim import Optimizer

from remesh._repr import short_repr
from remesh.training.steps import GlobalBatch

ScalingRule = Literal["none", "linear", "sqrt", "accumulate"]

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr")
"""Where torch's optimizers and schedulers keep learning rates, other than as factors of others."""

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The decision on a change of the global batch."""

    rule: ScalingRule
    """The rule that the user chose."""
    old: GlobalBatch
    """The global batch before."""
    new: GlobalBatch
    """The global batch from now on; its `accumulation` is what the training loop must do."""
    lr_factor: float
    """What every learning rate is multiplied by."""

    __repr__ = short_repr

    def to_value(self) -> dict[str, Any]:
        """As a plain value, to be kept in a state."""
        return asdict(self)

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """The decision that `to_value` gave."""
        old, new = GlobalBatch(**value["old"]), GlobalBatch(**value["new"])
        return cls(value["rule"], old, new, value["lr_factor"])

    def __str__(self) -> str:
        return (
            f"global batch {self.old} = {self.old.num_samples} -> {self.new} = "
            f"{self.new.num_samples}; rule {self.rule}: learning rates x {self.lr_factor:g}"
        )


def decide_scaling(rule: ScalingRule, old: GlobalBatch, new: GlobalBatch) -> ScalingDecision:
    """Decide what a rule means for a change of the global batch.

    Args:
        rule: See the docstring of the module.
        old: The global batch that the learning rates belong to.
        new: That of this job. The rule `accumulate` replaces its accumulation.

    Raises:
        ValueError: If the rule is `accumulate` and the old global batch does not divide into
            batches of the new ranks; the message says which sizes would do.
    """
    factor = new.num_samples / old.num_samples
    if rule == "none":
        return ScalingDecision(rule, old, new, 1.0)
    if rule == "linear":
        return ScalingDecision(rule, old, new, factor)
    if rule == "sqrt":
        return ScalingDecision(rule, old, new, math.sqrt(factor))
    if rule == "accumulate":
        return ScalingDecision(rule, old, _accumulated(old, new), 1.0)
    raise ValueError(f"rule must be 'none', 'linear', 'sqrt' or 'accumulate', got {rule!r}")


def apply_scaling(
    decision: ScalingDecision, optimizer: Optimizer, schedulers: Iterable[object] = ()
) -> None:
    """Multiply the learning rates of an optimizer and of its schedulers, and log why.

    Call it once, after the optimizer and the schedulers have been loaded. From then on the learning
    rate is at every step `lr_factor` times what it would have been. Schedules still count steps: a
    warm-up of 100 steps takes 100 steps of the new size.

    Args:
        decision: What was decided.
        optimizer: Every parameter group of it is changed.
        schedulers: Its schedulers, those inside a `SequentialLR` or `ChainedScheduler` included by
            themselves. One of your own is changed where it keeps what torch's keep, in `base_lrs`.
    """
    _log.info("%s", decision)
    factor = decision.lr_factor
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for name in _GROUP_RATES:
            rate = group.get(name)
            if isinstance(rate, torch.Tensor):
                rate.mul_(factor)  # a compiled or capturable step holds on to this tensor
            elif rate is not None:
                group[name] = rate * factor
    for scheduler in schedulers:
        _scale_scheduler(scheduler, factor)


def _scale_scheduler(scheduler: object, factor: float) -> None:
    for name in _SCHEDULER_RATES:
        rate = getattr(scheduler, name, None)
        # Schedulers share such lists now and then, so they get new ones.
        if isinstance(rate, list):
            setattr(scheduler, name, [one * factor for one in rate])
        elif rate is not None:
            setattr(scheduler, name, rate * factor)
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(inner, factor)


def _accumulated(old: GlobalBatch, new: GlobalBatch) -> GlobalBatch:
    """The new ranks and batch size, with the accumulation that gives the old global batch."""
    accumulation, rest = divmod(old.num_samples, new.world_size * new.batch_size)
    if not rest:
        return replace(new, accumulation=accumulation)
    share, uneven = divmod(old.num_samples, new.world_size)
    if uneven:
        remedy = f"it does not divide among {new.world_size} ranks: take another world size"
    else:
        fitting = [size for size in range(1, share + 1) if share % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - new.batch_size))
        remedy = f"the nearest batch_size that does is {nearest}"
    raise ValueError(
        f"a global batch of {old.num_samples} samples ({old}) does not fit the ranks\n"
        f"Batches are of {new.world_size} ranks x {new.batch_size} samples; {remedy}. The "
        "rules 'linear' and 'sqrt' take any global batch"
    )
