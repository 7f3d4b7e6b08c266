"""Layouts as real processes that train: saved in one, loaded in another, trained on, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.exchange import Exchange
from tests.conversions.jobs import Group, Job
from tests.conversions.layouts import (
    BY_NAME,
    TRAINED,
    TRAINED_IF_SLOW,
    TRAINED_NIGHTLY,
    Held,
    Layout,
    put_together,
    random_state,
)
from tests.conversions.model import Shape
from tests.conversions.training import start, train
from tests.support import run_processes

NUM_STEPS = 2
"""Steps before and after the change of layout: the loss of the second one shows the moments."""

SHAPE = Shape()


@dataclass
class Told:
    """What a rank tells of one conversion."""

    losses: list[float]  # of the steps in the first layout, the last ones after the save
    others: list[float]  # of the same steps in the second layout
    saved: list[list[Held]]
    """What it held when the state was saved, when the second layout had loaded it, and when the
    first had it again."""
    random: list[Any]  # the generator at these times


def convert(exchange: Exchange, first: Layout, second: Layout, shape: Shape, folder: str) -> Told:
    """Train in a layout, go on in it and in another, and come back from there."""
    told = Told([], [], [[], [], []], [])
    there, back = f"{folder}/there", f"{folder}/back"
    groups = [Group.of(layout) for layout in (first, second)]
    in_first, in_second = (exchange.rank < layout.world_size for layout in (first, second))
    if in_first:
        job = Job(first, shape, exchange.rank, groups[0])
        start(job, 3)
        told.losses += train(job, NUM_STEPS)
        save(job, there)
        note(job, told, 0)
        told.losses += train(job, NUM_STEPS)
    exchange.all_gather(b"saved")
    if in_second:
        job = Job(second, shape, exchange.rank, groups[1], step=55)
        start(job, 4)
        load(job, there)
        note(job, told, 1)
        save(job, back)
        told.others += train(job, NUM_STEPS)
    exchange.all_gather(b"saved again")
    if in_first:
        job = Job(first, shape, exchange.rank, groups[0], step=66)
        start(job, 5)
        load(job, back)
        note(job, told, 2)
    return told


def save(job: Job, path: str) -> None:
    assert job.group is not None
    remesh.save(job.state(), path, group=job.group.ranks)


def load(job: Job, path: str) -> None:
    assert job.group is not None
    state = job.state()
    remesh.load(state, path, group=job.group.ranks, unexpected="error")
    job.step = state["step"]


def note(job: Job, told: Told, number: int) -> None:
    told.saved[number] = [Held(one.key, one.elements.clone(), one.numbers) for one in job.held()]
    told.random.append((job.step, job.generator.get_state().numpy().tobytes()))


def check(first: Layout, second: Layout, shape: Shape, folder: Path) -> None:
    num_ranks = max(first.world_size, second.world_size)
    told = run_processes(num_ranks, convert, first, second, shape, str(folder))
    like = random_state(shape, 0)
    before, moved, again = (put_together([one.saved[n] for one in told], like) for n in range(3))
    for key, whole in before.items():
        assert torch.equal(whole, moved[key]), key
        assert torch.equal(whole, again[key]), key
    assert {value for one in told for value in one.random} == {told[0].random[0]}
    assert told[0].random[0][0] == NUM_STEPS
    assert before["embedding.weight.exp_avg"].any()
    if shape.num_layers:
        assert before["model.layers.0.mixture.router_bias"].any()
    losses = next(one.losses for one in told if one.losses)
    others = next(one.others for one in told if one.others)
    assert len(losses) == 2 * NUM_STEPS
    assert others == losses[NUM_STEPS:]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *TRAINED,
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in TRAINED_IF_SLOW),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in TRAINED_NIGHTLY),
    ],
)
def test_a_job_goes_on_in_another_layout(first: str, second: str, tmp_path: Path) -> None:
    check(BY_NAME[first], BY_NAME[second], SHAPE, tmp_path)
