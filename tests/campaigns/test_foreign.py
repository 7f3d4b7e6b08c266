"""Composed and damaged pickles in every foreign format: nothing runs, all errors are ours.

Each run draws a pickle and a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.formats.hostile import warm_up
from tests.formats.test_hostile_pickles import check_random


@pytest.mark.timeout(6 * 3600)
@lengths("num_pickles", 50, 100_000)
def test_foreign_pickles(num_pickles: int, covered: Callable[[str], None]) -> None:
    warm_up()
    for number in range(num_pickles):
        with noted(f"run {number}"):
            check_random(dice_of("foreign", number))
    covered(f"seed {seed()}: {num_pickles} pickles")
