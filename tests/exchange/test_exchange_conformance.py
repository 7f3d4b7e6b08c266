"""Our exchanges pass the suite."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch.distributed as dist
from tests.support import Outcome, Raised, Returned, run_processes_outcomes, run_ranks_outcomes
from tests.support.conformance import ExchangeConformance

from remesh.exchange import Alone, Exchange
from remesh.exchange.torch_group import TorchGroup

T = TypeVar("T")


class TestAlone(ExchangeConformance):
    @pytest.fixture
    def world_size(self) -> int:
        return 1

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        try:
            return [Returned(fn(Alone(), *args))]
        except Exception as error:  # noqa: BLE001 - it is the outcome
            return [Raised(error, traceback.format_exc())]


class TestThreadExchange(ExchangeConformance):
    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        return run_ranks_outcomes(world_size, fn, *args)


class TestTorchGroup(ExchangeConformance):
    @pytest.fixture(params=[1, 3])
    def world_size(self, request: pytest.FixtureRequest) -> int:
        size: int = request.param
        return size

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        return run_processes_outcomes(world_size, fn, *args)


class TestTorchSubgroup(ExchangeConformance):
    """A group whose ranks are the global ranks 1, 2, ... in this order."""

    @pytest.fixture
    def world_size(self) -> int:
        return 2

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        everybody = run_processes_outcomes(world_size + 1, _on_subgroup, fn, *args)
        assert everybody[0] == Returned([])
        return [
            Returned(outcome.value[0]) if isinstance(outcome, Returned) else outcome
            for outcome in everybody[1:]
        ]


def _on_subgroup(exchange: Exchange, fn: Callable[..., T], *args: object) -> list[T]:
    """What `fn` returned on a member of the subgroup, as the only item; nothing elsewhere."""
    group = dist.new_group(list(range(1, exchange.world_size)))
    exchange.all_gather(b"all have their connections")
    return [] if exchange.rank == 0 else [fn(TorchGroup(group), *args)]
