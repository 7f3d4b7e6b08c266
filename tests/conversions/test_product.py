"""Every layout to every layout, ranks being threads: bit for bit what the direct mapping says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conversions.layouts import LAYOUTS, Layout, random_state
from tests.conversions.model import Shape
from tests.conversions.simulated import check, filled, load, save

SHAPE = Shape(num_experts=2, num_chosen=1)
SHIFTS = (7, 10)
"""How far behind a source in the list those targets are that the default run takes."""


def check_pairs(source: Layout, shifts: Iterable[int]) -> None:
    whole = random_state(SHAPE, 5)
    storage = save(filled(source, SHAPE, whole))
    for shift in shifts:
        target = LAYOUTS[(LAYOUTS.index(source) + shift) % len(LAYOUTS)]
        check(load(target, SHAPE, storage), whole)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_some_others(source: Layout) -> None:
    check_pairs(source, SHIFTS)


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_itself_and_all_others(source: Layout) -> None:
    check_pairs(source, set(range(len(LAYOUTS))) - {*SHIFTS})
