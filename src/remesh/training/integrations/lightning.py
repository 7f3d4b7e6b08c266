"""Lightning: a callback over a `remesh.Manager`, and a loader with a position in the data.

`RemeshCallback` saves what every rank holds, without gathering, under every strategy, and brings it
back into any other: module, optimizers, schedulers, scaler, progress of the loops, position in the
data, and random numbers. It hooks in where Lightning has built all and not begun: `on_fit_start`.

`EpochLoader` is how the data position gets along with Lightning, which counts the batches of an
epoch and ends it when it has seen as many as the loader promised. This loader promises a whole
epoch and hands out what is left of it; the callback sets the count to match.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from remesh.training.manager import Manager
from remesh.training.resuming import Resumed
from remesh.training.rng import rewind_of_streams
from remesh.training.sampling import ResumableBatchSampler

__all__ = ["EpochLoader", "RemeshCallback"]


class EpochLoader(DataLoader[Any]):
    """A data loader over a resumable batch sampler, with the length of a whole epoch.

    Tell Lightning `Trainer(use_distributed_sampler=False)`, for the batch sampler deals the samples
    to the ranks itself. If world size or batch size changes in the middle of an epoch, the length
    may be one more than that of the next epochs.

    Args:
        dataset: The samples.
        batches: Which of them come next.
        **options: Of a `DataLoader`.
    """

    def __init__(self, dataset: Any, batches: ResumableBatchSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, **options)
        self.batches = batches

    @property
    def num_done(self) -> int:
        """Batches of this epoch that are finished, in the present size; a broken one counts."""
        return -(-self.batches.sampler.position // self.batches.global_batch_size)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.num_done + len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """The position. Lightning takes a loader that has this for one that can resume."""
        return self.batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position."""
        self.batches.load_state_dict(state_dict)


class RemeshCallback(Callback):
    """Saves by policies, and resumes when training begins.

    Leave `ckpt_path` out of `Trainer.fit`: what is resumed is the newest checkpoint below the root.
    Steps are those of the optimizer (`trainer.global_step`). What other callbacks remember is not
    kept.

    Args:
        root: Directory or URL of the run's checkpoints.
        loader: The loader of the training data.
        **options: Of the `remesh.Manager` that is made when the process group is there.

    Attributes:
        manager: The manager; None before training begins and after it has ended.
        resumed: What was resumed; None if nothing was.
    """

    def __init__(self, root: Any, loader: EpochLoader, **options: Any) -> None:
        self._root = root
        self._loader = loader
        self._options = options
        self._rewind: Callable[[], None] | None = None  # puts the random numbers back, once
        self._offered = 0
        self.manager: Manager | None = None
        self.resumed: Resumed | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the manager, and fill everything from the newest checkpoint. Collective."""
        self.manager = Manager(self._root, **self._options)
        state = self._state(trainer, pl_module)
        self.resumed = self.manager.resume(state)
        if self.resumed is None:
            return
        loops = trainer.fit_loop
        loops.load_state_dict(json.loads(state["loops"]))
        self._offered = trainer.global_step
        batches = self._loader.batches
        num_done = self._loader.num_done
        if len(batches) > 0:
            self._rewind = rewind_of_streams(is_alone=trainer.world_size == 1)
        else:
            # Lightning begins to iterate over the next epoch before it names it.
            num_done = len(self._loader)
            batches.set_epoch(batches.sampler.epoch + 1)
        # What Lightning's own checkpoints say at this point: the last batch is not quite completed.
        counts = dict.fromkeys(("ready", "started", "processed"), num_done)
        progress = loops.epoch_loop.batch_progress.current
        progress.load_state_dict({**counts, "completed": num_done - 1})

    def on_train_batch_start(
        self, _trainer: Trainer, _pl_module: LightningModule, _batch: Any, _batch_idx: int
    ) -> None:
        """Put the random numbers back: beginning to iterate has drawn some, as before the save."""
        if self._rewind is not None:
            self._rewind()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        _outputs: Any,
        _batch: Any,
        _batch_idx: int,
    ) -> None:
        """Save if a policy says so, and stop if it says that. Collective."""
        assert self.manager is not None
        self._loader.batches.advance()
        if trainer.global_step == self._offered:
            return  # gradients are being accumulated
        self._offered = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.manager.step(trainer.global_step, self._state(trainer, pl_module), metrics=metrics)
        if self.manager.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End here, before later callbacks replace the weights by averages. Collective."""
        self.on_fit_end(trainer, pl_module)

    def on_fit_end(self, _trainer: Trainer, _pl_module: LightningModule) -> None:
        """Wait for the save in flight. Collective."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    def on_exception(
        self, _trainer: Trainer, _pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give a save in flight a moment, since the training has ended."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(type(exception), exception, None)

    def _state(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The run as a state of remesh."""
        progress = {
            name: value
            for name, value in trainer.fit_loop.state_dict().items()
            if name != "state_dict"  # that of the loader
        }
        state = {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": json.dumps(progress),
            "data": self._loader.batches,
        }
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        return state
