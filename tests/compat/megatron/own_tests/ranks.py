"""The ranks that run Megatron's own tests together, forked from one process, each with a plugin.

Megatron's tests are collective. Ranks meet before and after each test through a store that is not
part of what is tested. After a test every rank gives its process groups up: a rank that has left a
collective early harms no other test, and the threads of groups do not pile up.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
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
COLLECTIVE = timedelta(seconds=40)


class Rank:
    """A rank among those that run a file of tests.

    Args:
        rank: Its number.
        file: What they run.
        results: Folder for what became of the tests.
    """

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
        # Some tests expect that another one has been there before.
        _utils().initialize_distributed()
        result: Any = yield
        outcome = self._said.get(item.nodeid, {"outcome": "passed"})["outcome"]
        _give_up_groups()
        self._meet(f"after {item.nodeid}", outcome)
        self._generation += 1
        return result  # type: ignore[no-any-return]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        report: Any = yield
        found = self._said.setdefault(item.nodeid, {"outcome": "passed", "why": ""})
        if report.failed or (report.skipped and found["outcome"] == "passed"):
            found["outcome"] = "failed" if report.failed else "skipped"
            found["why"] = str(call.excinfo.getrepr(style="short")) if call.excinfo else ""
        return report  # type: ignore[no-any-return]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            outcome = "cannot start" if report.failed else "skipped"
            self._said[report.nodeid] = {"outcome": outcome, "why": str(report.longrepr)[-2000:]}

    def pytest_sessionfinish(self) -> None:
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
    stub.get_oldest_release_and_assets = lambda **_: None  # type: ignore[attr-defined]
    for name in ("tests.test_utils", "tests.test_utils.python_scripts", stub.__name__):
        sys.modules[name] = stub
    torch.set_num_threads(1)
    if package == "remesh":
        from remesh.compat import megatron

        megatron.install()
        # The tests replace what gives Megatron's default by what gives this.
        serialization: Any = importlib.import_module("remesh.compat.megatron.serialization")
        serialization.DEFAULT_BACKEND = ("torch_dist", 1)
    cuda_on_cpu.without_transformer_engine()
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.training.training")


def run(rank: int, file: str, results: Path) -> int:
    """Run a file of tests as one of the ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    with (results / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    arguments = [
        *("-q", "-c", str(results.parent / "pytest.ini"), "--rootdir", str(Path.cwd())),
        *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-W", "ignore"),
        *(f"--basetemp={results}/tmp/{rank}", file),
    ]
    return int(pytest.main(arguments, plugins=[Rank(rank, file, results)]))


def main() -> None:
    """Fork the ranks, file by file, and print the name of each file when it is done.

    The arguments are the package, a folder for results and files of tests.
    """
    package, results, *files = sys.argv[1:]
    prepare(package)
    for number, file in enumerate(files):
        folder = Path(results, str(number))
        (folder / "tmp").mkdir(parents=True)
        ranks = {}
        for rank in range(WORLD_SIZE):
            child = os.fork()
            if child == 0:
                os._exit(run(rank, file, folder))
            ranks[child] = rank
        ended = 0
        while ranks:
            child, status = os.wait()
            ranks.pop(child)
            # The others would wait in vain for a rank that died.
            if status not in (0, 256) and not ended:
                ended = status
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        print(file, flush=True)


if __name__ == "__main__":
    main()
