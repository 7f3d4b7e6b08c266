"""The slow half of a save, beside the training.

An `AsyncRequest` is a save that is prepared but not done: a function for the slow half, and
functions that finalize. `AsyncCallsQueue` runs the slow halves, in threads or in one process that
lives on, and finalizes in the order of scheduling.

1. `schedule_async_request` calls `preload_fn`, which copies the state out of the trainer's memory,
   and starts `async_fn`. From then on the trainer may change everything.
2. `maybe_finalize_async_calls` asks all ranks whether theirs has ended. If so, every rank calls the
   finalization functions, which may be collective. If `async_fn` failed on one rank, all ranks
   raise, and nothing is finalized.

The background uses no collective, so the training's own are never disturbed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import CheckpointingException, on_all_ranks
from remesh.exchange import run_on_all

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


logger = logging.getLogger(__name__)


@contextmanager
def _disable_gc() -> Iterator[None]:
    """No garbage is collected in a `with` block, or in a function that this decorates."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _set_process_qos(cpu_priority: int | None, io_priority: int | None) -> None:
    """Let this process yield to others; what the system refuses is logged."""
    try:
        if cpu_priority is not None:
            os.nice(max(0, cpu_priority - os.nice(0)))
        if io_priority is not None:
            import psutil

            psutil.Process().ionice(io_priority)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        logger.warning("the priority of process %d stays as it is: %s", os.getpid(), error)


class AsyncRequest(NamedTuple):
    """A prepared save."""

    async_fn: Callable[..., object] | None  # the slow half; None if there is nothing to do
    async_fn_args: tuple[Any, ...]
    """Its positional arguments. What `preload_fn` returns takes the place of the second."""
    finalize_fns: list[Callable[[], object]]
    """Called in order on every rank once `async_fn` has ended on all of them."""
    async_fn_kwargs: Mapping[str, Any] = _NO_KWARGS  # keyword arguments of `async_fn`
    preload_fn: Callable[[], Any] | None = None  # copies the state out of the trainer's memory
    is_frozen: bool = False  # whether the request is scheduled, so that nothing can be added
    call_idx: int = 0  # number of the request in its queue

    @classmethod
    def of(cls, request: Any) -> AsyncRequest:
        """A request of another library with these attributes, as nvidia-resiliency-ext makes."""
        return cls(**{name: getattr(request, name) for name in cls._fields})

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Add a function that is called after those that are there."""
        if self.is_frozen:
            raise RuntimeError("this request is scheduled already; add functions before that")
        self.finalize_fns.append(fn)

    def preloaded(self) -> AsyncRequest:
        """The request after its preloading."""
        if self.preload_fn is None:
            return self
        staged, args = self.preload_fn(), list(self.async_fn_args)
        args[1:2] = [staged]
        return self._replace(async_fn_args=tuple(args), preload_fn=None)

    def run(self) -> None:
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_sync(self) -> None:
        """Do everything at once. Collective; an error on one rank raises on all."""
        on_all_ranks(lambda: self.preloaded().run())
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        return self._replace(is_frozen=True)


def run_here(_: None, work: Callable[[], None]) -> None:
    """The slow half of a save of this library's strategies, which stays in this process.

    It writes memory of this process, or waits for a background that the save has on its own.
    """
    work()


class _Progress(msgspec.Struct, frozen=True):
    """The state of the current call of a rank, as ranks exchange it."""

    is_alive: bool
    call_idx: int
    failure: str


class AsyncCaller(ABC):
    """Runs one request at a time in the background of this rank."""

    def __init__(self) -> None:
        self.call_idx = -1
        self._running: Future[object] | None = None

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a preloaded request; to be called on all ranks."""

    def close(self, abort: bool = False) -> None:
        """End what runs in the background: wait for it, or abort it as far as that is possible."""
        if not abort:
            self.wait()

    def is_alive(self) -> bool:
        """True if the request still runs on this rank."""
        return self._running is not None and not self._running.done()

    def wait(self) -> None:
        if self._running is not None:
            futures.wait([self._running])

    def failure(self) -> BaseException | None:
        """Why the request of this rank failed, once it has ended; None if it did not."""
        return None if self._running is None else self._running.exception()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """True if the request has ended on all ranks, or with `no_dist` on this one."""
        if blocking:
            self.wait()
        if no_dist:
            failure = None if self.is_alive() else self.failure()
            if failure is not None:
                raise CheckpointingException(f"the background of a save failed: {failure}") from (
                    failure
                )
            return not self.is_alive()
        return self.sync_all_async_calls(self.is_alive())

    def sync_all_async_calls(self, is_alive: bool) -> bool:
        """True if all ranks have ended; raises on all if one failed. Collective."""
        cause = None if is_alive else self.failure()
        failure = "" if cause is None else f"{type(cause).__name__}: {cause}"
        mine = msgspec.msgpack.encode(_Progress(is_alive, self.call_idx, failure))
        replies = run_on_all(exchange_of(None), lambda: mine)
        ranks = [msgspec.msgpack.decode(reply, type=_Progress) for reply in replies]
        indices = {one.call_idx for one in ranks}
        if len(indices) > 1:
            raise CheckpointingException(
                f"ranks finalize different requests, {sorted(indices)}\nEvery rank must schedule "
                "and finalize all of them in one order"
            )
        if any(one.is_alive for one in ranks):
            return False
        failed = [(rank, one.failure) for rank, one in enumerate(ranks) if one.failure]
        if failed:
            rank, text = failed[0]
            raise CheckpointingException(
                f"the background of save {self.call_idx} failed on {len(failed)} ranks, the first "
                f"is rank {rank}: {text}; the checkpoint was not finalized"
            ) from cause
        return True


class TemporalAsyncCaller(AsyncCaller):
    """Runs each request in a thread of its own; after an abort it ends with the process."""

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        self.call_idx = async_req.call_idx
        running = self._running = Future[object]()

        def work() -> None:
            try:
                async_req.run()
            except BaseException as error:  # noqa: BLE001 - all ranks raise it when they finalize
                running.set_exception(error)
            else:
                running.set_result(None)

        threading.Thread(target=work, name="remesh-async-call", daemon=True).start()


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests one after the other in a process that lives until `close`.

    The process is a fresh one: `async_fn`, its arguments and what `preload_fn` returns must pickle.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pool: ProcessPoolExecutor | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See `AsyncCaller`; waits for the request before, if it still runs."""
        self.wait()
        if self._pool is None or isinstance(self.failure(), BrokenProcessPool):
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_end_with_parent)
        self.call_idx, self._running = async_req.call_idx, None
        if async_req.async_fn is not None:
            self._running = self._pool.submit(
                async_req.async_fn, *async_req.async_fn_args, **async_req.async_fn_kwargs
            )

    def close(self, abort: bool = False) -> None:
        if self._pool is None:
            return
        if abort:
            for process in self._pool._processes.values():  # noqa: SLF001 - no public way to end them
                process.kill()
        self._pool.shutdown()
        self._pool = self._running = None


def _end_with_parent() -> None:
    """End this process with the one that started it, also if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _ActiveRequest(NamedTuple):
    caller: AsyncCaller
    request: AsyncRequest
    is_foreign: bool  # whether another library has made it, and finalizes also what has failed


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; all ranks do the same with theirs.

    With `persistent` they run in one process that lives until `close`, instead of threads. Saves of
    this library's strategies run in threads all the same; the native one takes `writer="process"`.
    """

    def __init__(self, persistent: bool = False) -> None:
        self._persistent = PersistentAsyncCaller() if persistent else None
        self._active: deque[_ActiveRequest] = deque()
        self._call_idx = -1

    @staticmethod
    def warmup_persistent_caller(rank: int, **_priorities: Any) -> None:
        """Nothing: saves of this library's strategies need no process, others start it."""
        logger.debug("rank %d: no process for saves is started in advance", rank)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, this module's or one like it; returns its number, counted from 0.

        Returns when the state is copied out of the trainer's memory. If that fails on one rank, all
        raise, and nothing is started.
        """
        self._call_idx += 1
        request = AsyncRequest.of(async_request).freeze()._replace(call_idx=self._call_idx)
        caller: AsyncCaller = TemporalAsyncCaller()
        if self._persistent is not None and request.async_fn is not run_here:
            caller = self._persistent
            # One process does one thing at a time; those before are finalized first.
            self.maybe_finalize_async_calls(blocking=True)
        caller.schedule_async_call(on_all_ranks(request.preloaded))
        is_foreign = not isinstance(async_request, AsyncRequest)
        self._active.append(_ActiveRequest(caller, request, is_foreign))
        return self._call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize requests that have ended on all ranks; to be called on all ranks.

        Returns their numbers. A request that failed on one rank raises on all: it is no longer in
        the queue, and not finalized. Only requests of nvidia-resiliency-ext are: they clean up and
        raise an error of their own. With `no_dist` this looks at this rank only, for callers that
        know that all ranks have ended.
        """
        finalized = []
        while self._active:
            caller, request, is_foreign = self._active[0]
            try:
                if not caller.is_current_async_call_done(blocking, no_dist):
                    break
            except CheckpointingException:
                self._active.popleft()
                for finalize in request.finalize_fns if is_foreign else ():
                    finalize()
                raise
            self._active.popleft()
            for finalize in request.finalize_fns:
                finalize()
            finalized.append(request.call_idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        return len(self._active)

    def close(self, abort: bool = False) -> None:
        """Finalize everything; after an abort, what is not finalized is never a checkpoint."""
        try:
            if abort:
                self._active.clear()
            else:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            if self._persistent is not None:
                self._persistent.close(abort)
