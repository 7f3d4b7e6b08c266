"""Every layout to every layout, ranks being threads: bit for bit what the direct mapping says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conversions.layouts import LAYOUTS, Layout, random_state
from tests.conversions.model import Shape
from tests.conversions.simulated import check, filled, load, save

SHAPE = Shape(num_experts=2, num_chosen=1)
WITHOUT_BIASES = Shape(num_experts=2, num_chosen=1, bias=False)
"""Biases are cut as the rows of their weights are; each layout has them as source and as target of
the default run."""
SHIFTS = (7, 10)
"""How far behind a source in the list those targets are that the default run takes."""


def check_pairs(source: Layout, shifts: Iterable[int], shape: Shape = SHAPE) -> None:
    whole = random_state(shape, 5)
    storage = save(filled(source, shape, whole))
    for shift in shifts:
        target = LAYOUTS[(LAYOUTS.index(source) + shift) % len(LAYOUTS)]
        check(load(target, shape, storage), whole)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_some_others(source: Layout) -> None:
    check_pairs(source, SHIFTS)


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_itself_and_all_others(source: Layout) -> None:
    check_pairs(source, set(range(len(LAYOUTS))) - {*SHIFTS}, WITHOUT_BIASES)
