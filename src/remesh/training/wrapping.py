"""Data positions of samplers and loaders that others wrote: what can be kept of them, and how.

* The samplers of torch itself have no state, but the order of an epoch follows from their seed, so
  `resumable` makes a `ResumableSampler` with the same order of them. All that holds for it holds
  here: any world size, every sample once.
* A loader over such a sampler, torch's `DataLoader` or torchdata's `StatefulDataLoader`, needs no
  state of its own: put the sampler into the state, not the loader.
* A loader that keeps a position of its own, because its data has no numbers or because it shuffles
  by itself, has a state that is its rank's alone. It does not follow from n such states what m
  ranks have seen. `PerRankState` keeps them all, gives each rank its own back, and refuses another
  number of ranks.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from remesh.adapters.nested import Stateful, is_stateful
from remesh.errors import StateError
from remesh.training.sampling import ResumableSampler, SampleOrder, rank_and_size


def resumable(
    sampler: Sampler[Any], *, rank: int | None = None, world_size: int | None = None
) -> ResumableSampler:
    """A resumable sampler with the order of one of torch's.

    In epoch e a `RandomSampler` gives what a generator with its seed plus e gives: in epoch 0 what
    it would itself, later what a `DistributedSampler` of that seed would. At the end of an epoch
    there is no padding: every sample comes once.

    Args:
        sampler: A `SequentialSampler`, a `RandomSampler` with a generator, or a
            `DistributedSampler`.
        rank: See `ResumableSampler`; that of a `DistributedSampler` is its own.
        world_size: Likewise.

    Raises:
        StateError: If the order of the sampler cannot be known.
    """
    if type(sampler) is SequentialSampler:
        order = SampleOrder("in_order", len(sampler))
        return ResumableSampler(order, rank=rank, world_size=world_size)
    if type(sampler) is RandomSampler:
        order = SampleOrder("torch_randperm", len(sampler.data_source), _seed_of(sampler))
        return ResumableSampler(order, rank=rank, world_size=world_size)
    if type(sampler) is DistributedSampler:
        num_samples = len(sampler.dataset)  # type: ignore[arg-type]
        order = (
            SampleOrder("torch_randperm", num_samples, sampler.seed)
            if sampler.shuffle
            else SampleOrder("in_order", num_samples)
        )
        taken = ResumableSampler(
            order,
            drop_last=sampler.drop_last,
            rank=sampler.rank,
            world_size=sampler.num_replicas,
        )
        taken.set_epoch(sampler.epoch)
        return taken
    raise StateError(
        f"the order of a {type(sampler).__module__}.{type(sampler).__qualname__} cannot be known "
        "from outside. Use a ResumableSampler\nOr, if it has state_dict() and load_state_dict(), "
        "put it into the state, in a PerRankState if its state differs between ranks"
    )


def _seed_of(sampler: RandomSampler) -> int:
    """The seed of a random sampler's order."""
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        raise StateError(
            "this RandomSampler draws samples several times or only some of them\nOnly an order "
            "that has every sample once can be resumed on another number of ranks"
        )
    if sampler.generator is None:
        raise StateError(
            "this RandomSampler draws its order from torch's global generator, so it cannot "
            "be drawn again\nGive it generator=torch.Generator().manual_seed(...)"
        )
    return int(sampler.generator.initial_seed()) % 2**63


class PerRankState:
    """An object whose state is its rank's own, as a leaf of a state.

    It is stored as `rank 0 of 4`, `rank 1 of 4` and so on. On another number of ranks these names
    are not found, and `remesh.load` refuses before it changes anything.

    Args:
        obj: The object, with `state_dict` and `load_state_dict`.
        rank: This rank among those that have such an object; by default that of torch's default
            group.
        world_size: How many there are; by default likewise.

    Raises:
        StateError: If the object does not have the two methods.
    """

    def __init__(
        self, obj: Stateful, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        if not is_stateful(obj):
            raise StateError(
                f"a {type(obj).__module__}.{type(obj).__qualname__} has no state_dict() and "
                "load_state_dict()\nIts position cannot be kept"
            )
        self._obj = obj
        self._rank, self._world_size = rank_and_size(rank, world_size)

    @property
    def _name(self) -> str:
        return f"rank {self._rank} of {self._world_size}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under a name of its own, so that those of all ranks are kept."""
        return {"world_size": self._world_size, self._name: self._obj.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the object what this rank's had.

        Raises:
            StateError: If it was saved on another number of ranks and loaded with missing="keep".
        """
        if state_dict["world_size"] != self._world_size:
            raise StateError(
                f"the state of {type(self._obj).__qualname__} was saved by "
                f"{state_dict['world_size']} ranks, this job has {self._world_size}\n"
                "Which samples they have seen together is not known. Resume on as many ranks; or "
                "leave it out of the state, which begins the data anew; or use a "
                "ResumableBatchSampler, which goes on anywhere"
            )
        self._obj.load_state_dict(state_dict[self._name])
