"""The ranks that run Megatron's own tests together, forked from one process, each with a plugin.

Megatron's tests are collective. Ranks meet before and after each test through a store that is not
part of what is tested. After a test every rank gives its process groups up: a rank that has left a
collective early harms no other test, and the threads of groups do not pile up.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_on_cpu  # type: ignore[import-not-found]
import pytest
import torch

dist: Any = torch.distributed
WORLD_SIZE = 8
PATIENCE = timedelta(minutes=10)
COLLECTIVE = timedelta(seconds=30)


class Rank:
    """A rank among those that run a file of tests."""

    def __init__(self, rank: int, file: str, results: Path) -> None:
        self._rank = rank
        self._results = results
        host, port = os.environ["OWN_TESTS_STORE"].split(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)
        self._store = dist.PrefixStore(file, store)
        self._said: dict[str, dict[str, str]] = {}
        self._generation = 0
        dist.rendezvous = self._rendezvous

    def _meet(self, name: str, said: str) -> list[str]:
        """What all ranks say; returns when all have said it."""
        self._store.set(f"{name}/{self._rank}", said)
        return [self._store.get(f"{name}/{rank}").decode() for rank in range(WORLD_SIZE)]

    def _rendezvous(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        store = dist.PrefixStore(f"group {self._generation}", self._store.clone())
        store.set_timeout(COLLECTIVE)
        yield store, self._rank, WORLD_SIZE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._meet(f"before {item.nodeid}", "")
        self._said[item.nodeid] = {"outcome": "ended", "why": "it was not over at the limit"}
        self._write()
        del self._said[item.nodeid]
        # Some tests expect that another one has been there before.
        _utils().initialize_distributed()
        result: Any = yield
        self._write()
        # A rank that gives its groups up closes connections that others may still read from.
        self._meet(f"over {item.nodeid}", "")
        _give_up_groups()
        self._meet(f"after {item.nodeid}", self._said[item.nodeid]["outcome"])
        self._generation += 1
        return result  # type: ignore[no-any-return]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report: Any = yield
        found = self._said.setdefault(item.nodeid, {"outcome": "passed", "why": ""})
        # What fails after the first failure is a consequence of it.
        if found["outcome"] == "passed" and (report.failed or report.skipped):
            found["outcome"] = "failed" if report.failed else "skipped"
            found["why"] = str(report.longrepr)
        return report  # type: ignore[no-any-return]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            outcome = "cannot start" if report.failed else "skipped"
            self._said[report.nodeid] = {"outcome": outcome, "why": str(report.longrepr)[-2000:]}

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        path = self._results / f"{self._rank}.json"
        path.write_text(json.dumps(self._said))


def _utils() -> Any:
    return importlib.import_module("tests.unit_tests.test_utilities").Utils


def _give_up_groups() -> None:
    if dist.is_initialized():
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    _utils().inited = False
    # What refers to a group keeps its threads.
    gc.collect()


def prepare(package: str) -> None:
    """What all ranks have in common, done once before they are forked."""
    cuda_on_cpu.install()
    init = dist.init_process_group

    def init_with_timeout(*args: Any, **kwargs: Any) -> None:
        init(*args, **{**kwargs, "timeout": COLLECTIVE})

    dist.init_process_group = init_with_timeout
    # The data of other tests would be downloaded.
    stub = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    for name in ("get_oldest_release_and_assets", "download_and_extract_asset"):
        setattr(stub, name, lambda *_, **__: None)
    for name in ("tests.test_utils", "tests.test_utils.python_scripts", stub.__name__):
        sys.modules[name] = stub
    torch.set_num_threads(1)
    if package == "remesh":
        from remesh.compat import megatron

        megatron.install()
        # Some tests want that nothing is logged; the drop-in logs a line for each save and load.
        logging.getLogger("remesh").setLevel(logging.WARNING)
    cuda_on_cpu.without_transformer_engine()
    cuda_on_cpu.with_fused_adam()
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.training.training")


def run(rank: int, file: str, results: Path, only: str) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    with (results / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    arguments = [
        *("-q", "--tb=short", f"--config-file={results.parent}/pytest.ini", "-k", only),
        *(f"--rootdir={Path.cwd()}", f"--basetemp={results}/tmp/{rank}", file),
        *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-W", "ignore"),
    ]
    return int(pytest.main(arguments, plugins=[Rank(rank, file, results)]))


def run_together(file: str, folder: Path, only: str, limit: float) -> None:
    """Fork the ranks for a file of tests, and wait until all have ended or the limit is over."""
    (folder / "tmp").mkdir(parents=True)
    ranks: set[int] = set()
    for rank in range(WORLD_SIZE):
        child = os.fork()
        if child == 0:
            os._exit(run(rank, file, folder, only))
        ranks.add(child)

    def end() -> None:
        for child in list(ranks):
            os.kill(child, signal.SIGKILL)

    over = threading.Timer(limit, end)
    over.start()
    while ranks:
        # A child that has ended is not known by its number once it is waited for.
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert info is not None
        is_rank = info.si_pid in ranks
        ranks.discard(info.si_pid)
        os.waitpid(info.si_pid, 0)
        # The others would wait in vain for a rank that died.
        failed = (
            info.si_code != os.CLD_EXITED or info.si_status > pytest.ExitCode.NO_TESTS_COLLECTED
        )
        if is_rank and failed:
            end()
    over.cancel()
    _end_orphans()


def _adopt_orphans() -> None:
    """Make this process the parent of what its ranks leave behind, instead of the first process."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


_PR_SET_CHILD_SUBREAPER = 36


def _end_orphans() -> None:
    """End the writers that Megatron's package has started in ranks: they outlive them."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    of_threads = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return [int(child) for of_thread in of_threads for child in of_thread]


def main() -> None:
    """Run files of tests one after the other, and print the name of each when it is done."""
    package, results, only, limit, *files = sys.argv[1:]
    prepare(package)
    _adopt_orphans()
    for number, file in enumerate(files):
        run_together(file, Path(results, str(number)), only, float(limit))
        print(file, flush=True)


if __name__ == "__main__":
    main()
