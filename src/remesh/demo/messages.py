"""What worker processes tell the process that started them.

They are sent through one pipe per worker, so a worker that is killed in the middle of a message
harms no other. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from remesh.geometry import Box


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What one rank holds of one parameter."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built, and loaded if the run resumes.

    Attributes:
        num_steps_done: Steps that the state has behind it.
        held: This rank's share of every parameter.
        load_seconds: Time that the load took, or None if there was none.
    """

    num_steps_done: int
    held: tuple[HeldTensor, ...]
    load_seconds: float | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """One training step is done.

    Attributes:
        num_steps_done: Steps done, with this one.
        loss: Mean over the global batch.
    """

    num_steps_done: int
    loss: float


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """A save begins."""

    num_steps_done: int


@dataclass(frozen=True, slots=True)
class SaveDone:
    """The save returned: the checkpoint is durable."""

    num_steps_done: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AboutToDie:
    """This rank kills itself now.

    Attributes:
        num_steps_done: The step whose save is interrupted.
        point: The moment in the save.
        num_bytes: Bytes that this rank has written of it.
    """

    num_steps_done: int
    point: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ends this rank."""

    error: str


Message = Ready | StepDone | SaveBegun | SaveDone | AboutToDie | Failed
