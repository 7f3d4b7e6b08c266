"""How long campaigns are, and what they are drawn from: the environment says."""

from __future__ import annotations

import os
import random


def num_runs(default: int, *, share: int = 1) -> int:
    """How many runs a campaign has.

    Args:
        default: If nothing is said.
        share: How many runs for each one that is asked for.
    """
    asked = os.environ.get("REMESH_CAMPAIGN")
    return default if asked is None else int(asked) * share


def seed() -> int:
    return int(os.environ.get("REMESH_CAMPAIGN_SEED", "1"))


def dice_of(campaign: str, number: int) -> random.Random:
    """The dice of one run."""
    return random.Random(f"{campaign} {seed()} {number}")
