"""How hypothesis searches, in which order tests run, and what long tests say that they covered.

The default run is short and gives the same result twice. `pytest --hypothesis-profile=long` looks
further, at random. A slow machine is not a failure, so no example has a deadline.

Several tests run at a time, so each process computes in one thread: torch's tensors are small here,
and threads that wait for one another would take the processors from other tests.

Temporary files go into a directory of this run, which is removed when all tests have ended: so
nothing stays of what killed processes could not remove, and what libraries never do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.storage.object_servers import S3Server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

settings.register_profile("short", max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=500, deadline=None)
settings.load_profile("short")


def pytest_configure() -> None:
    """Give all tests, and the processes that they start, one directory for temporary files."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # it has that of the process that started it
    # Pytest's own stay where they are: it keeps those of the last three runs.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory = tempfile.mkdtemp(prefix="remesh-tests-")
    os.chmod(directory, 0o711)  # some tests act as a user without rights
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # to be found anew
    # When this process ends, after multiprocessing has removed its own directory there (at -100);
    # a process forked from this one does nothing.
    Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=-200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every worker of pytest-xdist begin with its share of the slow tests.

    A worker gets one run of consecutive tests, and takes others from the ends of the rest later. So
    no worker is left alone at the end with a test that takes long.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    bounds = [number * len(rest) // count for number in range(count + 1)]
    items[:] = [
        item
        for number in range(count)
        for item in (*slow[number::count], *rest[bounds[number] : bounds[number + 1]])
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """An S3 server with an empty bucket; the environment names it."""
    from tests.storage.object_servers import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def covered(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Called with what a nightly test has covered, which is printed when all tests have ended."""
    return lambda text: record_property("covered", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what nightly tests said that they covered."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    lines = [
        f"{report.nodeid}: {text}"
        for report in reports
        if getattr(report, "when", "") == "call" and "nightly" in report.keywords
        for kind, text in report.user_properties
        if kind == "covered"
    ]
    if lines:
        terminalreporter.section("what nightly tests covered")
        terminalreporter.write_line("\n".join(sorted(lines)))
