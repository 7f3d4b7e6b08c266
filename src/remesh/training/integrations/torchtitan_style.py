"""torchtitan's `CheckpointManager` by its method names, over `remesh.Manager`.

A trainer in the style of torchtitan builds one of these from its parts, calls `load` before the
first step, `save` after each, and `close` at the end. What the parts hold goes into one state:
model and optimizer by the names of parameters, the rest as the parts say it. Random numbers come
along, which torchtitan leaves out.

The interface is that of torchtitan's `components/checkpoint.py`, where the calls of a training loop
come from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from remesh.adapters import NamedModule
from remesh.catalog import place_of, step_name
from remesh.checkpoint import load
from remesh.errors import CheckpointNotFoundError
from remesh.training.manager import Manager
from remesh.training.rng import Randomness

__all__ = ["CheckpointManager"]

LATEST = -1
"""The step that stands for the newest checkpoint."""


class CheckpointManager:
    """Saves and loads the parts of a trainer. All methods are collective.

    Args:
        folder: Directory or URL of the run's checkpoints.
        model_parts: The modules of this rank: one, or with pipeline parallelism its stages, whose
            parameters have the names of the whole model.
        optimizers: Those of the parts, one for each; any iterable, as torchtitan's container.
        lr_schedulers: Likewise. They count the same steps, so the first one is stored for all.
        dataloader: Anything with a position that means the same on every rank, such as a
            `ResumableBatchSampler`; a loader with a state of its own on each rank in a
            `PerRankState`; None to leave the data out.
        states: What else belongs to the run, by name.
        interval: Steps from save to save.
        keep_latest_k: How many checkpoints to keep; 0 for all.
        async_mode: `disabled` to write in the foreground, `async` to write beside the training.
        randomness: See `remesh.Manager`.

    Raises:
        ValueError: If a state has the name of a part.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model_parts: Sequence[nn.Module],
        optimizers: Iterable[Optimizer],
        lr_schedulers: Iterable[Any] = (),
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        interval: int = 500,
        keep_latest_k: int = 10,
        async_mode: Literal["disabled", "async"] = "async",
        randomness: Randomness | None = None,
    ) -> None:
        parts: dict[str, Any] = {"model": _whole(model_parts), "optimizer": _one_or_all(optimizers)}
        if schedulers := list(lr_schedulers):
            parts["lr_scheduler"] = _Together(schedulers)
        if dataloader is not None:
            parts["dataloader"] = dataloader
        if taken := parts.keys() & (states or {}).keys():
            raise ValueError(f"states: {sorted(taken)} are names of parts; use other names")
        self.folder = folder
        self.states = {**parts, **(states or {})}
        self.interval = interval
        self.manager = Manager(
            folder,
            keep=keep_latest_k or None,
            background=async_mode != "disabled",
            randomness=randomness,
        )

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save, if it is time or this is the last step; the last save is durable on return.

        Raises:
            RemeshError: As `remesh.Manager.step`.
        """
        if last_step or curr_step % self.interval == 0:
            self.manager.save(curr_step, self.states)
        else:
            self.manager.step(curr_step, self.states)
        if last_step:
            self.manager.wait()

    def load(self, step: int = LATEST) -> bool:
        """Load a step, or the newest that can be loaded. Returns whether there was one.

        Only the newest checkpoint restores random numbers. With an explicit step they do not
        change.

        Raises:
            RemeshError: As `remesh.Manager.resume`.
        """
        if step == LATEST:
            return self.manager.resume(self.states) is not None
        try:
            load(self.states, place_of(self.folder, step_name(step)))
        except CheckpointNotFoundError:
            return False
        return True

    def maybe_wait_for_staging(self) -> None:
        """There is nothing to wait for: `save` returns when the state may change."""

    def close(self) -> None:
        """Wait for the save in flight, and give memory back.

        Raises:
            RemeshError: Why it failed.
        """
        self.manager.close()


class _Together:
    """Schedulers that are stored as one."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._schedulers[0].state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self._schedulers:
            scheduler.load_state_dict(state_dict)


def _whole(parts: Sequence[nn.Module]) -> nn.Module | NamedModule:
    """The parts as one module, each entry under its name in the whole model."""
    if len(parts) == 1:
        return parts[0]
    return NamedModule(nn.ModuleList(parts), lambda name: name.partition(".")[2])


def _one_or_all(optimizers: Iterable[Optimizer]) -> Optimizer | list[Optimizer]:
    found = list(optimizers)
    return found[0] if len(found) == 1 else found
