"""What the demo found out, as plain data: what the closing table, the JSON and the tests read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOLERANCE = 1e-5
"""Largest accepted difference between a loss and the reference's at the same step."""

MIN_COMPARED = 10
"""Fewest steps after a resume that must agree."""


RESULT_NAME = "result.json"
LOGS_NAME = "logs"

REFERENCE = "reference"
"""The purpose of the run that the others are compared to."""


class DemoError(RuntimeError):
    """Something in the demo is not as it must be; the message says what and where to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillResult:
    """The death of a rank, and what became of the others.

    Attributes:
        rank: Which rank was killed.
        step: The step whose save was interrupted.
        point: The moment of the save at which it happened.
        exit_code: Of the killed rank: minus the number of the signal.
        num_noticed: How many of the others failed by themselves.
        num_ended_by_launcher: How many of the others had to be ended.
        errors: The errors of those that noticed.
    """

    rank: int
    step: int
    point: str
    exit_code: int
    num_noticed: int
    num_ended_by_launcher: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run.

    Attributes:
        name: Its letter.
        purpose: A few words.
        layout: How the model was spread.
        num_ranks: Number of processes.
        first_step: Steps that were behind the state at the start.
        last_step: Steps done at the end.
        losses: Loss of each step, by the number of steps done with it.
        commits: Steps at which a save returned.
        kill: The death of a rank, or None.
        num_compared: Steps whose loss was compared to the reference's.
        max_difference: Largest difference among them.
        load_seconds: Time that loading took on the slowest rank, or None.
        seconds: Time from the start of the processes to their end.
    """

    name: str
    purpose: str
    layout: str
    num_ranks: int
    first_step: int
    last_step: int
    losses: Mapping[int, float]
    commits: tuple[int, ...]
    kill: KillResult | None
    num_compared: int
    max_difference: float
    load_seconds: float | None
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether enough losses were compared and all of them are close enough."""
        return self.num_compared >= MIN_COMPARED and self.max_difference <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfWritten:
    """What the interrupted save left behind.

    Attributes:
        path: The directory.
        num_files: Files in it.
        num_bytes: Their bytes.
        refusal: The error that opening it as a checkpoint raised.
    """

    path: Path
    num_files: int
    num_bytes: int
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """The checkpoint that the later runs resume from.

    Attributes:
        path: Where it is.
        step: Steps that were done when it was taken.
        num_tensors: Tensors in it.
        num_bytes: Bytes of those tensors.
        num_file_bytes: Bytes of all its files.
    """

    path: Path
    step: int
    num_tensors: int
    num_bytes: int
    num_file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryResult:
    """The death of a rank whose peers went on.

    Attributes:
        rank: Which rank was killed.
        step: Steps that were done then.
        seconds: Time from the kill to the end of the next step that is new.
        num_went_on: Processes that trained before and after it.
        num_repeated: Steps that a process made a second time.
    """

    rank: int
    step: int
    seconds: float
    num_went_on: int
    num_repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything.

    Attributes:
        passed: Whether every run that resumed or went on has the losses of the reference.
        tolerance: What counts as the same loss.
        max_difference: Largest difference of the runs that resumed.
        runs: The runs in order; the first is the reference.
        half_written: What the interrupted save left.
        resumed_from: The newest committed checkpoint.
        recovery: How the others went on in the last run; None if that was not played, for want of
            what `remesh run` needs.
        picture: The page with the layouts and the losses.
        seconds: Time that all took.
    """

    passed: bool
    tolerance: float
    max_difference: float
    runs: tuple[RunResult, ...]
    half_written: HalfWritten
    resumed_from: StoredResult
    recovery: RecoveryResult | None
    picture: Path
    seconds: float

    def to_json(self) -> str:
        """This result as a JSON object; paths are text, losses are keyed by step."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)


def compare(losses: Mapping[int, float], reference: Mapping[int, float]) -> tuple[int, float]:
    """Steps that both have, and the largest difference of their losses.

    The difference is 0 if there is no such step, and infinite if a loss is not a number.
    """
    differences = [abs(losses[step] - reference[step]) for step in losses.keys() & reference.keys()]
    if any(math.isnan(difference) for difference in differences):
        return len(differences), math.inf
    return len(differences), max(differences, default=0.0)
