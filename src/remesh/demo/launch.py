"""Starting the processes of a run, and seeing every one of them to its end.

The processes come from a fork server: a helper process that imports torch once and then forks, so
a run starts in a second instead of importing torch once per rank. Ranks meet through a file and
talk over the loopback interface. Each rank has a pipe to here and a log file for what it prints.

Whatever happens in between, a Ctrl-C included, no process of a run is alive when `run` returns.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from remesh.demo.config import RunSpec
from remesh.demo.messages import Message

SILENCE_LIMIT = 120.0
"""Seconds after which a run is given up in which no rank says or does anything."""

LEAVE_LIMIT = 90.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

STOP_LIMIT = 5.0
"""Seconds between asking a process to end and killing it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended.

    Attributes:
        exit_code: 0, a positive code, or minus the number of the signal that killed it.
        by_launcher: Whether it did not end by itself.
    """

    exit_code: int
    by_launcher: bool


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: one entry a rank, and the seconds that it took."""

    ranks: tuple[Ended, ...]
    seconds: float


def prepare() -> ForkServerContext:
    """Where processes come from: a fork server, which begins to load torch. In the main thread.

    A terminal sends Ctrl-C to all processes. The fork server and those from it ignore it, since
    the parent ends them; otherwise each would print where it was.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["remesh.demo.worker"])
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, former)
    return context


def _enter(spec: RunSpec, rank: int, rendezvous: Path, log: Path, connection: Connection) -> None:
    """First thing that runs in a worker process. The import here keeps torch out of the starter."""
    from remesh.demo.worker import work

    work(spec, rank, rendezvous, log, connection)


def loopback() -> str:
    """The name of the loopback interface: `lo`, or `lo0` on some systems."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def log_path(logs: Path, spec: RunSpec, rank: int) -> Path:
    """The file that takes what a rank prints."""
    return logs / f"run-{spec.name.lower()}-rank-{rank}.log"


def run(
    context: ForkServerContext,
    spec: RunSpec,
    logs: Path,
    on_message: Callable[[int, Message], None],
) -> RunEnd:
    """Start all ranks of a run and wait for their end.

    Args:
        context: From `prepare`.
        spec: The run.
        logs: Directory for the ranks' log files.
        on_message: Called with the rank and the message, for each message.
    """
    begin = time.monotonic()
    processes: list[ForkServerProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="remesh-demo-") as meeting:
        try:
            for rank in range(spec.layout.num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                connections.append(receiver)
                process = context.Process(
                    target=_enter,
                    args=(spec, rank, Path(meeting, "store"), log_path(logs, spec, rank), sender),
                )
                with sender, _interrupts_held():
                    process.start()
                    processes.append(process)
            _watch(processes, connections, on_message)
        finally:
            stopped = _stop(processes)
            for connection in connections:
                connection.close()
    ranks = tuple(Ended(process.exitcode or 0, process in stopped) for process in processes)
    return RunEnd(ranks, time.monotonic() - begin)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect after the block: no process may be started without being recorded.

    For that the fork server must run already: to start it lets Ctrl-C through.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _watch(
    processes: list[ForkServerProcess],
    connections: list[Connection],
    on_message: Callable[[int, Message], None],
) -> None:
    """Pass messages on until every rank has ended or there is no more hope that it will."""
    rank_of = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + SILENCE_LIMIT
    failed = False
    while rank_of and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(rank_of), timeout=left):
            assert isinstance(ready, Connection)
            rank = rank_of[ready]
            try:
                message = ready.recv()
            except (EOFError, OSError):
                # The other end is gone, perhaps in the middle of a message: so is the process.
                del rank_of[ready]
                processes[rank].join(STOP_LIMIT)
                if processes[rank].exitcode and not failed:
                    failed = True
                    deadline = time.monotonic() + LEAVE_LIMIT
                continue
            on_message(rank, message)
            if not failed:
                deadline = time.monotonic() + SILENCE_LIMIT


def _stop(processes: Iterable[ForkServerProcess]) -> set[ForkServerProcess]:
    """End what is still alive, firmly if need be; returns what had to be ended."""
    alive = {process for process in processes if process.is_alive()}
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(STOP_LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
    return alive
