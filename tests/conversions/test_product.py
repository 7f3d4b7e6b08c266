"""Every layout to every layout, ranks being threads: bit for bit what the direct mapping says."""

from __future__ import annotations

import pytest

from tests.conversions.layouts import LAYOUTS, Layout, random_state
from tests.conversions.model import Shape
from tests.conversions.simulated import check, filled, load, save

SHAPE = Shape(num_experts=2, num_chosen=1)
STRIDE = 5
"""Of how many targets the default run takes one."""


def check_pairs(source: Layout, targets: list[Layout]) -> None:
    whole = random_state(SHAPE, 5)
    storage = save(filled(source, SHAPE, whole))
    for target in targets:
        check(load(target, SHAPE, storage), whole)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_itself_and_some_others(source: Layout) -> None:
    check_pairs(source, LAYOUTS[LAYOUTS.index(source) % STRIDE :: STRIDE])


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, STRIDE))
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_loads_in_all_others(source: Layout, shift: int) -> None:
    check_pairs(source, LAYOUTS[(LAYOUTS.index(source) + shift) % STRIDE :: STRIDE])
