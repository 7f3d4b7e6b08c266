"""When to save and what to keep: small frozen policies, and pure functions that ask them.

A policy sees numbers that are handed to it and remembers nothing. Those that look at the step alone
(`EverySteps`) give the same answer on every rank, so no message is needed. What one rank may know
before the others (its clock, a signal that it got, a file that it sees) becomes a `Note`, and
`combine` makes the same verdict of the notes of all ranks on each of them. Ranks exchange notes now
and then and not at each step: `next_look` says when again.

`decide_retention` gets what is known of each checkpoint in a directory and gives the reasons why
each is kept; one without a reason is to be removed (`remove_unkept`). Policies are united: a
checkpoint stays if any of them keeps it, and some always stay (`_protections`, and the newest).

After Orbax, where the decisions to save and to keep are separate values as well.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from remesh import catalog
from remesh._repr import short_repr, shown
from remesh.catalog import CheckpointInfo
from remesh.checkpoint.arguments import check_choice, check_count, check_seconds
from remesh.errors import OptionError
from remesh.storage import Storage

_LOGGER = logging.getLogger("remesh")

LOOK_SECONDS = 1.0
"""About how often ranks exchange notes. A signal or a request waits no longer than this, or than
one step if that takes longer."""

MAX_GAP = 1000
"""Most steps between two exchanges."""


# When to save -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save after each step that `num_steps` divides, or the first one that is counted after it."""

    num_steps: int

    def __post_init__(self) -> None:
        check_count("EverySteps", "num_steps", self.num_steps, 1)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save began, by the clock of rank 0.

    A training function that is entered again (`remesh.elastic.run`) counts on from the last save
    that was committed.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("EverySeconds", "seconds", self.seconds)


@dataclass(frozen=True, slots=True)
class OnSignals:
    """Save and stop when a rank gets one of these signals: the notice before a preemption.

    Their former handlers are put back when the manager is closed.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Save when a rank sees a file.

    `save` in it asks for a save, `save-and-stop` for one after which the training ends; an empty
    file is one that is being written. The file is removed once the save has begun. Ranks look about
    once a second.
    """

    file: str


SavePolicy = EverySteps | EverySeconds | OnSignals | OnRequest


def save_policies(every: int | SavePolicy | Sequence[SavePolicy] | None) -> tuple[SavePolicy, ...]:
    """The policies of the argument `every` of a manager; a number is that of steps."""
    return _policies_of("every", every, SavePolicy, EverySteps, "steps", 1000)


def _policies_of(
    option: str, value: object, kinds: Any, of_number: Callable[[int], Any], unit: str, example: int
) -> tuple[Any, ...]:
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(each, kinds) for each in several):
        return tuple(several)
    with suppress(OptionError):
        return (of_number(check_count("Manager", option, value, 1)),)
    raise OptionError(
        f"Manager: {option}= must be a number of {unit}, a policy or a list of policies, "
        f"not {shown(value)}.\nPass a number, such as {option}={example}, or int(...) of a text."
    )


def is_periodic(policies: Sequence[SavePolicy]) -> bool:
    """True if policies save again and again without being asked."""
    return any(isinstance(policy, EverySteps | EverySeconds) for policy in policies)


class Note(msgspec.Struct, frozen=True):
    """The note of one rank to the others, and what all make of it."""

    reason: str = ""  # why to save now; empty for no save
    stop: bool = False  # whether the training is to end after that save
    hold: bool = False  # whether the training is to wait after that save
    failed: bool = False  # whether a save has failed in the background
    next_look: int = 0  # the step after which notes are exchanged again, as rank 0 proposes


def combine(notes: Sequence[Note]) -> Note:
    """The verdict on the notes of all ranks: one suffices for a save, a stop, a wait, a failure."""
    reasons = [
        f"{note.reason} (rank {rank})" if len(notes) > 1 else note.reason
        for rank, note in enumerate(notes)
        if note.reason
    ]
    return Note(
        reasons[0] if reasons else "",
        any(note.stop for note in notes),
        any(note.hold for note in notes),
        any(note.failed for note in notes),
        notes[0].next_look,
    )


def due_by_step(policies: Sequence[SavePolicy], step: int, before: int | None = None) -> str:
    """Why the steps after that of the call before ask for a save, or nothing."""
    before = step - 1 if before is None else min(before, step - 1)
    for policy in policies:
        if isinstance(policy, EverySteps) and step // policy.num_steps > before // policy.num_steps:
            return f"every {policy.num_steps} steps"
    return ""


def due_by_time(policies: Sequence[SavePolicy], seconds: float) -> str:
    """Why the time since the last save, in seconds, asks for a save, or nothing."""
    for policy in policies:
        if isinstance(policy, EverySeconds) and seconds >= policy.seconds:
            return f"every {policy.seconds:g} s"
    return ""


def next_look(step: int, step_seconds: float | None, *, last_gap: int, world_size: int) -> int:
    """The step after which notes are exchanged again.

    `step_seconds` is None if it is not known yet. The next gap is at most twice as long as the
    last, so that one fast step does not lead to a long gap. One rank alone has nothing to exchange
    and looks at each step.
    """
    if world_size == 1 or step_seconds is None:
        return step + 1
    fitting = math.floor(LOOK_SECONDS / max(step_seconds, 1e-6))
    return step + max(1, min(fitting, 2 * last_gap, MAX_GAP))


# What to keep -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest `num_checkpoints`."""

    num_checkpoints: int

    def __post_init__(self) -> None:
        check_count("KeepLast", "num_checkpoints", self.num_checkpoints, 1)


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep those whose step is divided by `num_steps`."""

    num_steps: int

    def __post_init__(self) -> None:
        check_count("KeepEvery", "num_steps", self.num_steps, 1)


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the best by a metric; of equal ones the newer. Those without the metric do not count."""

    metric: str
    """Its name, as given to `Manager.step` or `Manager.save`."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest (`min`) or the largest (`max`) is best."""
    num_checkpoints: int = 1
    """How many."""

    def __post_init__(self) -> None:
        check_choice("KeepBest", "mode", self.mode, ("min", "max"))
        check_count("KeepBest", "num_checkpoints", self.num_checkpoints, 1)


KeepPolicy = KeepLast | KeepEvery | KeepBest


def keep_policies(keep: int | KeepPolicy | Sequence[KeepPolicy] | None) -> tuple[KeepPolicy, ...]:
    """The policies of the argument `keep` of a manager; a number keeps the last checkpoints."""
    return _policies_of("keep", keep, KeepPolicy, KeepLast, "checkpoints", 10)


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """The decision whether a checkpoint is kept, and why."""

    info: CheckpointInfo
    """The checkpoint."""
    reasons: tuple[str, ...]
    """Why it is kept; empty if it is to be removed."""

    __repr__ = short_repr

    @property
    def is_kept(self) -> bool:
        """True if it stays."""
        return bool(self.reasons)


def decide_retention(
    infos: Sequence[CheckpointInfo], policies: Sequence[KeepPolicy], *, run: str, now: float
) -> list[RetentionDecision]:
    """One decision for each checkpoint, in the order given; only those of `run` may go."""
    known = [info for info in infos if not _is_copy(info)]
    counted = [info for info in known if info.run == run and not info.problem]
    reasons: dict[str, list[str]] = {info.name: _protections(info, run, now) for info in infos}
    newest = catalog.newest_of(infos)
    own_newest = catalog.newest_of(counted)
    for info in {one.name: one for one in (newest, own_newest) if one is not None}.values():
        reasons[info.name].append("the newest good one")
    if not policies:
        for info in infos:
            reasons[info.name].append("nothing is to be removed")
    for policy in policies:
        for info in _kept_by(policy, counted):
            reasons[info.name].append(_words(policy))
    return [RetentionDecision(info, tuple(reasons[info.name])) for info in infos]


def remove_unkept(
    storage: Storage, decisions: Sequence[RetentionDecision], *, now: float
) -> list[CheckpointInfo]:
    """Remove what is neither kept nor being read; returns the checkpoints that were removed."""
    infos = [decision.info for decision in decisions if not decision.is_kept]
    removed = [info for info in infos if catalog.remove(storage, info.name, now=now)]
    for info in removed:
        _LOGGER.info("removed %s: no policy keeps it", info.path)
    return removed


def _is_copy(info: CheckpointInfo) -> bool:
    """True if a checkpoint of a manager has a name that no manager gives it."""
    return info.note is not None and info.name != catalog.step_name(info.step)


def _protections(info: CheckpointInfo, run: str, now: float) -> list[str]:
    facts = (
        (_is_copy(info), f"a copy of {catalog.step_name(info.step)}"),
        (info.is_pinned, "pinned"),
        (info.in_use_until > now, "in use"),
        (info.run != run, f"of another run, {info.run or 'which has no name'}"),
        (bool(info.problem), f"damaged: {info.problem}"),
    )
    return [reason for holds, reason in facts if holds]


def _kept_by(policy: KeepPolicy, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    match policy:
        case KeepLast(count):
            return sorted(infos, key=catalog.age_key)[-count:]
        case KeepEvery(num_steps):
            return [info for info in infos if info.step % num_steps == 0]
        case KeepBest(metric, mode, count):
            sign = 1 if mode == "max" else -1
            known = [
                (sign * value, catalog.age_key(info), info)
                for info in infos
                if (value := info.metrics.get(metric)) is not None and not math.isnan(value)
            ]
            return [info for *_, info in sorted(known, key=lambda one: one[:2])[-count:]]


def _words(policy: KeepPolicy) -> str:
    match policy:
        case KeepLast(count):
            return f"among the last {count}"
        case KeepEvery(num_steps):
            return f"every {num_steps} steps"
        case KeepBest(metric, mode, count):
            return f"among the best {count} by {metric}:{mode}"
