"""What the ranks of a background save ask of the storage stays bounded, however many they are."""

from __future__ import annotations

import numpy as np
import pytest

from remesh.background import status_files

SIZES = [1, 2, 3, 4, 5, 8, 16, 63, 200, 256, 1000, 4000, 4096, 16_384]
SECONDS = 200.0


def looks(schedule: status_files.Schedule) -> list[float]:
    """When a rank looks, if a look takes no time: the most often that it can."""
    at, times = schedule.first, []
    while at < SECONDS:
        times.append(at)
        at += schedule.pause(at)
    return times


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_requests_of_a_job_are_bounded(num_ranks: int) -> None:
    """All begin to wait at once, which is when the storage has most to do."""
    times = [
        np.array(looks(status_files.schedule_of(rank, num_ranks))) for rank in range(1, num_ranks)
    ]
    if not times:
        return
    per_second = 2 * np.bincount(np.concatenate(times).astype(np.int64))
    # Two looks of one rank may lie at the ends of a second.
    assert per_second.max() <= status_files.REQUESTS_PER_SECOND + 2 * min(num_ranks, 50)
    assert per_second[60:120].mean() <= status_files.REQUESTS_PER_SECOND


@pytest.mark.parametrize("num_ranks", SIZES)
def test_every_rank_goes_on_looking(num_ranks: int) -> None:
    longest = max(1.0, 2 * num_ranks / status_files.REQUESTS_PER_SECOND)
    for rank in {1, num_ranks // 2, num_ranks - 1}:
        schedule = status_files.schedule_of(rank, num_ranks)
        assert 0 <= schedule.first <= longest
        pauses = [schedule.pause(waited) for waited in (0.0, 1.0, 10.0, 100.0, 1e6)]
        assert pauses == sorted(pauses)
        assert pauses[-1] <= longest


def test_small_jobs_look_often() -> None:
    for num_ranks in (1, 2, 4):
        schedule = status_files.schedule_of(1, num_ranks)
        assert schedule.first == 0.0
        assert schedule.pause(0.0) <= 0.02


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_requests_of_rank_0_are_bounded(num_ranks: int) -> None:
    """A listing is a request for each thousand names, and every rank has a file and a note."""
    requests = 1 + 2 * num_ranks // 1000
    per_second = requests * np.bincount(
        np.array(looks(status_files.schedule_of(0, num_ranks))).astype(np.int64)
    )
    assert per_second.max() <= status_files.COORDINATOR_REQUESTS_PER_SECOND + requests
    assert per_second[60:120].mean() <= requests + 1
