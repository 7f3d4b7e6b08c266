"""Kill anywhere: a real training, killed again and again, is the same training in the end."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

import remesh
from remesh.storage import open_storage
from remesh.training import catalog
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


def play(directory: Path, *, num_kills: int, last_step: int, seed: int) -> tuple[History, Path]:
    """Train to a step in as many launches as it takes, each but the last one killed."""
    dice = random.Random(seed)
    root = directory / "run"
    notes: list[Path] = []
    num_killed = 0
    while True:
        world_size = dice.choice((1, 2, 3, 4))
        death = None
        if num_killed < num_kills:
            if dice.random() < 0.8:
                # Most changes are rank 0's, who commits and tidies up: some 12 for each save.
                rank = 0 if dice.random() < 0.7 else dice.randrange(world_size)
                change = dice.randint(1, 6 if rank else 40)
                death = Death(rank, change, after=dice.random() < 0.5)
            else:
                death = Death(seconds=dice.uniform(0.3, 2.0))
        notes.append(directory / f"launch-{len(notes):03d}")
        killed = run(Launch(root, notes[-1], world_size, last_step, death=death))
        num_killed += killed
        if not killed:
            assert num_killed >= num_kills, f"it was over after {num_killed} kills"
            return History.read(notes), root


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
    infos = catalog.look(open_storage(root))
    assert [info.step for info in infos] == sorted(kept)
    assert len({info.run for info in infos}) == 1
    for info in infos:
        assert remesh.Checkpoint(info.path).verify().ok


def reference_of(directory: Path, last_step: int) -> History:
    notes = directory / "reference"
    assert not run(Launch(directory / "undisturbed", notes, 1, last_step))
    return History.read([notes])


def test_a_killed_run_is_the_same_run(tmp_path: Path) -> None:
    history, root = play(tmp_path, num_kills=3, last_step=24, seed=2)
    check(history, reference_of(tmp_path, 24), root, 24)
    assert max(history.resumed) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills_anywhere(tmp_path: Path) -> None:
    history, root = play(tmp_path, num_kills=50, last_step=200, seed=1)
    check(history, reference_of(tmp_path, 200), root, 200)


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
