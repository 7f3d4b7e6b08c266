"""How long campaigns are, and what they are drawn from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def lengths(name: str, short: int, whole: int) -> pytest.MarkDecorator:
    """Play a campaign in a short form, and whole where the tests marked nightly run.

    The name is that of the argument of the test that says how much it plays. `REMESH_CAMPAIGN` is
    the percentage of the whole form that is played, 100 by default.
    """
    nightly = pytest.param(max(short, whole * share() // 100), marks=pytest.mark.nightly)
    return pytest.mark.parametrize(name, [short, nightly])


def share() -> int:
    """The percentage of the long form that is played."""
    return int(os.environ.get("REMESH_CAMPAIGN", "100"))


def seed() -> int:
    return int(os.environ.get("REMESH_CAMPAIGN_SEED", "1"))


def dice_of(campaign: str, number: int) -> random.Random:
    """The dice of one run."""
    return random.Random(f"{campaign} {seed()} {number}")


@contextmanager
def noted(run: str) -> Iterator[None]:
    """A run: if it fails, the failure says which it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed()}, {run}")
        raise
