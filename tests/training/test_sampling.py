"""Positions in data that go on: on other world sizes, with other batch sizes and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import remesh
from remesh.errors import MismatchError, StateError
from remesh.exchange import ThreadExchange
from remesh.training.sampling import (
    ResumableBatchSampler,
    ResumableSampler,
    SampleOrder,
    SkipBatchSampler,
    key_of,
    shuffled,
)
from tests.support import run_ranks

OLD_WARNING = "ignore:'set_vital' is deprecated:UserWarning"
"""torchdata 0.11 calls a function that torch 2.13 wants to drop."""

NUMBERS: Any = range(60)
"""A data set: the numbers from 0 on."""

GOLDEN = (
    [5, 2, 8, 6, 0, 4, 9, 7, 1, 3],
    [5, 3, 7, 9, 6, 1, 2, 0, 8, 4],
    [425491361735, 371254173053, 177993449586],
)


def samplers(
    num_samples: int, world_size: int, batch_size: int, *, drop_last: bool = False, seed: int = 3
) -> list[ResumableBatchSampler]:
    return [
        ResumableBatchSampler(
            ResumableSampler(
                num_samples, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
            ),
            batch_size,
        )
        for rank in range(world_size)
    ]


# ---------------------------------------------------------------------------------------------
# The order
# ---------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_shuffled_order_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    found = shuffled(np.arange(num_samples), num_samples, key_of(seed, epoch))
    assert sorted(found.tolist()) == list(range(num_samples))


def test_the_shuffled_order_never_changes() -> None:
    """Positions that are stored somewhere mean these orders."""
    first = list(SampleOrder("feistel", 10, seed=0).samples(0, 0))
    second = list(SampleOrder("feistel", 10, seed=0).samples(1, 0))
    large = shuffled(np.arange(3), 10**12, key_of(2**63 - 1, 7)).tolist()
    assert (first, second, large) == GOLDEN


def test_an_order_is_continued_anywhere() -> None:
    for kind in ("in_order", "feistel", "torch_randperm"):
        order = SampleOrder(kind, 40_000, seed=5)
        whole = list(order.samples(2, 0))
        assert list(order.samples(2, 39_000)) == whole[39_000:]
        assert sorted(whole) == list(range(40_000))


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
                NUMBERS[:23], num_replicas=world_size, rank=rank, seed=9
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


def test_orders_have_limits() -> None:
    with pytest.raises(ValueError, match=r"0 <= seed < 2\*\*63, got 5 and -1"):
        SampleOrder("feistel", 5, seed=-1)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        ResumableSampler(5, rank=2, world_size=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ResumableBatchSampler(ResumableSampler(5), 0)


# ---------------------------------------------------------------------------------------------
# Every sample exactly once
# ---------------------------------------------------------------------------------------------


@dataclass
class Life:
    """One start of a job: its layout, and when it is killed."""

    world_size: int
    batch_size: int
    num_steps: int
    prefetch: int
    accumulation: int


lives = st.builds(
    Life,
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 6),
    num_steps=st.integers(0, 12),
    prefetch=st.integers(0, 4),
    accumulation=st.integers(1, 3),
)


@dataclass
class Job:
    """What a job's lives have trained on, by epoch, and the sampler state that is stored."""

    num_samples: int
    drop_last: bool
    stored: dict[str, object] | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)
    largest_step: int = 1

    def live(self, life: Life, num_epochs: int) -> None:
        ranks = samplers(
            self.num_samples, life.world_size, life.batch_size, drop_last=self.drop_last
        )
        for rank in ranks:
            if self.stored is not None:
                rank.load_state_dict(dict(self.stored))
        self.largest_step = max(self.largest_step, life.world_size * life.batch_size)
        steps_left = life.num_steps
        for epoch in range(ranks[0].sampler.epoch, num_epochs):
            for rank in ranks:
                rank.set_epoch(epoch)
            assert len({len(rank) for rank in ranks}) == 1
            steps_left = self.train(ranks, life, epoch, steps_left)
            if steps_left == 0:
                return

    def train(
        self, ranks: list[ResumableBatchSampler], life: Life, epoch: int, steps_left: int
    ) -> int:
        iterators = [iter(rank) for rank in ranks]
        fetched: list[list[list[int]]] = []

        def fetch(num_batches: int) -> None:
            for _ in range(num_batches):
                batches = [next(iterator, None) for iterator in iterators]
                assert len({batch is None for batch in batches}) == 1
                if batches[0] is None:
                    return
                fetched.append([batch for batch in batches if batch is not None])

        while steps_left:
            fetch(life.accumulation + life.prefetch - len(fetched))
            step, fetched = fetched[: life.accumulation], fetched[life.accumulation :]
            if not step:
                break
            for batches in step:
                self.seen.setdefault(epoch, []).extend(i for batch in batches for i in batch)
            for rank in ranks:
                rank.advance(len(step))
            states = [rank.state_dict() for rank in ranks]
            assert all(state == states[0] for state in states)
            self.stored = states[-1]
            steps_left -= 1
        return steps_left


@settings(max_examples=150)
@given(
    st.integers(0, 120), st.booleans(), st.integers(1, 3), st.lists(lives, min_size=1, max_size=6)
)
def test_every_sample_is_seen_once_whatever_happens(
    num_samples: int, drop_last: bool, num_epochs: int, several: list[Life]
) -> None:
    job = Job(num_samples, drop_last)
    last = several[-1]
    last.num_steps = 10**6
    for life in several:
        job.live(life, num_epochs)
    for epoch in range(num_epochs):
        seen = job.seen.get(epoch, [])
        assert len(set(seen)) == len(seen)
        if drop_last:
            assert num_samples - len(seen) < job.largest_step
        else:
            assert sorted(seen) == list(range(num_samples))


def test_numbers_of_numpy_are_numbers() -> None:
    theirs = ResumableSampler(np.int64(9), seed=np.int64(3))  # type: ignore[arg-type]
    assert list(theirs) == list(ResumableSampler(9, seed=3))
    assert theirs.state_dict() == ResumableSampler(9, seed=3).state_dict()


def test_a_short_last_step_is_dealt_among_the_ranks() -> None:
    shares = [list(rank) for rank in samplers(11, 4, 2)]
    assert [[len(batch) for batch in share] for share in shares] == [[2, 1], [2, 1], [2, 1], [2, 0]]
    dropped = [list(rank) for rank in samplers(11, 4, 2, drop_last=True)]
    assert [[len(batch) for batch in share] for share in dropped] == [[2]] * 4


def test_single_samples_without_batches() -> None:
    ranks = [ResumableSampler(11, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(i for rank in ranks for i in rank) == list(range(11))
    assert [len(rank) for rank in ranks] == [4, 4, 3]
    dropped = [ResumableSampler(11, drop_last=True, rank=rank, world_size=3) for rank in range(3)]
    assert [len(list(rank)) for rank in dropped] == [3, 3, 3]


def stateful_loader(*args: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]
        StatefulDataLoader,
    )

    return StatefulDataLoader(*args, **options)


@pytest.mark.filterwarnings(OLD_WARNING)
@pytest.mark.parametrize("make", [DataLoader, stateful_loader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_loader_fetches_ahead_does_not_count(
    make: Callable[..., Any], num_workers: int
) -> None:
    (batches,) = samplers(60, 1, 5)
    loader = make(NUMBERS, batch_sampler=batches, num_workers=num_workers)
    seen: list[int] = []
    for number, batch in enumerate(loader):
        if number == 4:
            break  # killed before this step is finished
        seen += batch.tolist()
        batches.advance()
    state = batches.state_dict()
    assert state["position"] == 20
    ranks = samplers(60, 2, 4)
    for rank in ranks:
        rank.load_state_dict(state)
        loader = make(NUMBERS, batch_sampler=rank, num_workers=num_workers)
        assert len(loader) == 5
        for batch in loader:
            seen += batch.tolist()
            rank.advance()
    assert sorted(seen) == list(range(60))


# ---------------------------------------------------------------------------------------------
# As a leaf of a state
# ---------------------------------------------------------------------------------------------


def test_a_position_is_stored_once_for_all_ranks(tmp_path: Path) -> None:
    def begin(exchange: ThreadExchange) -> list[int]:
        batches = samplers(40, 4, 3)[exchange.rank]
        seen = []
        for batch in batches:
            seen += batch
            batches.advance()
            if batches.sampler.position == 24:
                break
        remesh.save({"data": batches}, tmp_path / "c", group=exchange)
        return seen

    def go_on(exchange: ThreadExchange) -> list[int]:
        batches = samplers(40, 2, 5, seed=0)[exchange.rank]
        remesh.load({"data": batches}, tmp_path / "c", group=exchange)
        assert batches.sampler.order.seed == 3
        return [i for batch in batches for i in batch]

    shares = run_ranks(4, begin) + run_ranks(2, go_on)
    assert sorted(i for share in shares for i in share) == list(range(40))
    stored = remesh.Checkpoint(tmp_path / "c").values
    assert stored["data.position"] == 24


def test_a_position_of_other_data_is_refused() -> None:
    state = ResumableSampler(10).state_dict()
    with pytest.raises(
        StateError, match="belongs to 10 samples, order 'feistel'\nThis sampler has"
    ):
        ResumableSampler(11).load_state_dict(state)
    with pytest.raises(StateError, match="order 'in_order'"):
        ResumableSampler(10, shuffle=False).load_state_dict(state)


# ---------------------------------------------------------------------------------------------
# Misuse is told
# ---------------------------------------------------------------------------------------------


def test_an_epoch_without_advance_is_an_error() -> None:
    (batches,) = samplers(10, 1, 5)
    assert len(list(batches)) == 2
    with pytest.raises(StateError, match=r"without advance\(\)"):
        batches.set_epoch(1)
    with pytest.raises(StateError, match=r"without advance\(\)"):
        list(batches)


def test_advance_goes_no_further_than_what_was_handed_out() -> None:
    (batches,) = samplers(10, 1, 5)
    with pytest.raises(StateError, match="handed out up to 0 only"):
        batches.advance()
    next(iter(batches))
    batches.advance()
    with pytest.raises(StateError, match=r"advance\(5\) at position 5 of epoch 0"):
        batches.advance()
    with pytest.raises(StateError, match=r"advance\(-1\)"):
        batches.sampler.advance(-1)


@pytest.mark.parametrize("fetched", [1, 2])
def test_a_loop_does_not_go_on_where_the_position_was_set(fetched: int) -> None:
    (batches,) = samplers(10, 1, 5)
    before = batches.state_dict()
    loop = iter(batches)
    for _ in range(fetched):
        next(loop)
        batches.advance()
    batches.load_state_dict(before)
    with pytest.raises(StateError, match="position was set while a loop over the data went on"):
        next(loop)
    assert len(list(batches)) == 2


def test_looking_ahead_does_not_end_a_loop() -> None:
    (batches,) = samplers(10, 1, 5)
    loop = iter(batches)
    first = next(loop)
    assert next(iter(batches)) == first
    assert len([*loop]) == 1


def test_a_finished_epoch_is_not_begun_again_silently() -> None:
    (batches,) = samplers(10, 1, 5)
    for _ in batches:
        batches.advance()
    with pytest.raises(StateError, match=r"epoch 0 is finished; call set_epoch\(\)"):
        next(iter(batches))
    resumed = samplers(10, 1, 5)[0]
    resumed.load_state_dict(batches.state_dict())
    assert list(resumed) == []  # the loop over epochs goes on with the next one
    resumed.set_epoch(1)
    assert len(list(resumed)) == 2


# ---------------------------------------------------------------------------------------------
# Skipping
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 60))
def test_skipping_leaves_out_the_first_batches(
    num_samples: int, batch_size: int, num_skipped: int
) -> None:
    everything = list(SkipBatchSampler(range(num_samples), batch_size))
    rest = SkipBatchSampler(range(num_samples), batch_size, num_skipped)
    assert list(rest) == everything[num_skipped:]
    assert len(rest) == len(list(rest))
    assert [i for batch in everything for i in batch] == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in everything[:-1])


def test_skipping_in_a_loader() -> None:
    theirs: DistributedSampler[int] = DistributedSampler(
        NUMBERS[:20], num_replicas=2, rank=1, shuffle=False
    )
    loader = DataLoader(NUMBERS[:20], batch_sampler=SkipBatchSampler(theirs, 4, 1))
    assert [batch.tolist() for batch in loader] == [[9, 11, 13, 15], [17, 19]]
    with pytest.raises(ValueError, match="skip_batches at least 0, got 4 and -1"):
        SkipBatchSampler(range(3), 4, -1)


# ---------------------------------------------------------------------------------------------
# State that is a rank's own
# ---------------------------------------------------------------------------------------------


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


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    def run(exchange: ThreadExchange, is_new: bool) -> int:
        rank, world_size = exchange.rank, exchange.world_size
        data = Stream(100 * rank, 50)
        state = {"data": {f"rank {rank} of {world_size}": data}}
        if is_new:
            data.at = 10 + rank
            remesh.save(state, tmp_path / "c", group=exchange)
        else:
            remesh.load(state, tmp_path / "c", group=exchange)
        return data.at

    assert run_ranks(3, run, True) == [10, 11, 12]
    assert run_ranks(3, run, False) == [10, 11, 12]
    with pytest.raises(MismatchError, match=r"not stored:\s+data.rank . of 2.at"):
        run_ranks(2, run, False)
    with pytest.raises(MismatchError, match=r"not stored:\s+data.rank . of 4.at"):
        run_ranks(4, run, False)


@pytest.mark.filterwarnings(OLD_WARNING)
def test_the_state_of_a_stateful_loader_is_its_ranks_own(tmp_path: Path) -> None:
    """Each rank trains on a stream of its own; all save after two batches, and go on later."""

    def run(exchange: ThreadExchange, stop_after: int) -> list[int]:
        loader = stateful_loader(Stream(100 * exchange.rank, 24), batch_size=4, num_workers=0)
        state = {"loader": {f"rank {exchange.rank} of {exchange.world_size}": loader}}
        if not stop_after:
            remesh.load(state, tmp_path, group=exchange)
        seen: list[int] = []
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if number == stop_after:
                remesh.save(state, tmp_path, group=exchange)
                break
        return seen

    first, second = (run_ranks(2, run, stop_after) for stop_after in (2, 0))
    for rank in range(2):
        assert first[rank] + second[rank] == list(range(100 * rank, 100 * rank + 24))
