"""Lightning's example under `remesh run`: `reentered_lightning.py DIRECTORY`; rank 1 dies once.

Each process writes what it resumed when training has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from remesh.elastic import TrainingJob, run

sys.path.insert(0, str(Path(__file__).parents[2]))

DIES_AFTER = 5
"""No checkpoint is saved before that."""


class Watch(pl.Callback):
    def __init__(self, job: TrainingJob, directory: Path) -> None:
        self.job, self.directory = job, directory

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and trainer.global_step == DIES_AFTER:
            dist.barrier()  # the other rank has done this step, too
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Any, _module: pl.LightningModule) -> None:
        (resumed,) = (vars(one)["resumed"] for one in trainer.callbacks if hasattr(one, "resumed"))
        said = {
            "rank": trainer.global_rank,
            "entries": self.job.entries,
            "live": resumed is not None and resumed.live,
            "from": None if resumed is None else resumed.step,
            "step": trainer.global_step,
        }
        (self.directory / f"{os.getpid()}.json").write_text(json.dumps(said))


def main(directory: Path) -> None:
    from tests.training.example import load_example

    example = load_example("lightning_callback")
    args = example.parse_args(["--directory", str(directory / "run"), "--every", "1000"])
    run(lambda job: example.train(args, Watch(job, directory), job=job))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
