"""What a process of run E does: it trains under `remesh run` and goes on when another one dies.

`recovery_worker.py DIRECTORY RANK STEP`: when STEP steps are done, RANK kills itself, once. Every
process writes what it does to a file of its own in DIRECTORY, a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from remesh.demo.config import Kind, Layout, TrainConfig
from remesh.demo.data import read_tokens
from remesh.demo.train import build, train_step
from remesh.elastic import TrainingJob, run
from remesh.training.manager import Manager


def train(job: TrainingJob) -> None:
    """Train to the end, or until the world changes."""
    directory, victim, last_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config, layout = TrainConfig(), Layout(Kind.DATA_PARALLEL, dist.get_world_size())
    trainee = build(config, layout)
    parallel: Any = DistributedDataParallel(trainee.model)
    trainee = replace(trainee, model=parallel)
    state: dict[str, Any] = {
        "model": trainee.model,
        "optimizer": trainee.optimizer,
        "scheduler": trainee.scheduler,
        "num_steps_done": 0,
    }
    tokens = job.keep("tokens", read_tokens)
    with (
        (directory / f"{os.getpid()}.jsonl").open("a", buffering=1) as log,
        Manager(directory / "checkpoints", job=job) as manager,
    ):
        manager.resume(state)
        while (step := state["num_steps_done"]) < config.num_steps:
            is_killed = rank == victim and step == last_step and job.entries == 0
            if is_killed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                log.write(json.dumps({"time": time.time(), "rank": rank, "dies": step}) + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
            loss = train_step(trainee, config, tokens, step)
            state["num_steps_done"] = step + 1
            manager.step(step + 1, state)
            done = {"time": time.time(), "rank": rank, "step": step + 1, "loss": loss}
            log.write(json.dumps(done) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(train)
