"""Lightning: a callback over a `remesh.Manager`, and a loader with a position in the data.

`RemeshCallback` saves what every rank holds, without gathering, under every strategy, and brings it
back into any other: module, optimizers, schedulers, scaler, progress of the loops, position in the
data, and random numbers. It hooks in where Lightning has built all and not begun: `on_fit_start`.

`EpochLoader` is how the data position gets along with Lightning, which counts the batches of an
epoch and ends it when it has seen as many as the loader promised. This loader promises a whole
epoch and hands out what is left of it; the callback sets the count to match.

A step is saved when the next batch is about to be fetched: validation, schedulers that look at
metrics and hooks at the end of an epoch come after the end of the batch that Lightning tells of.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from remesh.training.fingerprints import Fingerprint, Fingerprints
from remesh.training.manager import Manager
from remesh.training.resuming import Resumed
from remesh.training.rng import rewind_of_streams
from remesh.training.sampling import ResumableBatchSampler

__all__ = ["EpochLoader", "RemeshCallback"]

_LOGGER = logging.getLogger("remesh")


def _nothing() -> None:
    """Before a batch, if there is no callback."""


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
        self.before_batch: Callable[[], object] = _nothing  # called before each is fetched

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches that are left of this epoch."""
        # To begin draws a random number. In the middle of an epoch, and later with workers that
        # persist, the run that was saved had done so before.
        had_begun = self.batches.sampler.position > 0 or self.persistent_workers
        iterator = super().__iter__() if had_begun else None
        self.before_batch()
        for batch in super().__iter__() if iterator is None else iterator:
            yield batch
            self.before_batch()

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
        self._loops = ""  # the progress at the end of a step that is to be offered
        self._weights: Fingerprint | None = None  # when the last epoch ended
        self.manager: Manager | None = None
        self.resumed: Resumed | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the manager, and fill everything from the newest checkpoint. Collective."""
        self._loops, self._weights = "", None
        self._offered = trainer.global_step
        self.manager = Manager(self._root, **self._options)
        self._loader.before_batch = partial(self._begin_batch, trainer, pl_module)
        state = self._state(trainer, pl_module, "")
        self.resumed = self.manager.resume(state)
        if self.resumed is None:
            return
        self._rewind = rewind_of_streams(is_alone=trainer.world_size == 1)
        loops = trainer.fit_loop
        loops.load_state_dict(json.loads(state["loops"]))
        self._offered = trainer.global_step
        batches = self._loader.batches
        if len(batches) == 0:  # the training had ended
            batches.set_epoch(batches.sampler.epoch + 1)
        # At the beginning of an epoch Lightning is to end the one before.
        num_done = self._loader.num_done or len(self._loader)
        # What Lightning's own checkpoints say at this point: the last batch is not quite completed.
        counts = dict.fromkeys(("ready", "started", "processed"), num_done)
        progress = loops.epoch_loop.batch_progress.current
        progress.load_state_dict({**counts, "completed": num_done - 1})

    def on_train_start(self, trainer: Trainer, _pl_module: LightningModule) -> None:
        """Take signals from Lightning, which would end the training before the step is saved."""
        assert self.manager is not None
        self.manager._watch.listen()  # noqa: SLF001 - of this room
        if self._loader.num_done == 0:
            # The epoch before has been ended by now; Lightning would not count the next one.
            trainer.fit_loop.reset_restart_stage()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note that a step is done, unless gradients are being accumulated."""
        assert self.manager is not None
        self._loader.batches.advance()
        if trainer.global_step != self._offered:
            progress = trainer.fit_loop.state_dict()
            del progress["state_dict"]  # that of the loader
            self._loops = json.dumps(progress)
            if self._options.get("job") is not None:
                # Memory has the step, also if a process dies before all of it is complete.
                state = self._state(trainer, pl_module, self._loops)
                self.manager._mark(trainer.global_step, state, None)  # noqa: SLF001 - of this room

    def _begin_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random numbers back after a resume, or save the step before. Collective."""
        if self._rewind is not None:
            self._rewind()
        if self._loops and self.manager is not None:
            self._offered, loops, self._loops = trainer.global_step, self._loops, ""
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            state = self._state(trainer, pl_module, loops)
            self.manager.step(self._offered, state, metrics=metrics)
            if self.manager.should_stop:
                trainer.should_stop = True

    def on_train_epoch_end(self, _trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the weights, of which the training may end."""
        self._weights = Fingerprints().take(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End here, before later callbacks replace the weights by averages. Collective."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set late
        earlier = takewhile(lambda one: one is not self, callbacks)
        may_change = any(type(one).on_train_end is not Callback.on_train_end for one in earlier)
        if self._loops and may_change and self._weights is not None:
            changed = self._weights.changed(pl_module)
            if trainer.strategy.reduce_boolean_decision(bool(changed), all=False):
                self._loops = ""
                _LOGGER.warning(
                    "step %d is not saved at the end: %s has changed since\nPut RemeshCallback "
                    "before callbacks that replace the weights when the training ends",
                    trainer.global_step,
                    changed or "a weight of another rank",
                )
        self._begin_batch(trainer, pl_module)
        self.on_fit_end(trainer, pl_module)

    def on_fit_end(self, _trainer: Trainer, _pl_module: LightningModule) -> None:
        """Wait for the save in flight. Collective."""
        self._end()

    def on_exception(
        self, _trainer: Trainer, _pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give a save in flight a moment, since the training has ended."""
        self._end(exception)

    def _end(self, error: BaseException | None = None) -> None:
        """Let go of the trainer, and end the manager if there is one."""
        self._loader.before_batch, self._rewind = _nothing, None
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(None if error is None else type(error), error, None)

    def _state(self, trainer: Trainer, pl_module: LightningModule, loops: str) -> dict[str, Any]:
        """The run as a state of remesh."""
        state = {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": loops,
            "data": self._loader.batches,
        }
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        return state
