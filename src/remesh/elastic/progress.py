"""Useful time, hanging jobs and slow ranks, from the steps that ranks report: pure functions.

*Goodput* is the share of wall time that moved the training forward: the number of different steps
that were made times the usual duration of one, over the time since the job began. Steps that are
repeated after a failure count once, so what a failure costs (detection, restart, loading, repeated
steps) is what is missing from 1. DLRover's report on effective training time measures the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

import msgspec

NUM_RECENT = 64
"""Durations of steps that are remembered for the usual one."""
SLOW_FACTOR = 1.5
"""A rank is slow if its steps take this many times the median of all ranks."""
HANG_FACTOR = 100.0
HANG_PAUSES = 3.0
HANG_SECONDS = 3600.0
"""If no limit was given, a job hangs after so many usual steps, so many times the longest pause so
far, and so many seconds at least."""
START_SECONDS = 3 * HANG_SECONDS
"""The least limit before the first step of a round, for which a state is loaded."""


class RankProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reported progress of one rank."""

    step: int  # the last step that it finished
    time: float  # when, in seconds of its machine's clock that setting the time does not change
    step_seconds: float | None = None  # how long its own work of a step takes, if it measures that
    saved_step: int | None = None  # the step of the newest checkpoint that it knows to be committed
    waits: bool = False  # whether it waits for the world to change


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The known progress of the training."""

    began: float  # when the job began
    first_step: int | None = None  # the step before the first one that was seen
    last_step: int | None = None  # the highest step that any rank has finished
    moved: float  # when any rank has last got further
    round_step: int | None = None
    """The highest step of the current round; None before the first report."""
    round_step_at: float = 0.0  # when that was reached
    recent: tuple[float, ...] = ()  # durations of recent steps, in seconds, newest last
    longest: float = 0.0
    """The longest time between two reports of more steps in one round, in seconds."""


def begin(now: float) -> TrainingProgress:
    """Nothing is known yet."""
    return TrainingProgress(began=now, moved=now)


def begin_round(progress: TrainingProgress, now: float) -> TrainingProgress:
    """A new world starts: its ranks have reported nothing, and its first step may take a while."""
    return msgspec.structs.replace(progress, round_step=None, moved=now)


def report(
    progress: TrainingProgress, before: RankProgress | None, heard: RankProgress
) -> TrainingProgress:
    """The progress after a rank has reported."""
    step, now = heard.step, heard.time
    has_moved = before is None or step > before.step
    if (
        (progress.round_step is not None and step <= progress.round_step)
        and (progress.last_step is not None and step <= progress.last_step)
        and not (has_moved and now > progress.moved)
    ):
        return progress  # another rank has been there before, as it is with most of many
    changes: dict[str, object] = {}
    # A step that is made again moves the job as far as hanging goes, but is no new progress.
    if has_moved:
        changes["moved"] = max(now, progress.moved)
    if progress.first_step is None:
        changes["first_step"] = step - 1
    if progress.last_step is None or step > progress.last_step:
        changes["last_step"] = step
    if progress.round_step is None:
        changes |= {"round_step": step, "round_step_at": now}
    elif step > progress.round_step:
        changes |= {"round_step": step, "round_step_at": now}
        if now > progress.round_step_at:
            pause = now - progress.round_step_at
            per_step = pause / (step - progress.round_step)
            changes["recent"] = (*progress.recent, per_step)[-NUM_RECENT:]
            changes["longest"] = max(progress.longest, pause)
    return msgspec.structs.replace(progress, **changes)


def goodput(progress: TrainingProgress, now: float) -> float | None:
    """The share of the time since the job began that moved it forward; None if nothing is known.

    `now` is when the job ended, once it has.
    """
    if progress.first_step is None or progress.last_step is None or not progress.recent:
        return None
    elapsed = now - progress.began
    if elapsed <= 0:
        return None
    num_steps = progress.last_step - progress.first_step
    return min(num_steps * median(progress.recent) / elapsed, 1.0)


def usual_step(progress: TrainingProgress) -> float | None:
    """How long a step takes mostly, in seconds; None if that is not known."""
    return median(progress.recent) if progress.recent else None


def pause_of(progress: TrainingProgress, now: float) -> float | None:
    """Seconds since a rank has finished a step; None before the first one of the round."""
    return None if progress.round_step is None else max(now - progress.moved, 0.0)


def hang_limit(progress: TrainingProgress, given: float | None, num_hangs: int) -> float:
    """Seconds without a step after which a job hangs; infinite if it never does.

    A given limit of 0 means none; None that it follows from the steps so far. Each restart after a
    hang doubles a limit that follows from the steps: a pause that no earlier one was like, such as
    a first evaluation, ends before the job does. So it is with the limit for the first step of a
    round, which a job has that has made steps before.
    """
    starts = progress.round_step is None
    if given is not None and (given <= 0 or not starts):
        return given if given > 0 else math.inf
    if not progress.recent:
        return math.inf
    usual = median(progress.recent)
    limit = given or max(HANG_SECONDS, HANG_FACTOR * usual, HANG_PAUSES * progress.longest)
    return max(limit, START_SECONDS if starts else 0.0) * 2.0 ** min(num_hangs, 30)


def slow_ranks(ranks: Mapping[int, RankProgress]) -> Mapping[int, float]:
    """Ranks whose own work takes longer than that of the others, and how many times the median."""
    durations = {
        rank: heard.step_seconds for rank, heard in ranks.items() if heard.step_seconds is not None
    }
    if len(durations) < 3:
        return {}
    typical = median(durations.values())
    return {
        rank: seconds / typical
        for rank, seconds in durations.items()
        if typical > 0 and seconds > SLOW_FACTOR * typical
    }


def lagging_ranks(ranks: Mapping[int, RankProgress]) -> list[int]:
    """The ranks that have finished the fewest steps, if some have finished more."""
    steps = {rank: heard.step for rank, heard in ranks.items()}
    if len(set(steps.values())) < 2:
        return []
    fewest = min(steps.values())
    return sorted(rank for rank, step in steps.items() if step == fewest)
