"""The slow half of a save, beside the training.

An `AsyncRequest` is a save that is prepared but not done: a function for the slow half, and
functions that finalize. `AsyncCallsQueue` runs the slow halves in threads, and finalizes in the
order of scheduling.

1. `schedule_async_request` calls `preload_fn`, which copies the state out of the trainer's memory,
   and starts `async_fn`. From then on the trainer may change everything.
2. `maybe_finalize_async_calls` asks all ranks whether theirs has ended. If so, every rank calls the
   finalization functions, which may be collective. If `async_fn` failed on one rank, all ranks
   raise, and nothing is finalized.

The background uses no collective, so the training's own are never disturbed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from remesh.checkpoint.local import exchange_of
from remesh.compat.megatron.core import (
    CheckpointingException,
    as_checkpointing_exception,
    on_all_ranks,
)
from remesh.exchange import run_on_all

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


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
        args[1:2] = [_copied(staged)]
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


def _copied(staged: Any) -> Any:
    """The staged value with its tensors copied: Megatron's writer leaves those of the CPU."""
    if isinstance(staged, torch.Tensor):
        return staged.detach().clone()
    return type(staged)(map(_copied, staged)) if type(staged) in {list, tuple} else staged


class _ActiveCall(NamedTuple):
    running: Future[object]  # the slow half on this rank
    request: AsyncRequest
    is_foreign: bool  # whether another library has made it, and finalizes also what has failed

    def poll(self) -> bytes:
        """Whether this rank has ended, for the other ranks to compare; raises if it failed."""
        is_done = self.running.done()
        cause = self.running.exception() if is_done else None
        if cause is not None:
            raise CheckpointingException(
                f"the background of save {self.request.call_idx} failed: "
                f"{type(cause).__name__}: {cause}; the checkpoint was not finalized"
            ) from cause
        return msgspec.msgpack.encode((is_done, self.request.call_idx))

    def has_ended(self, *, no_dist: bool) -> bool:
        """True if all ranks have ended, or this one; raises if one failed. Collective."""
        if no_dist:
            self.poll()
            return self.running.done()
        with as_checkpointing_exception():
            replies = run_on_all(exchange_of(None), self.poll)
        polls = [msgspec.msgpack.decode(reply, type=tuple[bool, int]) for reply in replies]
        indices = {call_idx for _, call_idx in polls}
        if len(indices) > 1:
            raise CheckpointingException(
                f"ranks finalize different requests, {sorted(indices)}\nEvery rank must schedule "
                "and finalize all of them in one order"
            )
        return all(is_done for is_done, _ in polls)


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; all ranks do the same with theirs.

    `persistent` changes nothing: each request runs in a thread. Saves of this library's strategies
    write in a process of their own if that is asked of them (`writer="process"`).
    """

    def __init__(self, persistent: bool = False) -> None:  # noqa: ARG002 - the interface is Megatron's
        self._active: deque[_ActiveCall] = deque()
        self._call_idx = -1

    @staticmethod
    def warmup_persistent_caller(rank: int, **_priorities: Any) -> None:
        """Nothing: no process is needed."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, this module's or one like it; returns its number, counted from 0.

        Returns when the state is copied out of the trainer's memory. If that fails on one rank, all
        raise, and nothing is started.
        """
        self._call_idx += 1
        request = AsyncRequest.of(async_request).freeze()._replace(call_idx=self._call_idx)
        running = _in_a_thread(on_all_ranks(request.preloaded).run)
        is_foreign = not isinstance(async_request, AsyncRequest)
        self._active.append(_ActiveCall(running, request, is_foreign))
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
            running, request, is_foreign = call = self._active[0]
            if blocking:
                futures.wait([running])
            try:
                if not call.has_ended(no_dist=no_dist):
                    break
            except CheckpointingException:
                self._active.popleft()
                for finalize in request.finalize_fns if is_foreign else ():
                    futures.wait([running])  # if another rank has failed, this may still write
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
        if abort:
            self._active.clear()
        else:
            self.maybe_finalize_async_calls(blocking=True)


def _in_a_thread(work: Callable[[], object]) -> Future[object]:
    """Run something in a thread of its own, which ends with the process."""
    running = Future[object]()

    def run() -> None:
        try:
            running.set_result(work())
        except BaseException as error:  # noqa: BLE001 - all ranks raise it when they finalize
            running.set_exception(error)

    threading.Thread(target=run, name="remesh-async-call", daemon=True).start()
    return running
