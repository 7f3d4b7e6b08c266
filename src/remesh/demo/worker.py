"""What one process of a run does: join the group, build or resume, train, save.

Resuming and saving is a `remesh.Manager`'s; it saves in the foreground, so that the peers of a rank
that dies in a save notice at once.

A process ends itself in one of three ways: with code 0 when its steps are done, with code 1 when
anything raises (it tells its starter first), or, on the rank that the run wants killed, by SIGKILL
in the middle of writing its file. When a peer dies, the collective call that waits for it raises,
at once when the connection breaks and after `PEER_TIMEOUT` at the latest.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from remesh.demo.config import Kill, RunSpec
from remesh.demo.data import read_tokens
from remesh.demo.launch import loopback
from remesh.demo.layouts import held_tensors
from remesh.demo.messages import AboutToDie, Failed, Message, Ready, SaveBegun, SaveDone, StepDone
from remesh.demo.train import Trainee, build, train_step
from remesh.events import Event
from remesh.training.manager import Manager

PEER_TIMEOUT = dt.timedelta(seconds=60)
"""How long a collective call waits for the other ranks."""

KILL_POINT = "save.chunk_written"
"""The moment of a save at which the chosen rank dies."""


def work(spec: RunSpec, rank: int, rendezvous: Path, log: Path, connection: Connection) -> None:
    """Run one rank to its end; never returns.

    Args:
        spec: The run.
        rank: This process's number in it.
        rendezvous: A file that does not exist yet, the same for all ranks.
        log: Where everything goes that this process prints.
        connection: To the starting process.
    """
    _print_into(log)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    code = 0
    try:
        _run(spec, rank, rendezvous, connection.send)
    except Exception as error:  # noqa: BLE001 - told to the starter, and printed to the log
        traceback.print_exc()
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        code = 1
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # After a peer died, tearing the process group down in the usual way would wait for it.
    os._exit(code)


def _print_into(log: Path) -> None:
    """Send standard output and error, also of native code, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)


def _end_with_starter() -> None:
    """End this process if the one that started it is gone."""
    starter = parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os._exit(1)


def _run(spec: RunSpec, rank: int, rendezvous: Path, tell: Callable[[Message], None]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=spec.layout.num_ranks,
        timeout=PEER_TIMEOUT,
    )
    trainee = build(spec.train, spec.layout)
    state = _state(trainee, 0)
    with _manager(spec, _killer(spec.kill, rank, state, tell)) as manager:
        load_seconds = _resume(manager, state)
        tell(Ready(_num_done(state), held_tensors(trainee.model), load_seconds))
        tokens = read_tokens()
        while _num_done(state) < spec.train.num_steps:
            loss = train_step(trainee, spec.train, tokens, _num_done(state))
            state["num_steps_done"] = num_done = _num_done(state) + 1
            tell(StepDone(num_done, loss))
            if manager is not None and spec.save_every and num_done % spec.save_every == 0:
                _save(manager, num_done, state, tell)
    dist.destroy_process_group()


def _manager(
    spec: RunSpec, on_event: Callable[[Event], None]
) -> AbstractContextManager[Manager | None]:
    """The manager of a run that loads or saves."""
    if spec.root is None:
        return nullcontext()
    return Manager(spec.root, background=False, on_event=on_event)


def _state(trainee: Trainee, num_steps_done: int) -> dict[str, object]:
    """Everything that the rest of the run depends on."""
    return {
        "model": trainee.model,
        "optimizer": trainee.optimizer,
        "scheduler": trainee.scheduler,
        "num_steps_done": num_steps_done,
    }


def _num_done(state: dict[str, object]) -> int:
    num_done = state["num_steps_done"]
    assert isinstance(num_done, int)
    return num_done


def _resume(manager: Manager | None, state: dict[str, object]) -> float | None:
    """Go on from the newest checkpoint, if there is one: the seconds that it took."""
    begin = time.perf_counter()
    if manager is None or manager.resume(state) is None:
        return None
    return time.perf_counter() - begin


def _save(
    manager: Manager,
    num_done: int,
    state: dict[str, object],
    tell: Callable[[Message], None],
) -> None:
    tell(SaveBegun(num_done))
    begin = time.perf_counter()
    manager.save(num_done, state)
    tell(SaveDone(num_done, time.perf_counter() - begin))


def _killer(
    kill: Kill | None, rank: int, state: dict[str, object], tell: Callable[[Message], None]
) -> Callable[[Event], None]:
    """A listener to saves, which kills this process in the one that is planned."""

    def listen(event: Event) -> None:
        num_done = _num_done(state)
        if event.point == KILL_POINT and kill == Kill(rank, num_done):
            tell(AboutToDie(num_done, event.point, event.num_bytes))
            os.kill(os.getpid(), signal.SIGKILL)

    return listen
