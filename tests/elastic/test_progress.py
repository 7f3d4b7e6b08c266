"""Useful time, hanging jobs and slow ranks."""

from __future__ import annotations

import math

import pytest

from remesh.elastic.progress import (
    RankProgress,
    TrainingProgress,
    begin,
    begin_round,
    goodput,
    hang_limit,
    pause_of,
    report,
)


def heard(step: int, now: float, seconds: float | None = None) -> RankProgress:
    return RankProgress(step=step, time=now, step_seconds=seconds)


def trained(
    progress: TrainingProgress, steps: range, began: float, seconds: float
) -> TrainingProgress:
    before = None
    for number, step in enumerate(steps, start=1):
        now = heard(step, began + number * seconds)
        progress, before = report(progress, before, now), now
    return progress


def test_nothing_is_known_before_the_first_steps() -> None:
    assert goodput(begin(0.0), 10.0) is None


def test_steps_without_interruption_are_all_useful() -> None:
    progress = trained(begin(0.0), range(1, 101), 0.0, 1.0)
    assert goodput(progress, 100.0) == pytest.approx(1.0)


def test_lost_time_and_repeated_steps_are_not_useful() -> None:
    progress = trained(begin(0.0), range(1, 101), 0.0, 1.0)
    # 60 s until the restart, then the steps from 81 on again: 20 s for nothing.
    progress = begin_round(progress, 160.0)
    progress = trained(progress, range(81, 121), 160.0, 1.0)
    assert goodput(progress, 200.0) == pytest.approx(120 / 200)


def test_a_job_pauses_while_no_rank_moves() -> None:
    progress = trained(begin(0.0), range(1, 11), 0.0, 1.0)
    assert [pause_of(progress, now) for now in (9.0, 39.0, 41.0)] == [0.0, 29.0, 31.0]


def test_nothing_is_said_before_the_first_report_of_a_round() -> None:
    progress = begin_round(trained(begin(0.0), range(1, 11), 0.0, 1.0), 20.0)
    assert pause_of(progress, 1000.0) is None


def test_the_limit_for_a_hang_follows_from_the_steps() -> None:
    first = trained(begin(0.0), range(1, 2), 0.0, 100.0)
    assert hang_limit(first, None, 0) == math.inf, "nothing is known of how long a step takes"
    quick = trained(begin(0.0), range(1, 11), 0.0, 1.0)
    assert hang_limit(quick, None, 0) == 3600.0
    slow = trained(begin(0.0), range(1, 11), 0.0, 100.0)
    assert hang_limit(slow, None, 0) == 10_000.0
    evaluated = report(quick, heard(10, 10.0), heard(11, 3010.0))
    evaluated = trained(evaluated, range(12, 200), 3010.0, 1.0)
    assert hang_limit(evaluated, None, 0) == 9000.0, "three times the longest pause so far"
    assert [hang_limit(quick, None, num) for num in (1, 2)] == [7200.0, 14_400.0]


def test_a_limit_that_is_given_holds() -> None:
    slow = trained(begin(0.0), range(1, 11), 0.0, 100.0)
    assert hang_limit(slow, 30.0, 2) == 30.0
    assert hang_limit(slow, 0.0, 0) == math.inf


def test_the_first_step_of_a_round_has_three_hours_at_least() -> None:
    new = begin_round(begin(0.0), 5.0)
    assert [hang_limit(new, given, 0) for given in (None, 30.0)] == [math.inf] * 2
    trained_before = begin_round(trained(begin(0.0), range(1, 11), 0.0, 1.0), 20.0)
    limits = [hang_limit(trained_before, given, 1) for given in (None, 30.0, 20_000.0, 0.0)]
    assert limits == [21_600.0, 21_600.0, 40_000.0, math.inf]


def test_repeated_steps_are_no_hang() -> None:
    progress = begin_round(trained(begin(0.0), range(1, 11), 0.0, 1.0), 20.0)
    progress = trained(progress, range(5, 8), 20.0, 40.0)
    assert pause_of(progress, 141.0) == 1.0


def test_ranks_that_report_a_step_late_make_no_step_look_shorter() -> None:
    progress = begin(0.0)
    before: dict[int, RankProgress] = {}
    for step in range(1, 51):
        for rank, late in enumerate((0.0, 0.4)):
            now = heard(step, step + late)
            progress = report(progress, before.get(rank), now)
            before[rank] = now
    assert progress.recent == pytest.approx([1.0] * 49)
    assert progress.moved == pytest.approx(50.4)


def test_the_time_between_two_rounds_is_no_step() -> None:
    progress = trained(begin(0.0), range(1, 11), 0.0, 1.0)
    progress = trained(begin_round(progress, 60.0), range(11, 21), 60.0, 1.0)
    assert progress.recent == pytest.approx([1.0] * 18)
