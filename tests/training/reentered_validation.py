"""Lightning under `remesh run`: `reentered_validation.py DIRECTORY`; rank 1 dies at ends of steps.

At the end the processes of the last world train again, without remesh, and write both results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from remesh.elastic import TrainingJob, run
from remesh.training import ResumableBatchSampler, ResumableSampler
from remesh.training.integrations.lightning import EpochLoader, RemeshCallback

DEATHS = [
    (2, "on_validation_start"),  # in the middle of an epoch
    (8, "on_train_epoch_end"),
    (10, "on_train_batch_end"),  # before the validation
    (12, "on_validation_epoch_end"),  # of the last step
]
"""Step and hook in which rank 1 dies, world after world; four steps are an epoch."""

BATCH_SIZE = 4


class Deaths(pl.Callback):
    """Ends rank 1, once the other rank has come as far."""

    def __init__(self, world: int) -> None:
        self._next = DEATHS[world] if world < len(DEATHS) else None

    def _at(self, trainer: pl.Trainer, hook: str) -> None:
        if self._next == (trainer.global_step, hook):
            dist.barrier()
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._at(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        self._at(trainer, "on_validation_start")

    def on_validation_epoch_end(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        self._at(trainer, "on_validation_epoch_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        self._at(trainer, "on_train_epoch_end")


class Scheduled(pl.LightningModule):
    """Its learning rate depends on what Lightning logs."""

    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Linear(8, 1)
        self.seen = seen

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _batch_idx: int) -> None:
        self.log("val", self.layers(batch[0]).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.seen[f"validated at {self.global_step}"] = self.logged("val")

    def on_train_epoch_end(self) -> None:
        name = f"epoch {self.current_epoch} ended at {self.global_step}"
        self.seen[name] = self.logged("val")

    def logged(self, name: str) -> float:
        return float(self.trainer.callback_metrics[name])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        looks = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.7)
        steps = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.9)
        epochs = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.8)
        return [optimizer], [
            StepLR(optimizer, 1, gamma=0.9),
            {"scheduler": looks, "monitor": "val"},
            {"scheduler": steps, "monitor": "val", "interval": "step", "frequency": 2},
            # The first epoch has an interruption in its middle, after which the mean begins anew.
            {"scheduler": epochs, "monitor": "loss_epoch", "frequency": 2},
        ]


def fit(module: Scheduled, loader: Any, *callbacks: pl.Callback) -> dict[str, Any]:
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4))
    return {
        "seen": module.seen,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "schedulers": [
            {key: value for key, value in config.scheduler.state_dict().items() if key[0] != "_"}
            for config in trainer.lr_scheduler_configs
        ],
        "weights": [parameter.flatten().tolist() for parameter in module.parameters()],
    }


def main(directory: Path) -> None:
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    seen: dict[str, Any] = {}  # by this process, in all its worlds

    def train(job: TrainingJob) -> None:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        pl.seed_everything(1 + rank, verbose=False)
        sampler = ResumableSampler(data, shuffle=False, rank=rank, world_size=num_ranks)
        loader = EpochLoader(data, ResumableBatchSampler(sampler, BATCH_SIZE))
        keeping = RemeshCallback(directory / "run", loader, every=1000, job=job)
        deaths = Deaths(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        found = {"interrupted": fit(Scheduled(seen), loader, keeping, deaths)}

        assert keeping.resumed is not None
        assert keeping.resumed.live
        pl.seed_everything(1 + rank, verbose=False)
        plain: Any = DistributedSampler(data, num_ranks, rank, shuffle=False)
        found["whole"] = fit(Scheduled({}), DataLoader(data, BATCH_SIZE, sampler=plain))
        (directory / f"{rank}.json").write_text(json.dumps(found))

    run(train)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
