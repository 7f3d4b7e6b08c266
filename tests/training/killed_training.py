"""A small training job that can be killed anywhere, and the history that it leaves.

The ranks train a model under FSDP2 on real steps and write down, each in a file of its own, what
they did: what they resumed from, which samples each step had and its loss, which checkpoints they
saw committed. `History` puts the files of all launches together.

A launch dies in one of two ways: a rank kills itself at the n-th change of the storage that it
makes (before or after it), or all do after some time. In the first way, whatever part of a save, a
commit, a removal or a resume changes the storage is met.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remesh.exchange import Exchange
from tests.support import Died, returned_values, run_processes_outcomes

NUM_SAMPLES = 250
GLOBAL_BATCH = 12
"""Divides into 1, 2, 3 and 4 ranks; the last step of an epoch has 10 samples."""
SAVE_EVERY = 3
KEEP_LAST = 2
KEEP_EVERY = 15
DIM = 12


@dataclass(frozen=True)
class Death:
    """How a launch dies."""

    rank: int | None = None  # which rank kills itself; None if all do
    change: int = 0  # at which of its changes of the storage
    after: bool = False  # whether the change is made before that
    seconds: float = math.inf  # after which all of them kill themselves


@dataclass(frozen=True)
class Launch:
    """What the processes of a launch have to know; without a last step they train until killed."""

    root: Path
    notes: Path
    world_size: int
    last_step: int | None
    dropout: float = 0.0
    death: Death | None = None


def run(launch: Launch) -> bool:
    """Run a launch until it ends or dies; whether it was killed."""
    launch.notes.mkdir(parents=True)
    # When one has died, the others follow soon, as a launcher sees to.
    outcomes = run_processes_outcomes(launch.world_size, _work, launch, grace=0.02)
    if Died(-signal.SIGKILL) not in outcomes:
        returned_values(outcomes)
        return False
    return True


# ---------------------------------------------------------------------------------------------
# What a rank does
# ---------------------------------------------------------------------------------------------


def _work(exchange: Exchange, launch: Launch) -> None:
    death = launch.death or Death()
    if death.seconds < math.inf:
        timer = threading.Timer(death.seconds, os.kill, [os.getpid(), signal.SIGKILL])
        timer.daemon = True
        timer.start()
    elif death.rank == exchange.rank:
        _die_at_change(death)
    with (launch.notes / f"rank-{exchange.rank}.jsonl").open("a", buffering=1) as file:
        _train(launch, lambda **what: file.write(json.dumps(what) + "\n"))


def _die_at_change(death: Death) -> None:
    """Let this process kill itself at one of its changes of a local storage."""
    from remesh.storage import LocalStorage

    numbers = itertools.count(1)

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            is_last = next(numbers) == death.change
            if is_last and not death.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(*args, **options)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return change

    for name in ("put", "create", "delete", "sync"):
        setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))


def _train(launch: Launch, note: Callable[..., object]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from remesh.training.manager import Manager
    from remesh.training.policies import KeepEvery, KeepLast, KeepPolicy
    from remesh.training.sampling import ResumableBatchSampler, ResumableSampler

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Dropout(launch.dropout), nn.Linear(2 * DIM, 1)
    ).double()
    data = torch.randn(NUM_SAMPLES, DIM, dtype=torch.float64)
    goals = torch.sin(data.sum(1, keepdim=True))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
    batches = ResumableBatchSampler(
        ResumableSampler(NUM_SAMPLES, seed=5), GLOBAL_BATCH // launch.world_size
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}
    torch.manual_seed(100 + dist.get_rank())
    keep: list[KeepPolicy] = [KeepLast(KEEP_LAST), KeepEvery(KEEP_EVERY)]
    with Manager(launch.root, every=SAVE_EVERY, keep=keep) as manager:
        resumed = manager.resume(state)
        step = 0 if resumed is None else resumed.step
        note(resumed=step, passed_over=[] if resumed is None else resumed.passed_over)
        while launch.last_step is None or step < launch.last_step:
            if batches.sampler.num_remaining == 0:
                batches.set_epoch(batches.sampler.epoch + 1)
            for batch in batches:
                # The mean over the global batch: FSDP takes the mean over ranks.
                num_here = min(GLOBAL_BATCH, batches.sampler.num_remaining)
                error = (model(data[batch]) - goals[batch]).square().sum()
                (error * launch.world_size / num_here).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                loss = error.detach() / num_here
                dist.all_reduce(loss)
                step += 1
                note(step=step, epoch=batches.sampler.epoch, samples=batch, loss=float(loss))
                batches.advance()
                manager.step(step, state, metrics={"loss": float(loss)})
                note(saved=manager.saved_step)
                if step == launch.last_step:
                    break
    note(saved=manager.saved_step, done=True)
    dist.barrier()


# ---------------------------------------------------------------------------------------------
# What is left of it
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What all launches of a run did, as far as it counted in the end."""

    losses: Mapping[int, float]  # by step
    samples: Mapping[int, list[int]]  # by epoch, in the order of steps and ranks
    resumed: list[int]  # what each launch resumed from that came that far
    lost: list[tuple[int, int]]  # announced steps from before which a later launch resumed
    passed_over: list[Any]  # checkpoints that some launch could not use

    @classmethod
    def read(cls, notes: list[Path]) -> History:
        """Put together the notes of launches, in their order."""
        steps: dict[int, list[dict[str, Any]]] = {}
        resumed, lost, passed_over, announced = [], [], [], 0
        for folder in notes:
            by_rank = [_read(file) for file in sorted(folder.glob("rank-*.jsonl"))]
            start = next((n["resumed"] for notes in by_rank for n in notes if "resumed" in n), None)
            if start is None:
                continue  # it died before it had loaded anything
            resumed.append(start)
            if start < announced:
                lost.append((announced, start))
            for step in [step for step in steps if step > start]:
                del steps[step]
            for note in (note for notes in by_rank for note in notes):
                if "step" in note:
                    steps.setdefault(note["step"], []).append(note)
                passed_over += note.get("passed_over", [])
                announced = max(announced, note.get("saved") or 0)
        samples: dict[int, list[int]] = {}
        for step in sorted(steps):
            for note in steps[step]:
                samples.setdefault(note["epoch"], []).extend(note["samples"])
        losses = {step: notes[0]["loss"] for step, notes in sorted(steps.items())}
        return cls(losses, samples, resumed, lost, passed_over)


def _read(file: Path) -> list[dict[str, Any]]:
    """The notes of a rank; the last line may be half written."""
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]
