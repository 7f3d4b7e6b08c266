"""Which samples a rank trains on next, kept as one number that means the same on any world size.

An epoch is an order of all samples, the same on every rank. Training eats it from the front: a
step of W ranks with b samples each takes the next W x b, rank r those at r, r + W, r + 2W, ... So
what has been trained on is always a beginning of the order, and how long that beginning is, the
*position*, is all there is to store. With another world size or batch size the next step takes
another number of samples, from the same place on. No sample is repeated, none is left out.

A position must count what finished steps have trained on. A data loader with workers asks for
batches long before they are trained on, so the position cannot be counted where indices are handed
out; the training loop says it, by `advance`, once a step is finished. Who forgets is told: the end
of an epoch in which nothing was advanced, or an advance past what was handed out, is an error.

`ResumableSampler` hands out single samples, `ResumableBatchSampler` batches; both are leaves of a
state. `SkipBatchSampler` is for scripts that count steps and skip as many batches.

docs/data-position.md says what to do with the samplers and loaders that others wrote.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from remesh.errors import StateError

OrderKind = Literal["in_order", "feistel", "torch_randperm"]
Rounding = Literal["exact", "down", "up"]

_BLOCK = 1 << 14
"""Places of an order that are computed at a time."""

_log = logging.getLogger("remesh")

_UInts = npt.NDArray[np.uint64]

_NUM_ROUNDS = 8
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of the samples in each epoch; the same wherever it is computed.

    Raises:
        ValueError: If a number is out of range.
    """

    kind: OrderKind
    """`in_order`: 0, 1, 2, ...; `feistel`: shuffled place by place, the same in all versions;
    `torch_randperm`: that of `DistributedSampler`, as far as torch keeps it."""
    num_samples: int
    """How many samples an epoch has."""
    seed: int = 0
    """Which of the shuffled orders; 0 <= seed < 2**63."""

    def __post_init__(self) -> None:
        if self.num_samples < 0 or not 0 <= self.seed < 2**63:
            raise ValueError(
                f"an order needs num_samples >= 0 and 0 <= seed < 2**63, got {self.num_samples} "
                f"and {self.seed}"
            )

    def samples(self, epoch: int, start: int) -> Iterator[int]:
        """The samples of an epoch, from a place on."""
        stop = self.num_samples
        if self.kind == "in_order":
            yield from range(start, stop)
        elif self.kind == "feistel":
            key = key_of(self.seed, epoch)
            for first in range(start, stop, _BLOCK):
                places = np.arange(first, min(first + _BLOCK, stop))
                yield from shuffled(places, stop, key).tolist()
        else:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            yield from torch.randperm(stop, generator=generator)[start:].tolist()


def _rank_and_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Both, or where they are None, those of torch's default group."""
    in_group = dist.is_available() and dist.is_initialized()
    own, size = (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
    return own if rank is None else rank, size if world_size is None else world_size


class ResumableSampler(Sampler[int]):
    """A rank's share of the samples of an epoch, from a global position on.

    Iterating begins at the position and leaves it where it is; `advance` moves it. Give it to a
    `ResumableBatchSampler`, or to a `DataLoader` as `sampler=`.

    Example:
        >>> sampler = ResumableSampler(10, shuffle=False, rank=1, world_size=2)
        >>> list(sampler)
        [1, 3, 5, 7, 9]
        >>> sampler.advance(8)
        >>> list(sampler)
        [9]

    Args:
        samples: The data set, or how many samples it has, or their order.
        seed: Which of the shuffled orders.
        shuffle: Whether to shuffle; else the samples come as they are numbered.
        drop_last: Leave out the end of an epoch that does not divide into ranks, or, in a
            `ResumableBatchSampler`, into global batches. Otherwise every sample is handed out
            exactly once, and shares may differ by one.
        rank: This process among those that share the samples: a rank of the data-parallel axis.
            By default that of torch's default group, 0 if there is none.
        world_size: How many share them; by default likewise.

    Raises:
        ValueError: If rank and world size do not fit.
    """

    _epoch: int
    _position: int
    _handed_out: int
    _exhausted_from: int | None
    _iteration: object  # another one each time that the position is set

    def __init__(
        self,
        samples: int | Sized | SampleOrder,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(samples, SampleOrder):
            num_samples = len(samples) if isinstance(samples, Sized) else operator.index(samples)
            seed = operator.index(seed)  # numbers of NumPy overflow
            samples = (
                SampleOrder("feistel", num_samples, seed)
                if shuffle
                else SampleOrder("in_order", num_samples)
            )
        self.order = samples
        self.drop_last = drop_last
        self.rank, self.world_size = _rank_and_size(rank, world_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no rank {self.rank} among {self.world_size}")
        self._go_to(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0 on."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that finished steps of all ranks have trained on."""
        return self._position

    @property
    def num_remaining(self) -> int:
        """Samples of this epoch that are left, on all ranks."""
        return self.order.num_samples - self._position

    def __len__(self) -> int:
        """How many samples this rank still gets in this epoch."""
        return len(range(self.rank, self._end(self.world_size), self.world_size))

    def __iter__(self) -> Iterator[int]:
        for share in self.shares(self.world_size):
            yield from share

    def shares(self, global_size: int) -> Iterator[list[int]]:
        """This rank's share of each group of so many samples, from the position on."""
        self._begin()
        start, end = self._position, self._end(global_size)
        samples = itertools.islice(self.order.samples(self._epoch, start), end)
        own = self._iteration
        while True:
            group = list(itertools.islice(samples, global_size))
            if self._iteration is not own:
                raise StateError(
                    "the data position was set while a loop over the data went on\nLeave the loop "
                    "and begin another one after resume, load or set_epoch"
                )
            if not group:
                break
            self._handed_out = min(self._handed_out + global_size, start + end)
            yield group[self.rank :: self.world_size]
        self._exhausted_from = start

    def num_groups(self, global_size: int) -> int:
        """How many groups `shares` has."""
        return -(-self._end(global_size) // global_size)

    def advance(self, num_samples: int) -> None:
        """A step is finished: it has trained on so many samples, on all ranks together.

        Raises:
            StateError: If so many were not handed out.
        """
        position = self._position + num_samples
        if num_samples < 0 or position > self._handed_out:
            raise StateError(
                f"advance({num_samples}) at position {self._position} of epoch {self._epoch}\n"
                f"Samples were handed out up to {self._handed_out} only. Call it once for each "
                "finished step, with the samples of all ranks in it; the last step of an epoch "
                "may have fewer (num_remaining)"
            )
        self._position = position

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its beginning, unless it is the one under way.

        Raises:
            StateError: If all of the last epoch was handed out and nothing advanced.
        """
        if epoch != self._epoch:
            self._check_advanced()
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Order, epoch and position: plain values, the same on every rank."""
        return {
            "order": self.order.kind,
            "seed": self.order.seed,
            "num_samples": self.order.num_samples,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler was, on any number of ranks.

        The seed is taken from the state.

        Raises:
            StateError: If it was for another order, or another number of samples.
        """
        kind, num_samples = state_dict["order"], state_dict["num_samples"]
        if (kind, num_samples) != (self.order.kind, self.order.num_samples):
            raise StateError(
                f"the stored data position belongs to {num_samples} samples, order {kind!r}\nThis "
                f"sampler has {self.order.num_samples}, order {self.order.kind!r}. A position is "
                "good for the data and order it was counted in: give the job the same data, or "
                "leave the sampler out of the state to begin the epoch anew"
            )
        self.order = replace(self.order, seed=state_dict["seed"])
        self._go_to(state_dict["epoch"], state_dict["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._handed_out = epoch, position, position
        self._exhausted_from, self._iteration = None, object()

    def _end(self, global_size: int) -> int:
        """How many of the remaining samples are handed out in groups of so many."""
        left = self.num_remaining
        return left - left % global_size if self.drop_last else left

    def _begin(self) -> None:
        self._check_advanced()
        if self._exhausted_from is not None and self._handed_out == self._position:
            raise StateError(
                f"epoch {self._epoch} is finished; call set_epoch() before iterating again"
            )
        self._handed_out, self._exhausted_from = self._position, None

    def _check_advanced(self) -> None:
        if self._exhausted_from == self._position < self._handed_out:
            raise StateError(
                f"all samples of epoch {self._epoch} from position {self._position} on were "
                "handed out without advance()\n"
                "A checkpoint would repeat them; call it after each finished step"
            )


class ResumableBatchSampler(Sampler[list[int]]):
    """A rank's batches of an epoch, from a global position on.

    Every rank takes the same number of steps. If the samples that are left do not fill the last
    step, its batches are smaller, and where there are fewer samples than ranks, some ranks get an
    empty list; with `drop_last` of the sampler they are left out instead.

    Example:
        >>> sampler = ResumableSampler(10, shuffle=False, rank=0, world_size=2)
        >>> batches = ResumableBatchSampler(sampler, batch_size=2)
        >>> for batch in batches:
        ...     print(batch)  # train on it
        ...     batches.advance()
        [0, 2]
        [4, 6]
        [8]

    Args:
        sampler: Whose samples they are.
        batch_size: Samples of a batch of one rank.

    Raises:
        ValueError: If the batch size is not positive.
    """

    def __init__(self, sampler: ResumableSampler, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.sampler = sampler
        self.batch_size = batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step on all ranks."""
        return self.batch_size * self.sampler.world_size

    def __len__(self) -> int:
        """How many batches are left in this epoch; the same on every rank."""
        return self.sampler.num_groups(self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.shares(self.global_batch_size)

    def advance(self, num_batches: int = 1) -> None:
        """So many batches of each rank are finished: trained on, their optimizer step taken.

        Raises:
            StateError: If so many were not handed out.
        """
        num_samples = num_batches * self.global_batch_size
        if num_batches <= len(self):  # the last one may be short
            num_samples = min(num_samples, self.sampler.num_remaining)
        self.sampler.advance(num_samples)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ResumableSampler.load_state_dict`; the batch size may be another."""
        self.sampler.load_state_dict(state_dict)


class SkipBatchSampler(Sampler[list[int]]):
    """The batches of a sampler without the first ones.

    For scripts that store a step and skip as many batches. It counts batches of one rank, so after
    a change of the world size or the batch size the step must be converted first
    (`remesh.training.convert_step`).

    Args:
        sampler: Gives numbers of samples and has a length: a sampler, a range, a list.
        batch_size: Samples of a batch; the last one may have fewer.
        skip_batches: How many batches to leave out.

    Raises:
        ValueError: If the batch size is not positive or the number of batches is negative.
    """

    def __init__(self, sampler: Any, batch_size: int, skip_batches: int = 0) -> None:
        super().__init__()
        if batch_size < 1 or skip_batches < 0:
            raise ValueError(
                f"batch_size must be at least 1 and skip_batches at least 0, got {batch_size} and "
                f"{skip_batches}"
            )
        self.sampler = sampler
        self.batch_size = batch_size
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        """How many batches are left."""
        return max(0, -(-len(self.sampler) // self.batch_size) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        samples = itertools.islice(self.sampler, self.skip_batches * self.batch_size, None)
        while batch := list(itertools.islice(samples, self.batch_size)):
            yield batch


def convert_step(
    old_step: int,
    old_world: int,
    new_world: int,
    *,
    old_batch_size: int = 1,
    new_batch_size: int = 1,
    rounding: Rounding = "exact",
) -> int:
    """The number of new steps that take the samples of a number of old steps.

    For scripts that count steps; one that stores a sample position needs none of this. Batch sizes
    may be left out if they did not change.

    Example:
        >>> convert_step(300, 2, 4)
        150
        >>> convert_step(300, 2, 4, old_batch_size=16, new_batch_size=4)
        600

    Args:
        old_step: Finished steps.
        old_world: Ranks that took them.
        new_world: Ranks that go on.
        old_batch_size: Samples of one of the old ranks in a step, those of all batches whose
            gradients it adds up.
        new_batch_size: Likewise of one of the new ones.
        rounding: What to do if the samples are not a whole number of new steps: `exact` raises,
            `down` trains on some samples again, `up` leaves some out. How many is logged.

    Raises:
        ValueError: If they are not, and `rounding` is `exact`; or if a number is out of range.
    """
    old = f"{old_world} ranks x {old_batch_size} samples"
    new = f"{new_world} ranks x {new_batch_size} samples"
    if old_step < 0 or min(old_world, old_batch_size, new_world, new_batch_size) < 1:
        raise ValueError(
            f"ranks and samples must be at least 1, got {old_step} steps: {old}; {new}"
        )
    if rounding not in {"exact", "down", "up"}:
        raise ValueError(f"rounding must be 'exact', 'down' or 'up', got {rounding!r}")
    num_samples = old_step * old_world * old_batch_size
    step, rest = divmod(num_samples, new_world * new_batch_size)
    if not rest:
        return step
    missing = new_world * new_batch_size - rest
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


# A shuffle that is computed place by place --------------------------------------------------------

# The order of an epoch must be the same on every rank and after every restart, in any version of
# numpy and torch, and a rank that resumes in the middle should not have to draw everything before.
# So it is not drawn at all. It is a keyed bijection of the numbers below n, a function of seed,
# epoch and place alone: a Feistel network over the smallest even number of bits that holds n - 1. A
# result that is not below n is put in again until one is ("cycle walking"), which takes less than
# four tries on average. The method is that of Black and Rogaway, Ciphers with Arbitrary Finite
# Domains (2002); nothing here is meant to be secret, so the round function is only a good mixer,
# the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
#
# Stored positions mean something only as long as this function never changes. A test holds values
# of it; another order needs another name (`OrderKind`).


def shuffled(places: npt.NDArray[np.int64], num_samples: int, key: int) -> npt.NDArray[np.int64]:
    """The samples at some places of a shuffled order; different places have different samples."""
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_mix_one(key + number * _STEP) for number in range(1, _NUM_ROUNDS + 1)]
    found = _feistel(places.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(found >= num_samples)
    while len(outside):
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = outside[found[outside] >= num_samples]
    return found.astype(np.int64)


def key_of(seed: int, epoch: int) -> int:
    """The key of an epoch: 64 bits in which all of seed and epoch are mixed."""
    return _mix_one(_mix_one(seed + _STEP) + epoch)


def _feistel(numbers: _UInts, half_bits: int, keys: list[int]) -> _UInts:
    """Swap the halves again and again, each time changing one by a function of the other."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(numbers: _UInts) -> _UInts:
    """Every bit of the result depends on every bit of the number; wraps around at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _mix_one(number: int) -> int:
    return int(_mix(np.array([number & _MASK], dtype=np.uint64))[0])
