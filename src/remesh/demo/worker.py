"""What one process of a run does: join the group, build or resume, train, save.

A process ends itself in one of three ways: with code 0 when its steps are done, with code 1 when
anything raises (it tells its starter first), or, on the rank that the run wants killed, by SIGKILL
in the middle of writing its file. When a peer dies, the collective call that waits for it raises,
at once when the connection breaks and after `PEER_TIMEOUT` at the latest.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

import remesh
from remesh.demo.config import Kill, RunSpec, Saves
from remesh.demo.data import read_tokens
from remesh.demo.layouts import held_tensors
from remesh.demo.messages import AboutToDie, Failed, Message, Ready, SaveBegun, SaveDone, StepDone
from remesh.demo.train import Trainee, build, train_step
from remesh.events import Event

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
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=spec.layout.num_ranks,
        timeout=PEER_TIMEOUT,
    )
    trainee = build(spec.train, spec.layout)
    num_done, load_seconds = _resume(spec.resume_from, trainee)
    tell(Ready(num_done, held_tensors(trainee.model), load_seconds))
    tokens = read_tokens()
    while num_done < spec.train.num_steps:
        loss = train_step(trainee, spec.train, tokens, num_done)
        num_done += 1
        tell(StepDone(num_done, loss))
        if spec.saves is not None and num_done % spec.saves.every == 0:
            _save(trainee, num_done, spec.saves, _killer(spec.kill, rank, num_done, tell), tell)
    dist.destroy_process_group()


def _loopback() -> str:
    """The name of the loopback interface: `lo`, or `lo0` on some systems."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _state(trainee: Trainee, num_steps_done: int) -> dict[str, object]:
    """Everything that the rest of the run depends on."""
    return {
        "model": trainee.model,
        "optimizer": trainee.optimizer,
        "scheduler": trainee.scheduler,
        "num_steps_done": num_steps_done,
    }


def _resume(path: Path | None, trainee: Trainee) -> tuple[int, float | None]:
    """Load a checkpoint, if any: steps done, and the seconds that it took."""
    if path is None:
        return 0, None
    begin = time.perf_counter()
    state = remesh.load(_state(trainee, 0), path)
    num_done = state["num_steps_done"]
    assert isinstance(num_done, int)
    return num_done, time.perf_counter() - begin


def _save(
    trainee: Trainee,
    num_done: int,
    saves: Saves,
    on_event: Callable[[Event], None],
    tell: Callable[[Message], None],
) -> None:
    tell(SaveBegun(num_done))
    begin = time.perf_counter()
    remesh.save(_state(trainee, num_done), saves.path(num_done), on_event=on_event)
    tell(SaveDone(num_done, time.perf_counter() - begin))


def _killer(
    kill: Kill | None, rank: int, num_done: int, tell: Callable[[Message], None]
) -> Callable[[Event], None]:
    """A listener to the save after `num_done` steps, which kills this process if so planned."""

    def listen(event: Event) -> None:
        if event.point == KILL_POINT and kill == Kill(rank, num_done):
            tell(AboutToDie(num_done, event.point, event.num_bytes))
            os.kill(os.getpid(), signal.SIGKILL)

    return listen
