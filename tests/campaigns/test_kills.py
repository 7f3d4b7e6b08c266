"""Kills at random moments: the newest announced checkpoint always loads, byte for byte."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.maintenance import orphans
from tests.campaigns.killed_saving import (
    MAX_STEPS,
    Death,
    Launch,
    Way,
    place_of,
    save_until_killed,
    whole_state,
)
from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.support import Died, Raised, TimedOut, run_processes_outcomes
from tests.waiting import is_alive, wait_until

WAYS: tuple[Way, ...] = ("save", "thread", "process")
TIDY_EVERY = 10
A_WEEK = 7 * 86400.0


def draw(root: Path, number: int, newest: int) -> Launch:
    """The launch of a number."""
    dice = dice_of("kills", number)
    world_size = dice.choice((1, 2, 2, 3, 4))
    rank = 0 if dice.random() < 0.6 else dice.randrange(world_size)
    way = dice.choices(WAYS, (50, 40, 10))[0]
    # A writer process makes the changes itself; else rank 0 makes some 20 a save, others some 8.
    by_clock = way == "process" or dice.random() < 0.3
    change = 0 if by_clock else dice.randint(1, 20 if rank else 50)
    death = Death(
        rank,
        dice.choice(("at once", "soon", "soon", "left")),
        dice.random() < 0.5,
        change,
        dice.choice(("before", "within", "after")),
        dice.uniform(0.0, 0.3),
    )
    return Launch(root, 1 + number * MAX_STEPS, world_size, way, newest, death)


def numbers_in(file: Path) -> set[int]:
    return {int(line) for line in file.read_text().split()} if file.exists() else set()


def run(launch: Launch) -> bool:
    """Run a launch; whether it was killed. What survivors raise must say that somebody died."""
    outcomes = run_processes_outcomes(launch.world_size, save_until_killed, launch, timeout=240)
    writers = numbers_in(launch.process_ids)
    wait_until(lambda: not any(map(is_alive, writers)), "the writer processes end")
    for outcome in outcomes:
        assert not isinstance(outcome, TimedOut), outcome
        if isinstance(outcome, Raised):
            assert isinstance(outcome.error, remesh.errors.ExchangeError), outcome
        elif isinstance(outcome, Died):
            assert outcome == Died(-signal.SIGKILL)
    was_killed = isinstance(outcomes[launch.death.rank], Died)
    # On a machine that is busy with something else a rank may be taken for dead that is not.
    was_late = any(isinstance(one, Raised) and " waited " in str(one.error) for one in outcomes)
    if not was_killed and not was_late:
        assert not any(isinstance(outcome, Raised | Died) for outcome in outcomes), outcomes
    return was_killed


def stored_step(place: Path) -> int | None:
    """The step of a checkpoint, if there is one; fails if it is not all of that step."""
    try:
        checkpoint = remesh.Checkpoint(place)
    except remesh.CheckpointNotFoundError:
        return None
    step = checkpoint.values["step"]
    assert isinstance(step, int)
    assert checkpoint.verify().ok
    whole = whole_state(step)
    state = {name: np.zeros_like(value) for name, value in whole.items() if name != "step"}
    remesh.load(state, place)
    for name, array in state.items():
        assert array.tobytes() == whole[name].tobytes(), (step, name)
    return step


def check(root: Path, announced: set[int]) -> None:
    """Every place holds what was last announced there, or a later step, or nothing unannounced."""
    newest: dict[Path, int] = {}
    for step in sorted(announced):
        newest[place_of(root, step)] = step
    for place in {*(path for path in root.iterdir() if path.is_dir()), *newest}:
        found = stored_step(place)
        if place in newest:
            assert found is not None, f"{place} was announced and is gone"
            assert found >= newest[place]
        assert found is None or place_of(root, found) == place


def tidy(root: Path) -> None:
    """Remove what dead saves left, as `remesh prune --incomplete` does, and nothing else."""
    now = time.time() + A_WEEK
    for leftover in orphans.find_orphans(root, now=now, older_than=3600):
        if not leftover.kept:
            assert orphans.remove_orphan(leftover, root, now=now, older_than=3600)


@pytest.mark.timeout(7200)
@lengths("num_kills", 8, 1000)
def test_the_newest_announced_checkpoint_survives_every_kill(
    tmp_path: Path, num_kills: int, covered: Callable[[str], None]
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    announced: set[int] = set()
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < num_kills:
        assert number < 3 * num_kills, f"only {kills.total()} of {number} launches were killed"
        launch = draw(root, number, max(announced, default=0))
        with noted(f"launch {number}: {launch}"):
            if run(launch):
                kills[launch.way] += 1
            announced |= numbers_in(launch.announced)
            check(root, announced)
            number += 1
            if number % TIDY_EVERY == 0:
                tidy(root)
                check(root, announced)
        # What was announced long ago was looked at often enough.
        for step in sorted(step for step in announced if step % 2)[:-3]:
            announced.remove(step)
            shutil.rmtree(place_of(root, step), ignore_errors=True)
        launch.announced.unlink(missing_ok=True)
    covered(f"seed {seed()}: {kills.total()} kills {dict(kills)} in {number} launches")
