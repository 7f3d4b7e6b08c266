"""Positions of torch's samplers and torchdata's loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

import remesh
from remesh.errors import MismatchError, StateError
from remesh.exchange import Exchange, ThreadExchange
from remesh.training.sampling import (
    PerRankState,
    ResumableBatchSampler,
    ResumableSampler,
    SampleOrder,
)
from tests.support import run_processes, run_ranks

OLD_WARNING = "ignore:'set_vital' is deprecated:UserWarning"
"""torchdata 0.11 calls a function that torch 2.13 wants to drop."""


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Data without numbers, which knows where it is."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size, self.at = start, size, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.start + self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("epoch", [0, 2])
def test_the_order_of_a_distributed_sampler_goes_on_with_other_ranks(epoch: int) -> None:
    order = SampleOrder("torch_randperm", 23, seed=9)

    def ranks(world_size: int) -> list[ResumableSampler]:
        found = []
        for rank in range(world_size):
            ours = ResumableSampler(order, rank=rank, world_size=world_size)
            ours.set_epoch(epoch)
            found.append(ours)
            theirs: DistributedSampler[int] = DistributedSampler(
                Numbers(23), num_replicas=world_size, rank=rank, seed=9
            )
            theirs.set_epoch(epoch)
            assert list(ours)[:7] == list(theirs)[:7]
            ours.load_state_dict(ours.state_dict())
        return found

    first, second = ranks(2), ranks(3)
    seen = [next(share) for share in map(iter, first) for _ in range(4)]
    first[0].advance(8)
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
        seen += list(sampler)
    assert sorted(seen) == list(range(23))


# ---------------------------------------------------------------------------------------------
# State that is a rank's own
# ---------------------------------------------------------------------------------------------


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    def run(exchange: ThreadExchange, is_new: bool, missing: Any = "error") -> int:
        rank, world_size = exchange.rank, exchange.world_size
        data = Stream(100 * rank, 50)
        state = {"data": PerRankState(data, rank=rank, world_size=world_size)}
        if is_new:
            data.at = 10 + rank
            remesh.save(state, tmp_path / "c", group=exchange)
        else:
            remesh.load(state, tmp_path / "c", missing=missing, group=exchange)
        return data.at

    assert run_ranks(3, run, True) == [10, 11, 12]
    assert run_ranks(3, run, False) == [10, 11, 12]
    with pytest.raises(MismatchError, match=r"not stored:\s+data.rank . of 2.at"):
        run_ranks(2, run, False)
    with pytest.raises(MismatchError, match=r"not stored:\s+data.rank . of 4.at"):
        run_ranks(4, run, False)
    with pytest.raises(StateError, match=r"(?s)Stream was saved by 3 ranks, .* this job has 4"):
        run_ranks(4, run, False, "keep")


def test_objects_without_state_are_refused() -> None:
    with pytest.raises(StateError, match=r"builtins\.list has no state_dict"):
        PerRankState([])  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------
# torchdata
# ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(OLD_WARNING)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_over_our_sampler_goes_on_anywhere(num_workers: int) -> None:
    from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]
        StatefulDataLoader,
    )

    def loader(rank: int, world_size: int, batch_size: int) -> tuple[ResumableBatchSampler, Any]:
        sampler = ResumableSampler(48, seed=1, rank=rank, world_size=world_size)
        batches = ResumableBatchSampler(sampler, batch_size)
        return batches, StatefulDataLoader(
            Numbers(48), batch_sampler=batches, num_workers=num_workers
        )

    batches, loading = loader(0, 1, 6)
    seen: list[int] = []
    for batch in loading:
        seen += batch.tolist()
        batches.advance()
        if batches.sampler.position == 18:
            break
    state = batches.state_dict()
    for rank in range(2):
        batches, loading = loader(rank, 2, 5)
        batches.load_state_dict(state)
        seen += [i for batch in loading for i in batch.tolist()]
    assert sorted(seen) == list(range(48))


def _stateful_job(exchange: Exchange, directory: str, stop_after: int) -> list[int]:
    """Trains on a stream of each rank's own; saves after some batches, or goes on to the end."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Stream(100 * exchange.rank, 24), batch_size=4, num_workers=0)
        state = {"loader": PerRankState(loader)}
        if not stop_after:
            remesh.load(state, directory)
        seen: list[int] = []
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if number == stop_after:
                remesh.save(state, directory)
                break
    return seen


def test_the_state_of_a_stateful_loader_is_its_ranks_own(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    first = run_processes(2, _stateful_job, directory, 2)
    second = run_processes(2, _stateful_job, directory, 0)
    for rank in range(2):
        assert first[rank] + second[rank] == list(range(100 * rank, 100 * rank + 24))
