"""`remesh.elastic.run`: call a training function, and call it again when the world has changed.

Under `remesh run` a thread of the process waits for orders of the agent (`process_socket`). When
the function has to be left, the thread gets the main thread out of it, wherever that is:

- from a collective, which is made to raise (`collectives`);
- from Python code, a sleep or another call that signals interrupt: a signal of this module, whose
  handler raises `WorldChangedError`;
- while tensors are being changed it waits a moment for the next step boundary, where the manager
  raises `WorldChangedError`: then the step is complete.

A function that raises because it has lost a peer is out as well, before any order came. It ends
the connections of its process, so that all other ranks get out too, and waits for the order: the
agent, or that of another node, will have noticed why. An error of any other kind is the user's
and ends the process.

Under other launchers the function is called once.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from remesh.elastic.collectives import (
    abort_nccl,
    break_collectives,
    is_within,
    leave_groups,
    without_patience,
)
from remesh.elastic.failures import Patterns
from remesh.elastic.process_socket import (
    AgentConnection,
    Observation,
    Order,
    Report,
    pending,
)
from remesh.elastic.training_job import TrainingJob
from remesh.errors import AgentLostError, WorldChangedError
from remesh.run_info import run_info

__all__ = ["TrainingJob", "run"]

log = logging.getLogger(__name__)

T = TypeVar("T")

SIGNAL = signal.SIGRTMIN + 3
"""Interrupts the training function."""
CHANGE_SECONDS = 2.0
"""How long tensors that are being changed are waited for."""
RETRY_SECONDS = 0.1
"""Time between two attempts to get the main thread out."""
RAISE_AGAIN_SECONDS = 3.0
"""After so long another exception is raised: what handled the last one hangs."""
LOOK_SECONDS = 10.0
"""How long the thread waits for an order before it looks again."""
WAIT_SECONDS = 0.02
"""The same in the main thread: the other may take the order while this one begins to wait."""
STORE_SECONDS = 1.0
"""How long a process waits for the store of its world before it enters the training function."""
PEER_SECONDS = 60.0
"""How long a function that lost a peer waits for an order before its error ends the process."""


def run(train: Callable[[TrainingJob], T]) -> T:
    """Call a training function; under `remesh run`, again after each change of the world.

    The function makes its process groups, model and manager, resumes and trains. Give its manager
    the job (`remesh.Manager(..., job=job)`): then `resume` takes the state from the memory of the
    processes that go on. When the world changes, the function is interrupted by an exception and
    called again in the same process, after all process groups have been destroyed and the variables
    of the launcher (`RANK`, `WORLD_SIZE`, ...) have been set anew.

    Args:
        train: Takes the job.

    Returns:
        What it returns.

    Raises:
        ValueError: If this is not the main thread, which alone can be interrupted.
        AgentLostError: If the agent of this process ends while it waits for another world.
    """
    path = run_info().agent_socket
    if path and threading.current_thread() is not threading.main_thread():
        raise ValueError("remesh.elastic.run needs the main thread; call it there")
    agent = AgentConnection(path)
    if not agent.is_open and not agent.is_lost:
        return train(TrainingJob())
    _quiet_nccl()
    runner = _ReentrantRunner(agent)
    try:
        runner.await_world()
        return runner.run(train)
    finally:
        runner.close()


def _quiet_nccl() -> None:
    """Keep NCCL's watchdog from ending this process when its communicators are aborted.

    A value of the user stays, except 1, which the agent sets as torchrun does where there is none,
    and 2, with which it would abort them unknown to the job and let the process go on. Nor
    does the watchdog wait for dumps after a failure, by default for a minute, in which no group
    could be left.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    given = os.environ.setdefault(name, "0")
    if given in ("1", "2"):
        os.environ[name] = "0"
    elif given != "0":
        log.warning(
            "%s=%s is kept: NCCL may end this process when the world changes",
            name,
            given,
        )


class _ReentrantRunner:
    """The process between its agent and the training function."""

    def __init__(self, agent: AgentConnection) -> None:
        self._agent = agent
        self.job = TrainingJob(is_reentrant=True)
        self._report = Report()
        self._is_inside = False
        self._is_forced = False
        self._raised_at = 0.0
        self._leaving = threading.Lock()  # held by what makes the main thread leave a world
        self._is_closing = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._former = signal.signal(SIGNAL, self._interrupt)
        self._listener = threading.Thread(target=self._listen, name="remesh-orders", daemon=True)
        self._listener.start()
        self._say(is_out=False)

    def close(self) -> None:
        """The function has ended and is not entered again."""
        self._is_closing.set()
        self._agent.end()
        self._listener.join()
        self._agent.close()
        signal.signal(SIGNAL, self._former)

    # The main thread ----------------------------------------------------------------------

    def await_world(self) -> None:
        """Learn which orders are carried out, and wait for a world if this one is to be left."""
        while self._agent.look(WAIT_SECONDS) is None:  # the first word of the agent says it
            self._check_agent()
        order = self._order()
        if order is not None and order.environment is not None:
            self._say(is_out=False, number=order.number)  # an earlier call carried it out
        elif order is not None and self._must_leave():
            self._say(is_out=True, number=order.number)
            self._wait_for_entry(WorldChangedError("the world of the job changes"))

    def run(self, train: Callable[[TrainingJob], T]) -> T:
        """Call the function until it returns."""
        while True:
            self._raised_at, self._is_forced = 0.0, False
            self.job.is_changing = self.job.must_leave = self.job.is_aborted = False
            error: BaseException
            try:
                try:
                    self._is_inside = True
                    _await_store()
                    return train(self.job)
                finally:
                    self._is_inside = False
            except WorldChangedError as left:
                error = left
            except Exception as failure:
                # Peers may have left by an order that was not noticed here yet.
                if not self._must_leave() and not _lost_peer(failure):
                    raise
                error = failure
            self._is_inside = False
            self._leave_world(error)
            self._wait_for_entry(error)
            del error
            self.job.entries += 1

    def _must_leave(self) -> bool:
        return not self._report.is_out and pending(self._report, self._order()) is not None

    def _leave_world(self, error: BaseException) -> None:
        """Leave the world: nothing of it is in use when the agent learns of it."""
        began = time.monotonic()
        with self._leaving:  # the listener is done with this world, and does not meet the next one
            break_collectives(_store_port())
            abort_nccl()
        with without_patience():
            _clear_frames(error)
            leave_groups()
            gc.collect()
        self.job.make_room()
        text = "" if self._must_leave() else f"{type(error).__name__}: {error}"
        self._say(is_out=True, error=text[:500])
        log.info(
            "left the training function in %.3f s: %s", time.monotonic() - began, text or "ordered"
        )

    def _wait_for_entry(self, error: BaseException) -> None:
        """Wait for the order to enter, and take over the new world."""
        limit = time.monotonic() + PEER_SECONDS
        while True:
            order = pending(self._report, self._order())
            if order is not None:
                os.environ.update(order.environment or {})
                self._say(is_out=order.environment is None, number=order.number)
                if order.environment is not None:
                    return
            elif self._report.error and time.monotonic() > limit:
                raise error
            else:
                self._check_agent()
                self._agent.look(WAIT_SECONDS)

    def _say(self, *, is_out: bool, number: int | None = None, error: str = "") -> None:
        number = self._report.number if number is None else number
        self._report = Report(number=number, is_out=is_out, error=error)
        self._agent.say(Observation(report=self._report))

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal: raise, if the function is to be left at this moment.

        What a `__del__` raises, as that of a data loader, is printed and lost.
        """
        must_wait = self.job.is_changing or is_within(frame, "__del__")
        if self._is_inside and (self._is_forced or not must_wait):
            self._raised_at = time.monotonic()
            raise WorldChangedError("the world of the job changes")

    # The listener -------------------------------------------------------------------------

    def _order(self) -> Order | None:
        instruction = self._agent.look()
        return None if instruction is None else instruction.order

    def _check_agent(self) -> None:
        if self._agent.is_lost:
            raise AgentLostError("the agent (remesh run) that started this process has ended")

    def _listen(self) -> None:
        ordered_at: float | None = None
        pause = LOOK_SECONDS
        while not self._is_closing.is_set():
            self._agent.look(pause)
            if self._agent.is_lost:
                return
            must_leave = self._must_leave()
            if not (self._is_inside and must_leave):
                ordered_at = None
                # The function may be about to be entered.
                pause = WAIT_SECONDS if must_leave else LOOK_SECONDS
                continue
            ordered_at = time.monotonic() if ordered_at is None else ordered_at
            try:
                with self._leaving:
                    if self._must_leave():  # still
                        pause = self._make_leave(time.monotonic() - ordered_at)
            except OSError as error:  # the system may have no descriptor to give at the moment
                log.warning("the training function is not left yet: %s", error)
                pause = RETRY_SECONDS

    def _make_leave(self, seconds: float) -> float:
        """Try to get the main thread out; in how many seconds to try again."""
        self.job.must_leave = True
        if self.job.is_changing and seconds < CHANGE_SECONDS:
            return RETRY_SECONDS / 10
        self.job.is_aborted = True
        if self.job.is_changing and seconds < CHANGE_SECONDS:  # since the line before
            self.job.is_aborted = False
            return RETRY_SECONDS / 10
        self._is_forced = seconds >= CHANGE_SECONDS
        break_collectives(_store_port())
        raised = self._raised_at
        if not raised or time.monotonic() - raised > RAISE_AGAIN_SECONDS:
            signal.pthread_kill(self._main, SIGNAL)
        abort_nccl()  # after the signal: a thread that waits for the device has to leave, not go on
        return RETRY_SECONDS


def _store_port() -> int:
    return int(os.environ.get("MASTER_PORT", "0") or 0)


def _await_store() -> None:
    """Wait until rank 0 has made the store of the world.

    All processes enter at the same time. torch waits half a second after a connection that was
    refused, which is as long as the rest of a recovery takes; and if rank 0 has died, torch tries
    for half an hour, and cannot be interrupted, as this can. If the training function makes its
    process group later, nothing more is lost than that.
    """
    rank, host, port = os.environ.get("RANK"), os.environ.get("MASTER_ADDR"), _store_port()
    if rank == "0" or not host or not port:
        return
    deadline, pause = time.monotonic() + STORE_SECONDS, 0.002
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
        except OSError:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.05)
        else:
            return


def _lost_peer(error: BaseException) -> bool:
    """True if an error is what follows from the loss of a peer, where there are any."""
    if os.environ.get("WORLD_SIZE") == "1":
        return False
    text = "".join(traceback.format_exception(error))
    return any(re.search(sign, text, re.IGNORECASE) for sign in Patterns().collateral)


def _clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an exception hold: models, groups and optimizers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
