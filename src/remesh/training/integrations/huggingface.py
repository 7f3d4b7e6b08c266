"""Hugging Face's `Trainer`: a callback that saves and resumes through a `remesh.Manager`.

Callbacks are handed model, optimizer and scheduler. `Trainer` logs and evaluates a step after it
has told them of its end, so the step is saved a little later: when the next step or epoch begins,
or the training ends. Then the checkpoint has its log and its metrics.

`Trainer` fixes where the data begins before it calls a callback, from `trainer_state.json` in the
directory that `train(resume_from_checkpoint=...)` names, and it insists on weights there. So
`resume_point` makes a directory with the trainer's state as it was saved, and a weight file without
a tensor. `Trainer` goes to that step, finds no optimizer and no random numbers, and skips the
batches of the epoch that were trained on; when it has built all, `on_train_begin` fills it in place
from the checkpoint.

`Trainer` draws from torch's random numbers when it begins to iterate over the data. In the middle
of an epoch the run that was saved had done so before, so the random numbers are put back once more
when the first step begins. (This is also where `Trainer` itself puts them back.)
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.numpy
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from remesh.errors import CheckpointError, MismatchError
from remesh.training.manager import Manager
from remesh.training.rng import rewind_of_streams

__all__ = ["RemeshCallback"]

_PROGRESS = "trainer"


class RemeshCallback(TrainerCallback):
    """Saves by the manager's policies, and resumes.

    Weights, optimizer, scheduler, gradient scaler and random numbers are those of a state of
    remesh, so a run may go on with another number of processes. Position in the data and log are
    `Trainer`'s own. What other callbacks remember is not kept.

    Example:
        >>> with remesh.Manager("run", every=100, keep=3) as manager:  # doctest: +SKIP
        ...     callback = RemeshCallback(manager)
        ...     trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        ...     trainer.train(resume_from_checkpoint=callback.resume_point())

    Args:
        manager: What saves. In a distributed job make it after the `TrainingArguments`, which begin
            the process group.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._resuming: tempfile.TemporaryDirectory[str] | None = None
        self._rewind: Callable[[], None] | None = None  # puts the random numbers back, once
        self._metrics: dict[str, float] = {}
        self._offered = 0

    def resume_point(self) -> str | None:
        """The `resume_from_checkpoint` for `Trainer.train`; None to begin. Collective.

        Raises:
            CheckpointError: If the newest checkpoint was not saved by this callback.
        """
        found: dict[str, Any] = {_PROGRESS: ""}
        try:
            if not self._manager._peek(found):  # noqa: SLF001 - of this room
                return None
        except MismatchError:
            found = {_PROGRESS: None}
        if not isinstance(found[_PROGRESS], str):
            raise CheckpointError(
                f"{self._manager._root}: the newest checkpoint holds no state of a Trainer\n"  # noqa: SLF001
                "Give the manager a directory of its own, or load the weights with remesh.load "
                "before training"
            )
        self._resuming = tempfile.TemporaryDirectory(prefix="remesh-resume-")
        folder = Path(self._resuming.name)
        (folder / "trainer_state.json").write_text(found[_PROGRESS], encoding="utf-8")
        safetensors.numpy.save_file({}, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    def on_init_end(self, *_: Any, **parts: Any) -> None:
        """Give modules of any class what `Trainer` asks a model for that lacks weights."""
        model = parts["model"]
        if not hasattr(model, "_keys_to_ignore_on_save"):
            type(model)._keys_to_ignore_on_save = None  # noqa: SLF001 - `model_init` makes others

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Fill model, optimizer and the rest from the checkpoint. Collective."""
        del control  # there is nothing to decide
        self._offered = state.global_step
        if self._resuming is None:
            return
        self._resuming.cleanup()
        self._resuming = None
        resumed = self._manager.resume(_state_of(args, state, parts))
        if resumed is None or resumed.step != state.global_step:
            found = "none" if resumed is None else f"step {resumed.step}"
            raise CheckpointError(
                f"the Trainer is at step {state.global_step}, and the newest checkpoint that can "
                f"be loaded is {found}\nLaunch again with what resume_point() then returns, and "
                "hand it to train(resume_from_checkpoint=...)"
            )
        if state.epoch % 1:
            self._rewind = rewind_of_streams(is_alone=args.world_size == 1)

    def on_step_begin(self, *args: Any, **parts: Any) -> None:
        """Save the step before, if a policy says so. Collective."""
        if self._rewind is not None:
            self._rewind()
        self.on_epoch_begin(*args, **parts)

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Note the numbers that were logged last: the metrics of the checkpoints that follow."""
        numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, float)}
        self._metrics.update(numbers)

    def on_train_end(self, *args: Any, **parts: Any) -> None:
        """Save the last step, if a policy says so, and wait for the save in flight. Collective."""
        self.on_epoch_begin(*args, **parts)
        self._manager.wait()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Let the manager save a step that is done, once. Collective."""
        if state.global_step == self._offered:
            return
        self._offered = state.global_step
        full = _state_of(args, state, parts)
        self._manager.step(state.global_step, full, metrics=self._metrics)
        if self._manager.should_stop:
            control.should_training_stop = True


def _state_of(
    args: TrainingArguments, state: TrainerState, parts: dict[str, Any]
) -> dict[str, Any]:
    """The run as a state of remesh."""
    optimizer = parts["optimizer"]
    full = {
        "model": parts["model"],
        "optimizer": optimizer,
        "scheduler": parts["lr_scheduler"],
    }
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None:
        full["scaler"] = scaler
    if args.process_index == 0:  # some of it differs between processes
        full[_PROGRESS] = json.dumps(dataclasses.asdict(state))
    return full
