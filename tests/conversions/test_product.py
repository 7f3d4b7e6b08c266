"""Every layout to every layout, ranks being threads: bit for bit what the direct mapping says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.conversions.jobs import Job
from tests.conversions.layouts import LAYOUTS, Layout, random_state
from tests.conversions.model import Shape
from tests.conversions.simulated import check, filled, load, save
from tests.conversions.test_acceptance import ROUND_TRIPS

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


def test_layouts_of_the_round_trips_cut_as_they_say() -> None:
    _, layout, shape = ROUND_TRIPS["a further layer and uneven stages tp2ep2 vpp4"]
    assert [len(layout.layers_of(n, shape)) for n in range(8)] == [1] * 8
    assert [len(Layout("", pp=3).layers_of(n, shape)) for n in range(3)] == [3, 2, 3]
    _, layout, shape = ROUND_TRIPS["flat slices cross all boundaries dp2 sharding4 v2"]
    jobs = [Job(layout, shape, rank) for rank in range(4)]
    cut = Counter(name for job in jobs for name, _, _ in job.slots[0].stretches)
    assert max(cut.values()) > 1, "a parameter on two ranks"
