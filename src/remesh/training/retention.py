"""What to keep: small frozen policies, a pure function that asks them, and one that removes.

`decide` gets what is known of each checkpoint in a directory and gives the reasons why each is
kept; one without a reason is to be removed (`remove_unkept`). Policies are united: a checkpoint
stays if any of them keeps it. Whatever the policies say, these stay:

* the newest that is not known to be damaged,
* what is pinned, and what is being read at the time,
* what belongs to another run, and what is known to be damaged (it may be repaired, and counts for
  no policy).

After Orbax's preservation policies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from remesh import catalog
from remesh._repr import short_repr
from remesh.catalog import CheckpointInfo
from remesh.checkpoint.arguments import check_choice, check_count, shown
from remesh.errors import OptionError
from remesh.storage import Storage


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


_LOGGER = logging.getLogger("remesh")

KeepPolicy = KeepLast | KeepEvery | KeepBest


def keep_policies(keep: int | KeepPolicy | Sequence[KeepPolicy] | None) -> tuple[KeepPolicy, ...]:
    """The policies of the argument `keep` of a manager; a number is that of the last checkpoints.

    None and an empty sequence both mean that nothing is ever removed.
    """
    match keep:
        case None:
            return ()
        case KeepLast() | KeepEvery() | KeepBest():
            return (keep,)
        case list() | tuple() if all(isinstance(each, KeepPolicy) for each in keep):
            return tuple(keep)
    with suppress(OptionError):
        return (KeepLast(check_count("Manager", "keep", keep, 1)),)
    raise OptionError(
        "Manager: keep= must be a number of checkpoints, a policy or a list of policies, "
        f"not {shown(keep)}."
    )


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a checkpoint is kept, and why."""

    info: CheckpointInfo
    """The checkpoint."""
    reasons: tuple[str, ...]
    """Why it is kept; empty if it is to be removed."""

    __repr__ = short_repr

    @property
    def is_kept(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


def decide(
    infos: Sequence[CheckpointInfo], policies: Sequence[KeepPolicy], *, run: str, now: float
) -> list[RetentionDecision]:
    """What becomes of each checkpoint; nothing is touched.

    One decision for each checkpoint, in the order given. Without policies everything stays; only
    checkpoints of `run` may be removed.
    """
    counted = [info for info in infos if info.run == run and not info.problem]
    reasons: dict[str, list[str]] = {info.name: _protections(info, run, now) for info in infos}
    newest = catalog.newest_of([info for info in infos if not info.problem])
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
    """Remove the checkpoints that are not kept; returns those that were removed.

    One that is read by the time of its removal stays.
    """
    infos = [decision.info for decision in decisions if not decision.is_kept]
    removed = [info for info in infos if catalog.remove(storage, info.name, now=now)]
    for info in removed:
        _LOGGER.info("removed %s: no policy keeps it", info.path)
    return removed


def _protections(info: CheckpointInfo, run: str, now: float) -> list[str]:
    facts = (
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
