"""Damaged checkpoints of every format: no error but remesh's, nothing runs, nothing takes long.

The default run plays a few inputs of each format. The long one,

    make test-nightly

plays 10,000 of each and prints how they ended; `REMESH_CAMPAIGN_SEED` is what they are drawn from.
A failure names its number and what was changed.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.fuzz.checkpoints import WRITERS, make_checkpoint
from tests.fuzz.files import Files
from tests.fuzz.mutations import damaged
from tests.fuzz.trial import attempt, sound_state

_BY_COMMAND = 0.05
"""Share of the inputs on which the command line is tried."""


@cache
def _sound(name: str) -> tuple[Files, Any]:
    files = make_checkpoint(name)
    return files, sound_state(files)


@pytest.mark.timeout(6 * 3600)
@lengths("count", 8, 10_000)
@pytest.mark.parametrize("name", WRITERS)
def test_damaged_ones(name: str, count: int, covered: Callable[[str], None]) -> None:
    others = ("native", "torch_dcp", "zarr by zarr", name)
    (right, state), *_ = map(_sound, (name, *others))
    gc.freeze()  # torch and the sound ones, which the collector would walk over again and again
    ends: Counter[str] = Counter()
    for number in range(count):
        dice = dice_of(f"fuzz {name}", number)
        other, _ = _sound(dice.choice(others))
        files, what = damaged(right, other, dice)
        with noted(f"{name}, input {number}: {what}"):
            ends[attempt(files, state, by_command=dice.random() < _BY_COMMAND)] += 1
    covered(f"seed {seed()}: {count} inputs, {dict(ends.most_common())}")


@pytest.mark.parametrize("name", WRITERS)
def test_sound_checkpoints_are_read(name: str) -> None:
    files, state = _sound(name)
    assert attempt(files, state, by_command=False) in {"read", "MismatchError"}
    assert attempt(files, copy.deepcopy(state), by_command=True).startswith("exit codes 0/0/")
