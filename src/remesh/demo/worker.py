"""The program of each process of a run, under `remesh run`: build or resume, train, save.

`worker.py RUN` takes a run as JSON. Every process writes what it does to a file of its own in the
run's directory of logs, a line of JSON for each event, which the starting process reads. The rank
that the run wants killed ends itself by SIGKILL: between two steps, or in the middle of writing
its file of a checkpoint.
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
from torch.distributed.tensor import DTensor

from remesh.adapters.dtensor import local_tensor, parts_of_dtensor
from remesh.core.geometry import Box
from remesh.demo.story import Run
from remesh.demo.training import TrainConfig, build, read_tokens, train_step
from remesh.elastic import TrainingJob, run
from remesh.events import Event
from remesh.training.manager import Manager

KILL_POINT = "save.chunk_written"
"""The moment of a save at which the chosen rank dies."""


def train(job: TrainingJob) -> None:
    """Train to the end, or until the world changes."""
    spec = Run(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, config = dist.get_rank(), TrainConfig()
    trainee = build(config, spec.layout)
    state: dict[str, Any] = {
        "model": trainee.model,
        "optimizer": trainee.optimizer,
        "scheduler": trainee.scheduler,
        "num_steps_done": 0,
    }
    tokens = job.keep("tokens", read_tokens)
    is_first = job.entries == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with Path(spec.logs, f"{os.getpid()}.jsonl").open("a", buffering=1) as log:

        def tell(**entry: object) -> None:
            log.write(json.dumps({"time": time.time(), "rank": rank, **entry}) + "\n")

        def is_time_to_die() -> bool:
            chosen = rank == spec.killed_rank and state["num_steps_done"] == spec.killed_step
            return is_first and chosen

        def die_in_save(event: Event) -> None:
            if spec.dies_in_save and is_time_to_die() and event.point == KILL_POINT:
                tell(dies=spec.killed_step, num_bytes=event.num_bytes)
                os.kill(os.getpid(), signal.SIGKILL)

        with Manager(
            spec.root,
            every=spec.save_every,
            save_at_end=False,
            background=False,  # so that a run is killed while it saves, and not while it trains
            job=job,
            on_event=die_in_save,
        ) as manager:
            manager.resume(state)
            if is_first:
                tell(begins=state["num_steps_done"], held=held_boxes(trainee.model))
            while (step := state["num_steps_done"]) < config.num_steps:
                if not spec.dies_in_save and is_time_to_die():
                    tell(dies=step)
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = train_step(trainee, tokens, step)
                state["num_steps_done"] = step + 1
                tell(step=step + 1, loss=loss)
                if manager.step(step + 1, state):
                    tell(saved=step + 1)
    dist.destroy_process_group()


def held_boxes(model: nn.Module) -> dict[str, object]:
    """The shape of every parameter, and the offsets and shapes of this rank's boxes of it."""
    held: dict[str, object] = {}
    for name, tensor in model.named_parameters():
        boxes = [Box.whole(tuple(tensor.shape))]
        if isinstance(tensor, DTensor):
            boxes = [part.box for part in parts_of_dtensor(tensor, local_tensor(tensor), name)]
        held[name] = (tuple(tensor.shape), [(box.offset, box.shape) for box in boxes])
    return held


if __name__ == "__main__":
    run(train)
