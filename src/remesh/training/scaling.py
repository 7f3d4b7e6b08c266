"""What changes when a step takes another number of samples than before: steps and learning rates.

A script that counts steps and skips as many when it resumes assumes that a step always takes the
same samples. If it does not, because there are more ranks or larger batches, `convert_step` gives
the new count: the samples that were trained on stay what they are, the number of steps follows. A
script that stores a sample position (`remesh.training.sampling`) needs none of this.

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
from typing import TYPE_CHECKING, Any, Literal, Self

from remesh._repr import short_repr

if TYPE_CHECKING:
    from torch.optim import Optimizer

Rounding = Literal["exact", "down", "up"]

ScalingRule = Literal["none", "linear", "sqrt", "accumulate"]

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr")
"""Where torch's optimizers and schedulers keep learning rates, other than as factors of others."""

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one step of the optimizer: ranks, batch size and accumulation.

    Raises:
        ValueError: If one of them is not positive.
    """

    world_size: int
    """Ranks that share the samples: those of the data-parallel axis."""
    batch_size: int = 1
    """Samples of a batch of one rank."""
    accumulation: int = 1
    """Batches of one rank whose gradients are added up for one step."""

    def __post_init__(self) -> None:
        if min(self.world_size, self.batch_size, self.accumulation) < 1:
            raise ValueError(f"every part of a global batch must be at least 1, got {self}")

    @property
    def num_samples(self) -> int:
        """Samples of one step on all ranks."""
        return self.world_size * self.batch_size * self.accumulation

    def __str__(self) -> str:
        parts = f"{self.world_size} ranks x {self.batch_size} samples"
        return parts + (f" x {self.accumulation} batches" if self.accumulation > 1 else "")


def convert_step(
    old_step: int,
    old_world: int,
    new_world: int,
    *,
    old_batch_size: int = 1,
    new_batch_size: int = 1,
    old_accumulation: int = 1,
    new_accumulation: int = 1,
    rounding: Rounding = "exact",
) -> int:
    """The number of new steps that take the samples of a number of old steps.

    A step of a script is either a batch of each rank, and then the accumulation is left at 1, or a
    step of the optimizer, and then it is given. Batch sizes may be left out if they did not change.

    Example:
        >>> convert_step(300, 2, 4)
        150
        >>> convert_step(300, 2, 4, old_batch_size=16, new_batch_size=4)
        600

    Args:
        old_step: Finished steps.
        old_world: Ranks that took them.
        new_world: Ranks that go on.
        old_batch_size: Samples of a batch of one of the old ranks.
        new_batch_size: Likewise of the new ones.
        old_accumulation: Batches of a rank for one old step.
        new_accumulation: Likewise for a new one.
        rounding: What to do if the samples are not a whole number of new steps: `exact` raises,
            `down` trains on some samples again, `up` leaves some out. How many is logged.

    Raises:
        ValueError: If they are not, and `rounding` is `exact`; or if a number is out of range.
    """
    old = GlobalBatch(old_world, old_batch_size, old_accumulation)
    new = GlobalBatch(new_world, new_batch_size, new_accumulation)
    if old_step < 0:
        raise ValueError(f"a step cannot be negative, got {old_step}")
    if rounding not in {"exact", "down", "up"}:
        raise ValueError(f"rounding must be 'exact', 'down' or 'up', got {rounding!r}")
    num_samples = old_step * old.num_samples
    step, rest = divmod(num_samples, new.num_samples)
    if not rest:
        return step
    missing = new.num_samples - rest
    what = f"{old_step} steps of {old} are {num_samples} samples: {step} steps of {new}, and {rest}"
    if rounding == "exact":
        raise ValueError(
            f"{what} more\n"
            f"rounding='down' goes on at step {step} and trains on these {rest} again; "
            f"rounding='up' goes on at step {step + 1} and leaves out {missing}; a "
            "ResumableBatchSampler goes on at the sample"
        )
    if rounding == "down":
        _log.warning("%s more, which are trained on again: at step %d", what, step)
        return step
    _log.warning("%s more; %d are left out: at step %d", what, missing, step + 1)
    return step + 1


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
    # First the schedulers, which get new values: in older torch they hold tensors of the groups.
    for scheduler in schedulers:
        _scale_scheduler(scheduler, factor)
    for group in optimizer.param_groups:
        for name in _GROUP_RATES:
            rate = group.get(name)
            if rate is None:
                continue
            if hasattr(rate, "mul_"):
                rate.mul_(factor)  # a compiled or capturable step holds on to this tensor
            else:
                group[name] = rate * factor


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
