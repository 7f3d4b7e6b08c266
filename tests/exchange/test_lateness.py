"""Ranks that do not come: who is named, when, and that the others do not wait for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.support import run_processes
from tests.waiting import wait_until
from torch._C._distributed_c10d import HashStore

from remesh.errors import ExchangeError
from remesh.exchange import Exchange
from remesh.exchange.lateness import LateRanks, describe_absent, find_absent
from remesh.exchange.torch_group import TorchGroup


class LostStore(HashStore):
    """A store whose server is gone; it counts what it is asked."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise ConnectionError("reset by peer")

    delete_key = check  # type: ignore[assignment]


class FrozenStore(HashStore):
    """A store whose server stands still until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.released.wait()


def _call(store: HashStore | None, rank: int, *, patience: float = 60.0) -> LateRanks:
    call = LateRanks(store, rank, range(3), timeout=100, warn_after=10, patience=patience)
    call.begin("gather", range(3))
    return call


# ----- who is absent -----


@given(world_size=st.integers(0, 40), data=st.data())
def test_exactly_the_absent_are_found(world_size: int, data: st.DataObject) -> None:
    present = data.draw(st.sets(st.sampled_from(range(world_size)))) if world_size else set()
    found = find_absent(range(world_size), present.issuperset)
    assert list(found) == [rank for rank in range(world_size) if rank not in present]


def test_one_of_many_is_found_with_few_questions() -> None:
    questions: list[Sequence[int]] = []

    def all_present(ranks: Sequence[int]) -> bool:
        questions.append(ranks)
        return 2718 not in ranks

    assert list(find_absent(range(4096), all_present)) == [2718]
    assert len(questions) == 1 + 2 * 12


@pytest.mark.parametrize(
    ("absent", "text"),
    [
        ([1], "rank 1 (global rank 11) has not come"),
        ([1, 2], "ranks 1, 2 (global ranks 11, 12) have not come"),
        ([], "all ranks wait"),
    ],
)
def test_ranks_are_named_with_their_global_ranks(absent: list[int], text: str) -> None:
    assert describe_absent(absent, range(10, 20)).startswith(text)
    assert "global" not in describe_absent(absent, range(10))


def test_a_message_names_so_many_ranks_at_most() -> None:
    text = describe_absent(range(1, 4000), range(4000))
    assert text == f"ranks {', '.join(map(str, range(1, 17)))} and more have not come"


# ----- when to look, warn and give up -----


def test_a_slow_call_warns_at_growing_distances(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    call = _call(store, 0)
    _call(store, 2)
    warned_at = []
    for waited in range(1, 100):
        before = len(caplog.messages)
        assert 0 < call.look(waited) <= 1
        if len(caplog.messages) > before:
            warned_at.append(waited)
    assert warned_at == [10, 20, 40, 80]
    assert caplog.messages[0] == (
        "gather on rank 0 has waited 10 s: rank 1 has not come\nEvery rank must make this call (it "
        "fails after 100 s)"
    )
    with pytest.raises(RuntimeError, match="no end within 100 s: rank 1 has not come"):
        call.look(100)


def test_one_of_the_waiting_ranks_warns(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    calls = [_call(store, rank) for rank in (2, 0)]
    for first in (calls, calls[::-1]):
        caplog.clear()
        for waited in (10, 20):
            for call in first:
                call.look(waited)
        assert [message[:16] for message in caplog.messages] == [
            f"gather on rank {2 if first is calls else 0}"
        ] * 2
        for call in calls:
            call.end()
        assert store.num_keys() == 0
        for call in calls:
            call.begin("gather", range(3))


def test_a_rank_that_gives_up_says_so_to_the_others() -> None:
    store = HashStore()
    waiting = _call(store, 2)
    waiting.look(1)
    _call(store, 0).report_failure("rank 0: connection closed")
    _call(store, 1).report_failure("rank 1: a consequence")
    with pytest.raises(RuntimeError, match="another rank has given up: rank 0: connection closed"):
        waiting.look(2)


def test_looks_of_a_large_job_are_rare() -> None:
    call = LateRanks(HashStore(), 1, range(4000), timeout=1000, warn_after=100)
    call.begin("gather", range(4000))
    assert call.look(1) == 20


def test_without_a_store_the_deadline_holds() -> None:
    call = _call(None, 0)
    call.look(99)
    with pytest.raises(RuntimeError, match="is not known: the group has no store"):
        call.look(100)


def test_a_store_that_failed_is_not_asked_again() -> None:
    store = LostStore()
    call = _call(store, 0)
    call.look(1)
    assert store.asked == 1
    with pytest.raises(RuntimeError, match="not known: the group's store failed: reset by peer"):
        call.look(100)
    call.end()
    assert store.asked == 1


def test_a_store_that_stands_still_does_not_hold_up_the_deadline() -> None:
    store = FrozenStore()
    call = _call(store, 0, patience=0.01)
    with pytest.raises(RuntimeError, match=r"store did not answer within 0\.01 s"):
        call.look(100)
    store.released.set()


# ----- real calls -----


class _Heard(logging.Handler):
    """Warnings of remesh; makes files once one has some text."""

    def __init__(self, files: dict[str, Path]) -> None:
        super().__init__()
        self._files = files
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        for text, path in self._files.items():
            if text in self.messages[-1]:
                path.touch()


def _two_come_late(exchange: Exchange, folder: Path) -> tuple[list[bytes], list[str]]:
    group = TorchGroup(warn_after=0.1)
    both, one = folder / "both are named", folder / "one is named"
    heard = _Heard({": ranks 1, 2 have not come\n": both, ": rank 1 has not come\n": one})
    logging.getLogger("remesh").addHandler(heard)
    # Rank 2 comes when rank 0 waits, or it might be the one that warns.
    if exchange.rank == 2:
        wait_until(both.exists, "rank 0 warns of both")
    if exchange.rank == 1:
        wait_until(one.exists, "rank 0 warns of rank 1")
    everybody = group.all_gather(b"%d" % exchange.rank)
    # The next call is not disturbed by what is left of the first.
    assert group.all_gather(b"%d" % exchange.rank) == everybody
    return everybody, heard.messages


def test_rank_0_names_the_ranks_that_have_not_come(tmp_path: Path) -> None:
    (_, heard), *others = run_processes(3, _two_come_late, tmp_path)
    named = [message.split("\n")[0].split(": ")[1] for message in heard]
    assert named[0] == "ranks 1, 2 have not come"
    assert "rank 1 has not come" in named
    assert all(message.startswith("all-gather on rank 0") for message in heard)
    for everybody, _ in others:
        assert everybody == [b"0", b"1", b"2"]


def _one_stays_away(exchange: Exchange) -> str:
    """A call of a group of the global ranks 1, 2 and 3, of which the second does not make it."""
    ranks = dist.new_group([1, 2, 3])
    if exchange.rank in (0, 2):
        exchange.all_gather(b"")
        return ""
    # Only one of them has a deadline within the time of the test.
    group = TorchGroup(ranks, timeout=1.0 if exchange.rank == 1 else 1000.0)
    with pytest.raises(ExchangeError) as caught:
        group.all_gather(b"")
    exchange.all_gather(b"go home")
    return str(caught.value)


def test_a_deadline_names_the_missing_and_ends_the_wait_of_all() -> None:
    _, first, _, last = run_processes(4, _one_stays_away)
    assert first.startswith("all-gather failed on rank 0 of 3 (global rank 1): ")
    # Rank 2 of the group may be late, too, on a busy machine.
    assert any(
        f"no end within 1 s: {late} not come" in first
        for late in ("rank 1 (global rank 2) has", "ranks 1, 2 (global ranks 2, 3) have")
    )
    assert "another rank has given up: rank 0: no end within 1 s" in last
