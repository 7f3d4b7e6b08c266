"""Steps in other units: what a step count means once a step takes another number of samples.

A script that counts steps and skips as many when it resumes assumes that a step always takes the
same samples. If it does not, because there are more ranks or larger batches, the count must be
converted: the samples that were trained on stay what they are, the number of steps follows.

A script that stores a sample position (`remesh.training.sampling`) needs none of this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

Rounding = Literal["exact", "down", "up"]

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
