"""What the nodes of the tests train: a tiny model, cut by FSDP2, kept by the Manager.

`train.py DIRECTORY [SECONDS [EVERY MEMORY_EVERY REPLICAS]]`. The batch of a step is a function of
the step alone and is shared out evenly, so the loss of every step is the same for every number of
ranks. Each rank appends what it did to a file of its own. The training ends after the step in which
a rank sees the file `stop`. A file `hang-RANK` lets a rank hang once, and as long as `slow-RANK` is
there, its steps take longer. With `torn-RANK` a rank kills itself once while it writes a checkpoint
or a snapshot.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from remesh.events import Event
from remesh.training.manager import Manager

BATCH = 12
"""Divides among 1, 2, 3 and 4 ranks."""


def losses_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The losses of a rank's part of a batch."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(2, BATCH, 8, generator=generator)
    inputs, targets = batch[:, rank::world_size]
    # Nobody can guess the targets: a loss that came near to 0 could not be compared any more.
    result: torch.Tensor = (model(inputs) - targets).square().mean(1)
    return result


def make_model() -> nn.Sequential:
    """The model before the first step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def uninterrupted(num_steps: int) -> list[float]:
    """The loss of every step in one process."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        loss = losses_of(model, step, 0, 1).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return losses


def hang() -> None:
    """Be stuck until a signal ends the process."""
    while True:
        signal.pause()


def main() -> None:
    directory = Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    every, memory_every, replicas = map(int, sys.argv[3:6] or (5, 0, 0))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def say(**what: object) -> None:
        log.write(
            json.dumps({"time": time.time(), "rank": rank, "size": world_size, **what}) + "\n"
        )

    say(
        kind="start",
        node=os.environ["GROUP_RANK"],
        parent=os.getppid(),
        world=os.environ["MASTER_PORT"],
        restarts=os.environ["TORCHELASTIC_RESTART_COUNT"],
    )

    def tear(event: Event) -> None:
        torn = directory / f"torn-{rank}"
        if event.point == "save.chunk_written" and torn.exists():
            torn.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    with Manager(
        directory / "checkpoints",
        every=every,
        keep=None if memory_every else 3,
        memory_every=memory_every or None,
        memory_replicas=replicas,
        on_event=tear,
    ) as manager:
        resumed = manager.resume(state)
        if resumed is not None:
            passed_over = [reason for _, reason in resumed.passed_over]
            memory = resumed.from_memory
            say(kind="resume", step=resumed.step, memory=memory, passed_over=passed_over)
        num_stops = 0.0
        while num_stops == 0:
            step = state["step"]
            hanging = directory / f"hang-{rank}"
            if hanging.exists():
                hanging.unlink()
                hang()
            began = time.monotonic()
            slow = (directory / f"slow-{rank}").exists()
            time.sleep(10 * seconds if slow else seconds)  # the work of a larger model
            own_seconds = time.monotonic() - began
            own = losses_of(model, step, rank, world_size).mean()
            optimizer.zero_grad()
            torch.autograd.backward(own)
            optimizer.step()
            # All ranks stop after the same step.
            stop = torch.tensor(float((directory / "stop").exists()))
            totals = torch.stack([own.detach(), stop])
            dist.all_reduce(totals)
            total, num_stops = totals.tolist()
            state["step"] = step + 1
            say(kind="step", step=step, loss=total / world_size)
            manager.step(step + 1, state, own_seconds=own_seconds)
    say(kind="end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
