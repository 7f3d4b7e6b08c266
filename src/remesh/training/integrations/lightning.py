"""Lightning: a callback over a `remesh.Manager`, and a loader with a position in the data.

`RemeshCallback` saves what every rank holds, without gathering, under every strategy, and brings it
back into any other: module, optimizers, schedulers, scaler, progress of the loops, position in the
data, and random numbers. It hooks in where Lightning has built all and not begun: `on_fit_start`.

`EpochLoader` is how the data position gets along with Lightning, which counts the batches of an
epoch and ends it when it has seen as many as the loader promised. This loader promises a whole
epoch and hands out what is left of it; the callback sets the count to match.

A step is saved when the next batch is about to be fetched: validation, schedulers that look at
metrics and hooks at the end of an epoch come after the end of the batch that Lightning tells of.
Memory has a step from the end of its batch on; if a process dies before all of that has come, a
resume makes up for it first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch.utils.data import DataLoader

from remesh.training.manager import Manager
from remesh.training.resuming import Resumed
from remesh.training.rng import rewind_of_streams
from remesh.training.sampling import ResumableBatchSampler

__all__ = ["EpochLoader", "RemeshCallback"]

_WeightAveraging: Any = getattr(callbacks, "WeightAveraging", ())  # since Lightning 2.6
_MORE = "more"  # in the progress of the loops: whether more of the step comes after its batch


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
        self._loops: dict[str, Any] = {}  # the progress at the end of a step that is to be offered
        self._is_cut_off = False  # whether that is the step of a resume, and more of it is to come
        self.manager: Manager | None = None
        self.resumed: Resumed | None = None

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Come first: others replace the weights by averages when the training ends."""
        given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set late
        trainer.callbacks = sorted(given, key=lambda one: one is not self)  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the manager, and fill everything from the newest checkpoint. Collective."""
        self._loops, self._offered = {}, trainer.global_step
        self.manager = Manager(self._root, **self._options)
        self._loader.before_batch = partial(self._begin_batch, trainer, pl_module)
        state = self._state(trainer, pl_module, {})
        self.resumed = self.manager.resume(state)
        if self.resumed is None:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set late
            if isinstance(callback, _WeightAveraging):
                # Its averages, made before this, begin anew with what is resumed.
                whole = {"state_dict": pl_module.state_dict()}
                callback.on_load_checkpoint(trainer, pl_module, whole)
        self._rewind = rewind_of_streams(is_alone=trainer.world_size == 1)
        loops, progress = trainer.fit_loop, json.loads(state["loops"])
        loops.load_state_dict(progress)
        self._offered = trainer.global_step
        for name, value in self.resumed.info.metrics.items():  # a scheduler may look at one of them
            number = math.nan if value is None else value
            trainer.callback_metrics[name] = torch.tensor(number, dtype=torch.float64)
        batches, self._is_cut_off = self._loader.batches, progress[_MORE]
        if self._is_cut_off:
            self._loops = progress
        elif len(batches) == 0:  # the training had ended
            batches.set_epoch(batches.sampler.epoch + 1)
        # At the beginning of an epoch Lightning is to end the one before.
        num_done = self._loader.num_done or len(self._loader)
        # What Lightning's own checkpoints say at this point: the last batch is not quite completed.
        counts = dict.fromkeys(("ready", "started", "processed"), num_done)
        seen = loops.epoch_loop.batch_progress
        seen.current.load_state_dict({**counts, "completed": num_done - 1})
        if self._is_cut_off:
            seen.increment_completed()  # or Lightning takes the end of the epoch for done

    def on_train_start(self, trainer: Trainer, _pl_module: LightningModule) -> None:
        """Take signals from Lightning, which would end the training before the step is saved."""
        assert self.manager is not None
        self.manager._watch.listen()  # noqa: SLF001 - of this room
        loops = trainer.fit_loop
        if self._loader.num_done == 0:
            # The epoch before has been ended by now; Lightning would not count the next one.
            loops.reset_restart_stage()
        if self._is_cut_off:
            loops.epoch_loop.reset_restart_stage()  # or Lightning leaves the validation out
        # Or schedulers that look at metrics miss the end of this epoch.
        loops._restarting = False  # noqa: SLF001 - the property would tell the loops below

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note that a step is done, unless gradients are being accumulated."""
        assert self.manager is not None
        self._loader.batches.advance()
        if trainer.global_step != self._offered:
            self._loops = trainer.fit_loop.state_dict()
            del self._loops["state_dict"]  # that of the loader
            self._loops[_MORE] = False
            if self._options.get("job") is not None:
                # Memory has the step, also if a process dies before all of it is complete.
                self._loops[_MORE] = _has_more(trainer)
                state, metrics = self._state(trainer, pl_module, self._loops), _metrics(trainer)
                self.manager._mark(trainer.global_step, state, metrics)  # noqa: SLF001 - of this room

    def _begin_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random numbers back after a resume, or save the step before. Collective."""
        if self._rewind is not None:
            self._rewind()
        if self._is_cut_off:
            self._is_cut_off, loop = False, trainer.fit_loop.epoch_loop
            loop._batches_that_stepped -= 1  # noqa: SLF001 - Lightning has counted this end
            loop.on_advance_end(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type] # noqa: SLF001
            if len(self._loader.batches) == 0:
                return  # there is no next batch, so Lightning ends the epoch
        if self._loops and self.manager is not None:
            if self._loops[_MORE]:
                trainer.strategy.barrier()  # memory of a step with and without this does not fit
            self._offered, loops, self._loops = trainer.global_step, self._loops, {}
            state = self._state(trainer, pl_module, {**loops, _MORE: False})
            self.manager.step(self._offered, state, metrics=_metrics(trainer))
            if self.manager.should_stop:
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, and wait for the save in flight. Collective."""
        self._is_cut_off = False  # if there was nothing left to train, it is too late
        self._begin_batch(trainer, pl_module)
        self._end()

    on_fit_end = on_train_end  # Lightning leaves the other one out if there is nothing to train

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        """Give a save in flight a moment, since the training has ended."""
        self._end(exception)

    def _end(self, error: BaseException | None = None) -> None:
        """Let go of the trainer, and end the manager if there is one."""
        self._loader.before_batch, self._rewind = _nothing, None
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(None if error is None else type(error), error, None)

    def _state(self, trainer: Trainer, pl_module: LightningModule, loops: Any) -> dict[str, Any]:
        """The run as a state of remesh."""
        state = {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": json.dumps(loops),
            "data": self._loader.batches,
        }
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        return state


def _has_more(trainer: Trainer) -> bool:
    """Whether Lightning validates, looks at metrics or ends the epoch before the next batch."""
    loop, configs = trainer.fit_loop.epoch_loop, trainer.lr_scheduler_configs
    return (
        loop._is_training_done  # noqa: SLF001
        or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type] # noqa: SLF001
        or any(config.reduce_on_plateau and config.interval == "step" for config in configs)
    )


def _metrics(trainer: Trainer) -> dict[str, float]:
    """The numbers that the training has logged; with the last batch those of its epoch."""
    found, loop = {**trainer.callback_metrics}, trainer.fit_loop.epoch_loop
    if loop._num_ready_batches_reached():  # noqa: SLF001
        found |= loop._results.metrics(on_step=False)["callback"]  # noqa: SLF001
    return {name: float(value) for name, value in found.items()}
