"""A job that saves again and again until it is killed; what its checkpoints must hold.

A rank dies in one of two ways:

* at the n-th of its system calls that change the disk: before it, after it, or, if it writes
  bytes, in the middle of it. These are all the states in which a dead process can leave a disk, and
  this way is the same each time.
* by the clock, from another thread, wherever it is: in a message to another rank, in a lock, in C.

The others die with it, or soon after it, as a launcher sees to, or are left to find out.

Odd steps go to directories of their own, even ones to one directory again and again. As soon as
a save has returned, or the handle's `wait`, the rank announces it in a file. Every bit of the state
follows from the step.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

import remesh
from remesh.checkpoint import unchanged
from remesh.core.sharded import ShardedTensor
from remesh.exchange import Exchange
from remesh.pipeline import Compress
from tests.engine.scenes import share_of
from tests.waiting import is_alive

MAX_STEPS = 30
"""Steps of a launch that is not killed; the next one begins so many further."""

DEADLINE = 3.0
"""Seconds that the background of a survivor waits for the dead."""

_CHANGES = ("open", "pwrite", "fsync", "link", "rename", "replace", "unlink", "mkdir", "rmdir")


Way: TypeAlias = Literal["save", "thread", "process"]
"""`remesh.save`, or a `Saver` that writes in a thread or a process."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a launch dies."""

    rank: int  # who dies first
    others: Literal["at once", "soon", "left"]
    """Whether the others die at the same time, are killed by a launcher, or go on."""
    with_writers: bool  # whether writer processes die with their trainers
    change: int  # at which of its changes of the disk; 0 if by the clock
    when: Literal["before", "within", "after"]  # where in the change
    seconds: float  # by the clock: how long after the first save began


@dataclass(frozen=True, slots=True)
class Launch:
    """What the ranks of a launch have to know."""

    root: Path  # where everything is saved
    first_step: int
    world_size: int
    way: Way  # how it saves
    newest: int  # the newest announced step; 0 if there is none
    death: Death

    @property
    def announced(self) -> Path:
        return self.root / "announced"

    @property
    def process_ids(self) -> Path:
        """Where the ranks write down their writer processes."""
        return self.root / f"writers-{self.first_step}"


def place_of(root: Path, step: int) -> Path:
    return root / (f"step_{step:08d}" if step % 2 else "latest")


def compress_of(number: int) -> Compress | None:
    """Every third save, or launch, writes compressed files."""
    return None if number % 3 else "zstd"


def whole_state(step: int) -> dict[str, Any]:
    """What a checkpoint of a step holds."""
    dice = np.random.default_rng(step)
    # Every now and then a state of several chunks, which is written directly where that works.
    num_rows = 12 * 8192 if step % 19 == 0 else 24
    return {
        "weight": dice.random((num_rows, 16), np.float32),
        "moment": dice.random((num_rows, 3)),
        "mask": dice.random((24, 5)) < 0.5,
        "replicated": dice.integers(0, 1 << 40, 50),
        "frozen.weight": np.full((33, 5), (step - 1) // MAX_STEPS, np.float32),
        "step": step,
    }


def part_of_state(step: int, rank: int, world_size: int) -> dict[str, Any]:
    """A rank's rows of it, and a module that is not trained, whose file saves keep."""
    state = whole_state(step)
    frozen = torch.from_numpy(state.pop("frozen.weight"))
    state["frozen"] = torch.nn.Linear(5, 33, bias=False)
    state["frozen"].weight = torch.nn.Parameter(frozen, requires_grad=False)
    for name in ("weight", "moment", "mask"):
        state[name] = share_of(name, state[name], rank, world_size)
    return state


def arrays_of(state: dict[str, Any]) -> dict[str, Any]:
    """The arrays that a rank holds."""
    found = {}
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            found[name] = value.parts[0].data
        elif isinstance(value, np.ndarray):
            found[name] = value
    return found


# ---------------------------------------------------------------------------------------------
# What a rank does
# ---------------------------------------------------------------------------------------------


def save_until_killed(exchange: Exchange, launch: Launch) -> None:
    """Load the newest announced checkpoint in this layout, and save until death."""
    if launch.newest:
        _check_newest(exchange, launch)
    steps = range(launch.first_step, launch.first_step + MAX_STEPS)
    if launch.way == "save":
        fate = _arm(exchange, launch, None)
        for step in steps:
            state = part_of_state(step, exchange.rank, exchange.world_size)
            place = place_of(launch.root, step)
            remesh.save(state, place, overwrite=True, compress=compress_of(step), group=exchange)
            _announce(launch.announced, step)
        fate.end(exchange)
        return
    unchanged.MIN_BYTES = 1
    saver = remesh.Saver(
        group=exchange,
        writer=launch.way,
        deadline=DEADLINE,
        at_exit="abort",
        compress=compress_of(launch.first_step // MAX_STEPS),
    )
    if saver.writer_process_id is not None:
        _announce(launch.process_ids, saver.writer_process_id)
    fate = _arm(exchange, launch, saver.writer_process_id)
    for step in steps:
        state = part_of_state(step, exchange.rank, exchange.world_size)
        handle = saver.save_async(state, place_of(launch.root, step), overwrite=True)
        for array in arrays_of(state).values():
            array[...] = 1  # it is staged
        handle.result()
        _announce(launch.announced, step)
    saver.close()
    fate.end(exchange)


def _check_newest(exchange: Exchange, launch: Launch) -> None:
    wanted = part_of_state(launch.newest, exchange.rank, exchange.world_size)
    state = part_of_state(launch.newest, exchange.rank, exchange.world_size)
    for array in arrays_of(state).values():
        array[...] = 0
    remesh.load(state, place_of(launch.root, launch.newest), group=exchange)
    for name, array in arrays_of(wanted).items():
        assert arrays_of(state)[name].tobytes() == array.tobytes(), name


def _announce(file: Path, number: int) -> None:
    """Append a number, in one system call."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)


class _Fate:
    """Whether somebody may still die."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def kill(self, process_ids: Sequence[int]) -> None:
        """Kill processes, this one being the last, unless all is over."""
        with self._lock:
            for process_id in () if self._is_over else process_ids:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    def end(self, exchange: Exchange) -> None:
        """Let nobody die any more. Collective."""
        exchange.all_gather(b"")
        with self._lock:
            self._is_over = True
        # Nobody leaves before all are safe: to those who follow, an end looks like a death.
        exchange.all_gather(b"")


def _arm(exchange: Exchange, launch: Launch, writer: int | None) -> _Fate:
    """Let this rank die when it is due, or follow the one that does if a launcher would see to it.

    What ends the danger.
    """
    death, fate = launch.death, _Fate()
    ids = [
        [int(number) for number in reply.split()]
        for reply in exchange.all_gather(f"{os.getpid()} {writer or ''}".encode())
    ]
    if exchange.rank == death.rank:
        mine = ids[exchange.rank]
        targets = [*mine[1:], mine[0]] if death.with_writers else mine[:1]
        if death.others == "at once":
            theirs = [of for rank, of in enumerate(ids) if rank != exchange.rank]
            targets = [one for of in theirs for one in of[: 1 + death.with_writers]] + targets
        die = functools.partial(fate.kill, targets)
        if death.change:
            _die_at_change(death, die)
        else:
            timer = threading.Timer(death.seconds, die)
            timer.daemon = True
            timer.start()
    elif death.others == "soon":
        args = (ids[death.rank][0], fate)
        threading.Thread(target=_follow, args=args, daemon=True).start()
    return fate


def _follow(process_id: int, fate: _Fate) -> None:
    """Die soon after another process, if it dies before its work is over."""
    while is_alive(process_id):
        time.sleep(0.005)
    time.sleep(0.01)
    fate.kill([os.getpid()])


def _die_at_change(death: Death, die: Callable[[], None]) -> None:
    """Let this process die at one of its system calls that change the disk."""
    numbers = itertools.count(1)

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def change(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **options)
            is_last = next(numbers) == death.change
            if is_last and death.when == "within" and name == "pwrite":
                descriptor, data, position = args
                half = len(data) // 2
                call(descriptor, data[: half - half % 4096 if half > 4096 else half], position)
                die()
            if is_last and death.when != "after":
                die()
            try:
                return call(*args, **options)
            finally:  # also if the call has failed, and changed nothing
                if is_last:
                    die()

        return change

    for name in _CHANGES:
        setattr(os, name, counted(name))
