"""Playing the ranks of a job as processes with a real gloo process group.

The processes come from a fork server that has torch imported already, so a job starts in a moment
instead of the seconds that each import takes. Otherwise they are like spawned ones: they inherit
no state of the test, and see the environment as it was when the first job started. The group
meets over a file in a temporary directory and talks over the loopback interface only.

A rank reports through a pipe: its result, or its exception and traceback. One that closes its end
without a report has died, and its exit status says how. When the time is up, each process that is
left is killed, so no process survives the call.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar, cast

from remesh.errors import RankFailedError
from tests.support.outcomes import Died, Outcome, Raised, Returned, TimedOut, returned_values

T = TypeVar("T")

_PRELOAD = (
    "torch.distributed",
    "torch._dynamo",
    "remesh.adapters",
    "remesh.background",
    "remesh.checkpoint.loading",
    "remesh.checkpoint.opened",
    "remesh.exchange.torch_group",
    "pytest",
    __name__,
)
"""What each process would import anyhow; pytest since it is the main module of a test run, and
dynamo, which takes longest, since optimizers import it with their first method that is called."""

_GRACE = 10.0
"""Seconds that ranks have to end on their own after one of them has failed."""

_EXIT = 5.0
"""Seconds that a process has to exit after its report."""


def run_processes(
    world_size: int, fn: Callable[..., T], *args: object, timeout: float = 240.0
) -> list[T]:
    """Run a function once for each rank, in processes; what it returned, in rank order.

    It is a function of a module, and called as `fn(exchange, *args)` with a `TorchGroup` of the
    default process group, which is gloo's. Arguments and results must pickle. The timeout, in
    seconds, is that of the whole job, and of each of torch's collectives. See `returned_values` for
    what it raises.
    """
    return returned_values(_run(world_size, fn, args, timeout=timeout, grace=_GRACE))


def run_processes_outcomes(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout: float = 240.0,
    grace: float | None = None,
) -> list[Outcome[T]]:
    """Like `run_processes`, but return how each rank ended, dead ranks included.

    Every rank has the whole time, whatever becomes of the others; or `grace` seconds after one of
    them has failed.
    """
    return _run(world_size, fn, args, timeout=timeout, grace=timeout if grace is None else grace)


def _run(
    world_size: int,
    fn: Callable[..., T],
    args: tuple[object, ...],
    *,
    timeout: float,
    grace: float,
) -> list[Outcome[T]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="remesh-ranks-") as directory:
        # Plain pickle, not the pipes' own: that one lends tensors from process to process by
        # descriptors, which end with the process that lends them.
        job = (world_size, f"file://{directory}/store", timeout, pickle.dumps((fn, args)))
        try:
            for rank in range(world_size):
                pipe, other_end = context.Pipe(duplex=False)
                pipes.append(pipe)
                process = context.Process(
                    target=_play, args=(other_end, rank, *job), name=f"rank {rank}", daemon=True
                )
                process.start()
                processes.append(process)
                other_end.close()
            return _collect(processes, pipes, timeout=timeout, grace=grace)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(
    processes: list[ForkServerProcess], pipes: list[Connection], *, timeout: float, grace: float
) -> list[Outcome[T]]:
    outcomes: list[Outcome[T]] = [TimedOut(timeout) for _ in processes]
    deadline = time.monotonic() + timeout
    waiting = list(range(len(processes)))
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipes[rank] for rank in waiting], left)
        for rank in [rank for rank in waiting if pipes[rank] in ready]:
            waiting.remove(rank)
            outcomes[rank] = _receive(processes[rank], pipes[rank])
            if not isinstance(outcomes[rank], Returned):
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _receive(process: ForkServerProcess, pipe: Connection) -> Outcome[T]:
    try:
        report = pipe.recv_bytes()
    except (EOFError, OSError):  # before the report, or in the middle of it
        process.join()
        assert process.exitcode is not None
        return Died(process.exitcode)
    process.join(_EXIT)
    return cast("Outcome[T]", pickle.loads(report))


def _play(pipe: Connection, *job: Any) -> None:
    """The main function of a rank's process."""
    outcome: Outcome[object]
    try:
        outcome = Returned(_call(*job))
        report = pickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001 - it is the outcome of this rank
        report = _pickle_error(error, traceback.format_exc())
    pipe.send_bytes(report)
    pipe.close()


def _call(rank: int, world_size: int, store: str, timeout: float, call: bytes) -> object:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from remesh.exchange.torch_group import TorchGroup

    fn, args = pickle.loads(call)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        # Joining ends when this rank has its connections. If it then ended at once, it would take
        # them away from ranks that still join.
        dist.barrier()
        return fn(TorchGroup(), *args)
    finally:
        dist.destroy_process_group()


def _pickle_error(error: BaseException, text: str) -> bytes:
    """An outcome that the test can unpickle, whatever the exception is like."""
    try:
        report = pickle.dumps(Raised(error, text))
        pickle.loads(report)
    except Exception:  # noqa: BLE001 - an exception's own code may do anything here
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        return pickle.dumps(Raised(RankFailedError(f"{kind}: {error}", kind), text))
    return report
