"""Our exchanges pass the suite."""

from __future__ import annotations

import itertools
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist
from tests.support import Outcome, Raised, Returned, run_processes, run_ranks_outcomes
from tests.support.conformance import ExchangeConformance
from tests.waiting import wait_until

from remesh.exchange import Alone, Exchange
from remesh.exchange.torch_group import TorchGroup

T = TypeVar("T")
LIMIT = 1200.0


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


class Job:
    """Processes with a group that do what they are told, one thing after the other.

    The ranks of a subgroup are the global ranks 1, 2, ...
    """

    def __init__(self, world_size: int, *, on_subgroup: bool) -> None:
        self._directory = Path(tempfile.mkdtemp())
        self._world_size = world_size
        self._thread = ThreadPoolExecutor(1)
        self._told = 0
        serve = _serve_on_subgroup if on_subgroup else _serve
        size = world_size + on_subgroup
        self._ended = self._thread.submit(
            run_processes, size, serve, self._directory, timeout=LIMIT
        )

    def run(self, fn: Callable[..., T], args: tuple[object, ...]) -> list[Outcome[T]]:
        """What the function ends with on each rank."""
        self._told += 1
        answers = [self._directory / f"{self._told}-{rank}" for rank in range(self._world_size)]
        _write(self._directory / str(self._told), (fn, args))
        wait_until(lambda: self._ended.done() or all(map(Path.exists, answers)), "the answers")
        if self._ended.done():
            self._ended.result()  # why it ended
        return [pickle.loads(answer.read_bytes()) for answer in answers]

    def end(self) -> None:
        _write(self._directory / str(self._told + 1), None)
        self._ended.result()
        self._thread.shutdown()
        shutil.rmtree(self._directory)


def _write(path: Path, content: object) -> None:
    """Whoever sees the file sees all of it."""
    hidden = path.with_suffix(".hidden")
    hidden.write_bytes(pickle.dumps(content))
    hidden.rename(path)


def _serve(exchange: Exchange, directory: Path) -> None:
    for number in itertools.count(1):
        task = directory / str(number)
        wait_until(task.exists, "a task", LIMIT)
        told = pickle.loads(task.read_bytes())
        if told is None:
            return
        fn, args = told
        try:
            outcome: Outcome[object] = Returned(fn(exchange, *args))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcome = Raised(error, traceback.format_exc())
        _write(directory / f"{number}-{exchange.rank}", outcome)


def _serve_on_subgroup(exchange: Exchange, directory: Path) -> None:
    group = dist.new_group(list(range(1, exchange.world_size)))
    exchange.all_gather(b"all have their connections")
    if exchange.rank > 0:
        _serve(TorchGroup(group), directory)


_JOBS: dict[tuple[int, bool], Job] = {}
"""Starting processes takes much longer than a test: those of a group go through the whole suite."""


@pytest.fixture(scope="module", autouse=True)
def _jobs() -> Iterator[None]:
    yield
    for job in _JOBS.values():
        job.end()
    _JOBS.clear()


def run_in_job(
    world_size: int, fn: Callable[..., T], args: tuple[object, ...], *, on_subgroup: bool
) -> list[Outcome[T]]:
    key = (world_size, on_subgroup)
    if key not in _JOBS:
        _JOBS[key] = Job(world_size, on_subgroup=on_subgroup)
    return _JOBS[key].run(fn, args)


class TestTorchGroup(ExchangeConformance):
    @pytest.fixture(params=[1, 3])
    def world_size(self, request: pytest.FixtureRequest) -> int:
        size: int = request.param
        return size

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        return run_in_job(world_size, fn, args, on_subgroup=False)


class TestTorchSubgroup(ExchangeConformance):
    """A group whose ranks are the global ranks 1, 2, ... in this order."""

    @pytest.fixture
    def world_size(self) -> int:
        return 2

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        return run_in_job(world_size, fn, args, on_subgroup=True)
