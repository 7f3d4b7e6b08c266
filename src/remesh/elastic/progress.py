"""Useful time, hanging jobs and slow ranks, from the steps that ranks report: pure functions.

*Goodput* is the share of wall time that moved the training forward: the number of different steps
that were made times the usual duration of one, over the time since the job began. Steps that are
repeated after a failure count once, so what a failure costs (detection, restart, loading, repeated
steps) is what is missing from 1. DLRover's report on effective training time measures the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec

NUM_RECENT = 64
"""Durations of steps that are remembered for the usual one."""
SLOW_FACTOR = 1.5
"""A rank is slow if its steps take this many times the median of all ranks."""


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has reported.

    Attributes:
        step: The last step that it finished.
        time: When, in seconds by the receiver's clock.
        step_seconds: How long its own work of a step takes, if it measures that.
        saved_step: The step of the newest checkpoint that it knows to be committed.
    """

    step: int
    time: float
    step_seconds: float | None = None
    saved_step: int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the training.

    Attributes:
        began: When the job began.
        first_step: The step before the first one that was seen.
        last_step: The highest step that any rank has finished.
        moved: When it changed.
        ranks: The ranks of the current round.
        recent: Durations of recent steps, in seconds, newest last.
    """

    began: float
    first_step: int | None = None
    last_step: int | None = None
    moved: float
    ranks: dict[int, RankProgress] = {}
    recent: tuple[float, ...] = ()


def begin(now: float) -> Progress:
    """Nothing is known yet."""
    return Progress(began=now, moved=now)


def begin_round(progress: Progress, now: float) -> Progress:
    """A new world starts: its ranks have reported nothing, and its first step may take a while."""
    return msgspec.structs.replace(progress, ranks={}, moved=now)


def report(progress: Progress, rank: int, heard: RankProgress, now: float) -> Progress:
    """What is known after a rank has reported."""
    ranks = {**progress.ranks, rank: heard}
    last = progress.last_step
    if last is not None and heard.step <= last:
        # A step that is made again moves the job as far as hanging goes, but is no new progress.
        old = progress.ranks.get(rank)
        repeated = old is None or heard.step > old.step
        moved = now if repeated else progress.moved
        return msgspec.structs.replace(progress, ranks=ranks, moved=moved)
    recent = progress.recent
    if last is not None and progress.ranks and now > progress.moved:
        per_step = (now - progress.moved) / (heard.step - last)
        recent = (*recent, per_step)[-NUM_RECENT:]
    return msgspec.structs.replace(
        progress,
        ranks=ranks,
        first_step=heard.step - 1 if last is None else progress.first_step,
        last_step=heard.step,
        moved=now,
        recent=recent,
    )


def goodput(progress: Progress, now: float) -> float | None:
    """The share of time since the job began that moved it forward; None if nothing is known."""
    if progress.first_step is None or progress.last_step is None or not progress.recent:
        return None
    elapsed = now - progress.began
    if elapsed <= 0:
        return None
    num_steps = progress.last_step - progress.first_step
    return min(num_steps * median(progress.recent) / elapsed, 1.0)


def hangs(progress: Progress, now: float, limit: float | None) -> bool:
    """Whether no rank has finished a step for longer than a limit.

    Only jobs that report steps can be judged: before the first report nothing is said.
    """
    if limit is None or not progress.ranks:
        return False
    return now - progress.moved > limit


def slow_ranks(progress: Progress) -> Mapping[int, float]:
    """Ranks whose own work takes longer than that of the others, and how many times the median."""
    durations = {
        rank: heard.step_seconds
        for rank, heard in progress.ranks.items()
        if heard.step_seconds is not None
    }
    if len(durations) < 3:
        return {}
    typical = median(durations.values())
    return {
        rank: seconds / typical
        for rank, seconds in durations.items()
        if typical > 0 and seconds > SLOW_FACTOR * typical
    }


def lagging_ranks(progress: Progress) -> list[int]:
    """The ranks that have finished the fewest steps, if some have finished more."""
    steps = {rank: heard.step for rank, heard in progress.ranks.items()}
    if len(set(steps.values())) < 2:
        return []
    fewest = min(steps.values())
    return sorted(rank for rank, step in steps.items() if step == fewest)
