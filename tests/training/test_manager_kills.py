"""Kill anywhere: a real training, killed again and again, is the same training in the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import remesh
from remesh import catalog
from remesh.storage import open_storage
from tests.campaigns.settings import dice_of, lengths, seed
from tests.training.killed_training import (
    KEEP_EVERY,
    KEEP_LAST,
    NUM_SAMPLES,
    SAVE_EVERY,
    Death,
    History,
    Launch,
    run,
)


def random_death(dice: random.Random, world_size: int) -> Death:
    """Most by a rank's own hand, at some change of the storage that it makes."""
    if dice.random() < 0.2:
        return Death(seconds=dice.uniform(0.3, 2.0))
    # Most changes are rank 0's, who commits and tidies up: some 12 for each save.
    rank = 0 if dice.random() < 0.7 else dice.randrange(world_size)
    return Death(rank, dice.randint(1, 6 if rank else 40), after=dice.random() < 0.5)


def check(history: History, reference: History, root: Path, last_step: int) -> None:
    assert list(history.losses) == list(range(1, last_step + 1))
    # Other world sizes add in another order, so float64 differs in its last digits.
    for step, loss in history.losses.items():
        assert math.isclose(loss, reference.losses[step], rel_tol=1e-9), step
    assert history.lost == []
    assert history.passed_over == []
    *whole, last = sorted(history.samples)
    for epoch in whole:
        assert sorted(history.samples[epoch]) == list(range(NUM_SAMPLES))
    assert sorted(history.samples[last]) == sorted(reference.samples[last])
    saved = list(range(SAVE_EVERY, last_step + 1, SAVE_EVERY))
    kept = {*saved[-KEEP_LAST:], *(step for step in saved if step % KEEP_EVERY == 0)}
    infos = catalog.list_checkpoints(open_storage(root))
    assert [info.step for info in infos] == sorted(kept)
    assert len({info.run for info in infos}) == 1
    for info in infos:
        assert remesh.Checkpoint(info.path).verify().ok


def reference_of(directory: Path, last_step: int) -> History:
    notes = directory / "reference"
    assert not run(Launch(directory / "undisturbed", notes, 1, last_step))
    return History.read([notes])


def test_a_killed_run_is_the_same_run(tmp_path: Path) -> None:
    root, last_step = tmp_path / "run", 24
    launches = [(2, Death(0, 17)), (4, Death(1, 4, after=True)), (3, Death(0, 9)), (1, None)]
    notes = [tmp_path / f"launch-{number}" for number in range(len(launches))]
    killed = [
        run(Launch(root, folder, world_size, last_step, death=death))
        for folder, (world_size, death) in zip(notes, launches, strict=True)
    ]
    assert killed == [True, True, True, False]
    history = History.read(notes)
    check(history, reference_of(tmp_path, last_step), root, last_step)
    assert max(history.resumed) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@lengths("num_kills", 6, 50)
def test_kills_anywhere(tmp_path: Path, num_kills: int, covered: Callable[[str], None]) -> None:
    dice, root = dice_of("kills of a training", num_kills), tmp_path / "run"
    notes = [tmp_path / f"launch-{number:03d}" for number in range(num_kills + 1)]
    for folder in notes[:-1]:
        world_size = dice.choice((1, 2, 3, 4))
        death = random_death(dice, world_size)
        assert run(Launch(root, folder, world_size, None, death=death))
    # However far a machine came until then: some steps further.
    last_step = catalog.list_checkpoints(open_storage(root))[-1].step + 4 * SAVE_EVERY
    assert not run(Launch(root, notes[-1], dice.choice((1, 2, 3, 4)), last_step))
    history = History.read(notes)
    check(history, reference_of(tmp_path, last_step), root, last_step)
    covered(f"seed {seed()}: {num_kills} kills, resumed from {history.resumed}")


def test_in_the_same_layout_even_dropout_is_the_same(tmp_path: Path) -> None:
    """Random numbers go on where they were, so that not one bit differs."""
    undisturbed = tmp_path / "undisturbed"
    launch = Launch(tmp_path / "a", undisturbed, 2, 12, dropout=0.5)
    assert not run(launch)
    deaths = [Death(0, 40), None]
    notes = [tmp_path / f"launch-{number}" for number in range(2)]
    killed = [
        run(Launch(tmp_path / "b", folder, 2, 12, dropout=0.5, death=death))
        for folder, death in zip(notes, deaths, strict=True)
    ]
    assert killed == [True, False]
    history = History.read(notes)
    assert history.losses == History.read([undisturbed]).losses
    assert max(history.resumed) > 0
