"""Composed and damaged pickles in every foreign format: nothing runs, all errors are ours.

Each run draws a pickle and a checkpoint. The long run of 100,000 is `REMESH_CAMPAIGN=1000`.
"""

from __future__ import annotations

from tests.campaigns.settings import dice_of, num_runs
from tests.formats.hostile import warm_up
from tests.formats.test_hostile_pickles import check_random


def test_foreign_pickles() -> None:
    warm_up()
    for number in range(num_runs(50, share=100)):
        try:
            check_random(dice_of("foreign", number))
        except Exception as error:
            raise AssertionError(f"run {number} of the campaign") from error
