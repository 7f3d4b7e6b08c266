from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support import Died, Returned, run_processes, run_processes_outcomes

from remesh.errors import ExchangeError
from remesh.exchange import Exchange, run_joined, run_on_all
from remesh.exchange import torch_group as module
from remesh.exchange.torch_group import TorchGroup


def _message(rank: int, size: int) -> bytes:
    return (b"%d," % rank * size)[:size]


# ----- the group -----


def test_torch_must_be_initialized() -> None:
    with pytest.raises(ExchangeError, match="init_process_group"):
        TorchGroup()


class _FourthDevice:
    """Stands in for `torch.cuda` and its like."""

    @staticmethod
    def current_device() -> int:
        return 3


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cuda:nccl", "cuda:3"),
        ("xpu:xccl", "xpu:3"),
    ],
)
def test_messages_are_on_a_device_that_the_group_can_move(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(torch, "get_device_module", lambda _: _FourthDevice)
    assert module._message_device(None) == torch.device(device)


def _outside(exchange: Exchange) -> str:
    group = dist.new_group([1, 2])
    exchange.all_gather(b"all have their connections")
    if exchange.rank != 0:
        return str(TorchGroup(group).rank)
    with pytest.raises(ExchangeError) as caught:
        TorchGroup(group)
    return str(caught.value)


def test_a_rank_outside_of_the_group_is_told() -> None:
    outside, *inside = run_processes(3, _outside)
    assert "global rank 0 is not in the process group" in outside
    assert inside == ["0", "1"]


def _two_groups(exchange: Exchange) -> list[list[bytes]]:
    # Both groups talk at the same time, and a rank has another number in each.
    pairs = TorchGroup(
        dist.new_group([1, 3] if exchange.rank % 2 else [0, 2], use_local_synchronization=True)
    )
    own = b"%d" % exchange.rank
    shares = [own + b"->0", own + b"->1"] if pairs.rank == 0 else None
    gathered = pairs.gather(own) or []
    told = pairs.broadcast(own if pairs.rank == 0 else None)
    mine, theirs = np.full((2, 1), exchange.rank, np.uint8), np.zeros((2, 1), np.uint8)
    pairs.swap([[mine[:1]], [mine[1:]]], [[theirs[:1]], [theirs[1:]]])
    swapped = [b"%d" % rank for rank in theirs[:, 0]]
    scattered = [told, pairs.scatter(shares)]
    return [pairs.all_gather(own), gathered, scattered, swapped, exchange.all_gather(own)]


def test_groups_do_not_disturb_each_other() -> None:
    world = [b"0", b"1", b"2", b"3"]
    evens, odds = [b"0", b"2"], [b"1", b"3"]
    assert run_processes(4, _two_groups) == [
        [evens, evens, [b"0", b"0->0"], evens, world],
        [odds, odds, [b"1", b"1->0"], odds, world],
        [evens, [], [b"0", b"0->1"], evens, world],
        [odds, [], [b"1", b"1->1"], odds, world],
    ]


# ----- messages of many blocks -----


SIZES = [[0, 0, 0], [10, 11, 12], [100, 0, 1], [0, 9, 10], [40, 41, 39], [0, 0, 95]]
"""Of the message of each rank."""


def _talk_in_blocks(exchange: Exchange) -> None:
    # The process is ours alone, so its constants may be changed.
    module._BLOCK, module._SHORT = 10, 10
    is_first = exchange.rank == 0
    for padded, sizes in itertools.product((0, 40, 1000), SIZES):
        module._PADDED = padded
        own = _message(exchange.rank, sizes[exchange.rank])
        everything = [_message(rank, size) for rank, size in enumerate(sizes)]
        assert exchange.all_gather(own) == everything, (padded, sizes)
        assert exchange.gather(own) == (everything if is_first else None), (padded, sizes)
        assert exchange.scatter(everything if is_first else None) == own, (padded, sizes)
        for message in everything:
            assert exchange.broadcast(message if is_first else None) == message, (padded, sizes)


def test_blocks() -> None:
    run_processes(3, _talk_in_blocks)


def _broadcast_much(exchange: Exchange, size: int) -> tuple[int, bytes, bytes]:
    data = b"head" + bytes(size - 8) + b"tail" if exchange.rank == 0 else None
    got = exchange.broadcast(data)
    return len(got), got[:4], got[-4:]


@pytest.mark.slow
def test_more_bytes_than_an_int_can_count() -> None:
    size = (2 << 30) + 12345
    assert run_processes(2, _broadcast_much, size) == [(size, b"head", b"tail")] * 2


# ----- ranks that die -----


def _one_is_killed(exchange: Exchange, victim: int, operation: str) -> str:
    exchange.all_gather(b"all are here")
    if exchange.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    steps: dict[str, Callable[[], object]] = {
        "joined": lambda: run_joined(exchange, lambda: b"", lambda parts: parts),
        "all": lambda: run_on_all(exchange, lambda: b""),
    }
    with pytest.raises(ExchangeError) as caught:
        steps[operation]()
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("operation", ["joined", "all"])
def test_a_killed_rank_does_not_hang_the_others(victim: int, operation: str) -> None:
    outcomes = run_processes_outcomes(3, _one_is_killed, victim, operation)
    dead = outcomes.pop(victim)
    assert dead == Died(-signal.SIGKILL)
    assert dead.signal is signal.SIGKILL
    for rank, outcome in zip([r for r in range(3) if r != victim], outcomes, strict=True):
        assert isinstance(outcome, Returned), outcome
        first, *others = outcome.value.splitlines()
        assert first.endswith(
            f"failed on rank {rank} of 3 (global rank {rank}): a rank does not answer"
        )
        assert "first rank that died" in others[-1]
        assert "committed as a whole or not at all" in others[-1]


def _one_stays_away(exchange: Exchange) -> str:
    group = dist.new_group()
    # Not from the beginning, for the ranks may take longer than that to make their connections.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if exchange.rank == 1:
        exchange.broadcast(None)
        return ""
    with pytest.raises(ExchangeError) as caught:
        TorchGroup(group).gather(b"")
    exchange.broadcast(b"go home")
    return str(caught.value)


def test_a_deadline_that_passes_is_an_exchange_error() -> None:
    waited, _ = run_processes(2, _one_stays_away)
    assert waited.startswith("gather failed on rank 0 of 2 (global rank 0)")
